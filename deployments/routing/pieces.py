"""Which replica was sent which prompts, by hashes of pieces of their text. Pure.

Only an engine's tokenizer knows where the blocks of a prompt end, and a front has none. A piece of
PIECE_CHARACTERS is about as long as a block of the CPU build (128 tokens), and its hash, like a
block's, covers all that comes before it, the tenant and the adapter: two prompts share as many
leading hashes as leading pieces. An engine reports by instants what it has evicted (`KeptKv`). An
error here costs a prefill, never an answer.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from math import inf
from typing import Any, NamedTuple

from arbiter.pool.layout import tenant_digest

PIECE_CHARACTERS = 512
HASH_BYTES = 8  # two pieces of 10 million share one with a chance of 3 in a million
PIECES_OF_A_PROMPT = 2_048  # a million characters; what follows is not looked at
PIECES_OF_A_MODEL = 20_000  # remembered for each replica, 3 MB: some 2.5 million tokens

# Where each API keeps its prompt, in the order in which templates write it.
_FIELDS = ("tools", "system", "instructions", "prompt", "input", "messages")


def pieces_of(fields: Mapping[str, Any], *owners: str) -> bytes:
    """The hashes of a prompt's whole pieces, one after the other. `owners`: tenant and model, whose
    KV no other may see. What is shorter than a piece has none."""
    digest = blake2b("\0".join(owners).encode(), digest_size=HASH_BYTES)
    hashes: list[bytes] = []
    rest: list[str] = []
    size = 0
    for text in _texts([fields.get(name) for name in _FIELDS]):
        rest.append(text)
        size += len(text)
        if size < PIECE_CHARACTERS:
            continue
        joined, at = "".join(rest), 0
        while at + PIECE_CHARACTERS <= size and len(hashes) < PIECES_OF_A_PROMPT:
            piece = joined[at : at + PIECE_CHARACTERS]
            digest.update(piece.encode(errors="surrogatepass"))
            hashes.append(digest.copy().digest())
            at += PIECE_CHARACTERS
        if len(hashes) == PIECES_OF_A_PROMPT:
            break
        rest, size = [joined[at:]], size - at
    return b"".join(hashes)


def _texts(value: Any) -> Iterator[str]:
    """All text in a JSON value, in one order however its objects are written. Does not recurse,
    because a client chooses how deep it nests."""
    stack = [value]
    while stack:
        match stack.pop():
            case str(text):
                yield f"{text}\n"
            case dict(members):
                for name in sorted(members, reverse=True):
                    stack += (members[name], name)
            case list(items):
                stack += reversed(items)
            case None:
                continue
            case number:
                yield f"{number}\n"


def split(hashes: bytes) -> list[bytes]:
    """The single hashes of `pieces_of`."""
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]


@dataclass(frozen=True, slots=True)
class KeptKv:
    """What an engine reports of the KV that it has retained, by the arrival of the requests that
    made it. Wall-clock seconds."""

    since_s: float = -inf  # nothing is kept of requests until then; inf: the engine keeps no KV
    # All is kept of requests after that. Of requests between the two times only the slab has the
    # KV, until its term is over. inf: the device keeps none.
    device_since_s: float = -inf
    # By digest of tenant, in hex: of a tenant at its cap the slab has only what was used after this
    capped_since_s: Mapping[str, float] = field(default_factory=dict)


class SentTime(NamedTuple):
    """The latest prompt of some pieces or key that a replica was sent. Wall-clock seconds."""

    at_s: float
    until_s: float = inf  # when the term ends for which its slab keeps the KV

    def merged(self, other: "SentTime") -> "SentTime":
        """The later of each of the two times."""
        return SentTime(max(self.at_s, other.at_s), max(self.until_s, other.until_s))


class SeenPieces:
    """The pieces that each replica was sent for each model, and when; beyond PIECES_OF_A_MODEL the
    least recently sent are forgotten. Times are wall-clock seconds, because replicas of other nodes
    report some."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], OrderedDict[bytes, SentTime]] = {}
        self._kept: dict[tuple[str, str], KeptKv] = {}
        self._models: dict[str, frozenset[str]] = {}  # by replica: the models of its last report

    def note(self, replica: str, model: str, pieces: Sequence[bytes], sent: SentTime) -> None:
        """Notes that a prompt went to a replica. Its tail is forgotten before its head."""
        if not pieces or sent.at_s <= self._kept_of(replica, model).since_s:
            return
        pieces_sent = self._seen.setdefault((replica, model), OrderedDict())
        for piece in reversed(pieces):
            before = pieces_sent.get(piece, sent)
            if before.at_s <= sent.at_s:
                pieces_sent[piece] = sent if before.until_s <= sent.until_s else sent.merged(before)
                pieces_sent.move_to_end(piece)
        while len(pieces_sent) > PIECES_OF_A_MODEL:
            pieces_sent.popitem(last=False)

    def share(
        self, replica: str, model: str, pieces: Sequence[bytes], tenant: str, now_s: float
    ) -> float:
        """The fraction of a prompt of a tenant, from its beginning on, that a replica was sent and
        has kept: 0 to 1."""
        pieces_sent = self._seen.get((replica, model))
        if not pieces_sent or not pieces:
            return 0.0
        kept = self._kept_of(replica, model)
        capped_s = _capped_s(kept, tenant)
        count = 0
        for piece in pieces:
            sent = pieces_sent.get(piece)
            if sent is None or not _is_kept(sent, kept, capped_s, now_s):
                break
            count += 1
        return count / len(pieces)

    def has_kept(self, replica: str, model: str, sent: SentTime, tenant: str, now_s: float) -> bool:
        """Whether a replica has kept the KV of what it was sent then, by its last report."""
        kept = self._kept_of(replica, model)
        return sent.at_s > kept.since_s and _is_kept(sent, kept, _capped_s(kept, tenant), now_s)

    def _kept_of(self, replica: str, model: str) -> KeptKv:
        return self._kept.get((replica, model), _NOTHING_KNOWN)

    def update(self, replica: str, models: Collection[str], kept: Mapping[str, KeptKv]) -> None:
        """Takes a replica's report: the models that it has, and by model what KV their engines have
        kept. Prompts that were sent for a model are forgotten when the last report had the model
        and this one has not; a model that no report had yet may still be loading. `since_s` of a
        model only grows, because a new engine has kept less than the last one. But it may fall from
        inf, which was of an engine that kept nothing."""
        for model, reported in kept.items():
            before = self._kept_of(replica, model)
            since_s = reported.since_s
            if before.since_s < inf:
                since_s = max(since_s, before.since_s)
            capped_s = {**before.capped_since_s, **reported.capped_since_s}
            self._kept[replica, model] = replace(reported, since_s=since_s, capped_since_s=capped_s)
            if since_s > before.since_s:
                pieces_sent = self._seen.get((replica, model), OrderedDict())
                for piece in [piece for piece, sent in pieces_sent.items() if sent.at_s <= since_s]:
                    del pieces_sent[piece]
        now = frozenset(models)
        for model in self._models.get(replica, now) - now:
            self._seen.pop((replica, model), None)
        self._models[replica] = now

    def forget_others(self, replicas: Collection[str]) -> None:
        """Forgets what is known of replicas that are not among these."""
        for replica in [name for name in self._models if name not in replicas]:
            del self._models[replica]
        for by_replica in (self._seen, self._kept):
            for key in [key for key in by_replica if key[0] not in replicas]:
                del by_replica[key]


_NOTHING_KNOWN = KeptKv()


def _capped_s(kept: KeptKv, tenant: str) -> float:
    """Since when the slab has a tenant's rows; -inf where the tenant is not at its cap."""
    if not kept.capped_since_s:
        return -inf
    return kept.capped_since_s.get(tenant_digest(tenant).hex(), -inf)


def _is_kept(sent: SentTime, kept: KeptKv, capped_s: float, now_s: float) -> bool:
    """Whether the KV of what was sent then, which is after `kept.since_s`, is still there."""
    return sent.at_s > kept.device_since_s or (sent.at_s > capped_s and sent.until_s > now_s)
