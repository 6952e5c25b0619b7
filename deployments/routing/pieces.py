"""Which replica was sent which prompts, by hashes of pieces of their text. Pure.

Only an engine's tokenizer knows where the blocks of a prompt end, and a front has none. A piece of
PIECE_CHARACTERS is about as long as a block of the CPU build (128 tokens), and its hash, like a
block's, covers all that comes before it, the tenant and the adapter: two prompts share as many
leading hashes as leading pieces. An engine says by a time what it has evicted: of what it was sent
until then, nothing counts as held. What is wrong here costs a prefill, never an answer.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from hashlib import blake2b
from math import inf
from typing import Any

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
    """All text in JSON, in one order however its objects are written; the stack is our own, because
    a client chooses how deep it nests."""
    waiting = [value]
    while waiting:
        match waiting.pop():
            case str(text):
                yield f"{text}\n"
            case dict(found):
                for name in sorted(found, reverse=True):
                    waiting += (found[name], name)
            case list(found):
                waiting += reversed(found)
            case None:
                continue
            case number:
                yield f"{number}\n"


def split(hashes: bytes) -> list[bytes]:
    """The single hashes of `pieces_of`."""
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]


class SeenPieces:
    """The pieces that each replica was sent for each model, and when; the least recently sent
    forgotten. Times are wall-clock seconds, because replicas of other nodes tell some."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], OrderedDict[bytes, float]] = {}
        self._kept_since_s: dict[tuple[str, str], float] = {}
        self._models: dict[str, frozenset[str]] = {}  # by replica, as it said last

    def note(self, replica: str, model: str, pieces: Sequence[bytes], sent_s: float) -> None:
        """Notes that a prompt went to a replica. Its tail is forgotten before its head."""
        if not pieces or not self.has_kept(replica, model, sent_s):
            return
        seen = self._seen.setdefault((replica, model), OrderedDict())
        for piece in reversed(pieces):
            if seen.get(piece, -inf) <= sent_s:
                seen[piece] = sent_s
                seen.move_to_end(piece)
        while len(seen) > PIECES_OF_A_MODEL:
            seen.popitem(last=False)

    def share(self, replica: str, model: str, pieces: Sequence[bytes]) -> float:
        """The fraction of a prompt, from its beginning on, that a replica was sent and has kept:
        0 to 1."""
        seen = self._seen.get((replica, model))
        if not seen or not pieces:
            return 0.0
        known = next((n for n, piece in enumerate(pieces) if piece not in seen), len(pieces))
        return known / len(pieces)

    def has_kept(self, replica: str, model: str, sent_s: float) -> bool:
        """Whether a replica has kept the KV of what it was sent then, as far as it has said."""
        return sent_s > self._kept_since_s.get((replica, model), -inf)

    def told(
        self, replica: str, models: Collection[str], kept_since_s: Mapping[str, float]
    ) -> None:
        """A replica says which models it has: it knows nothing more of those that it had before. A
        model that is on its way there is not said yet, so that only a loss counts. It says too
        since when it has kept what it was sent for a model. An engine that begins anew has less, so
        that time only grows, but after inf: a model whose engine kept nothing may have another that
        does."""
        for model, since_s in kept_since_s.items():
            known_s = self._kept_since_s.get((replica, model), -inf)
            if since_s > known_s or (known_s == inf and since_s < inf):
                self._kept_since_s[replica, model] = since_s
                seen = self._seen.get((replica, model), OrderedDict())
                for piece in [piece for piece, sent_s in seen.items() if sent_s <= since_s]:
                    del seen[piece]
        now = frozenset(models)
        for model in self._models.get(replica, now) - now:
            self._seen.pop((replica, model), None)
        self._models[replica] = now

    def keep(self, replicas: Collection[str]) -> None:
        """Forgets replicas that are not among these."""
        for replica in [name for name in self._models if name not in replicas]:
            del self._models[replica]
        for known in (self._seen, self._kept_since_s):
            for key in [key for key in known if key[0] not in replicas]:
                del known[key]
