"""Ranks the replicas of a capability for one request. Pure; deployments.routing.router asks it.

Two replicas are compared by these, in this order, and the first difference decides: whether it is
full, what it has of the model, whether the adapter has a slot there, whether the last request of
the key went there, whether most of the prompt was sent there, and how many requests it has, running
ones included. Key and prompt count until the engine there has evicted their KV. A model that
must be loaded costs seconds, an adapter that must be put into a slot milliseconds to tens of them,
a conversation without its cached prefix a prefill, and a longer queue a share of a batch. An
overloaded replica, with OVERLOAD_COUNT or more requests above the least busy one, is not preferred
for adapter, key and prompt.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf

from deployments.routing.pieces import SeenPieces, SentTime


class ModelPresence(IntEnum):
    """What one replica has of a model, the better the higher."""

    COLD = 0
    ASLEEP = 1
    COMING = 2  # queued or loading: a request that comes now waits for the same load
    RESIDENT = 3


# A replica with this many requests more than the least busy one is overloaded: neither adapter, key
# nor prompt make it preferred. Each further request in a batch of a small model slowed all of them
# by a few hundredths, so four cost less than a prefill does.
OVERLOAD_COUNT = 4
# Seconds for which calls follow the call that went to a replica to have its model loaded, until the
# replica itself says what it has (it is asked each second, and a load may wait for its grant).
FOLLOW_S = 3.0
# Of a prompt's pieces, how many a replica must have been sent to be preferred for it (G3).
HELD_SHARE = 0.7
# Remembered keys of one capability, about 3 MB; the least recently used are forgotten.
KEYS = 10_000


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What routing needs to know of one request."""

    model: str  # must be resident
    served: str  # what the engine is asked for: the model, or one of its adapters by full name
    key: str = ""  # of its KV, with its tenant; empty: it has none
    pieces: Sequence[bytes] = ()  # of its prompt
    refused_nodes: Collection[str] = ()  # which do not load its model
    tenant: str = ""
    stays_s: float = inf  # for which a slab keeps its KV after it


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """What is known of one replica."""

    replica: str
    queue_count: int = 0
    is_full: bool = False  # it has as many requests as it may have
    # ModelPresence by model name; models that are COLD there are left out.
    models: Mapping[str, int] = field(default_factory=dict)
    adapters: Collection[str] = ()  # in slots, by full name
    held_share: float = 0.0  # of the request's pieces, how many it was sent and has kept
    node: str = ""


def rank(
    request: RouteRequest,
    replicas: Sequence[ReplicaState],
    *,
    sticky: str | None = None,
    followed: str | None = None,
) -> list[str]:
    """Returns the replicas, best first: all, but for those on nodes that refused the request,
    unless there are no others. `sticky`: the replica that holds the KV of the request's key;
    `followed`: the replica to which the model's last call went, within FOLLOW_S."""
    replicas = [r for r in replicas if r.node not in request.refused_nodes] or replicas
    least_count = min((replica.queue_count for replica in replicas), default=0)

    def sort_key(state: ReplicaState) -> tuple[bool, int, bool, bool, bool, int, str]:
        presence = state.models.get(request.model, ModelPresence.COLD)
        if state.replica == followed:  # its last report may be older than that call
            expected = ModelPresence.RESIDENT if followed == sticky else ModelPresence.COMING
            presence = max(presence, expected)
        is_overloaded = state.queue_count >= least_count + OVERLOAD_COUNT
        has_slot = request.served == request.model or request.served in state.adapters
        return (
            state.is_full,
            -presence,
            is_overloaded or not has_slot,
            is_overloaded or state.replica != sticky,
            is_overloaded or state.held_share < HELD_SHARE,
            state.queue_count,
            state.replica,
        )

    return [state.replica for state in sorted(replicas, key=sort_key)]


class RoutingHistory:
    """Remembers where calls of one capability went. Times are wall-clock seconds."""

    def __init__(self) -> None:
        # By model, the replica to which its last call went, and when.
        self._last_sent: dict[str, tuple[str, float]] = {}
        # By key and served name, the replica to which the last call of the key went, and when.
        self._sticky: OrderedDict[tuple[str, str], tuple[str, SentTime]] = OrderedDict()
        self.seen = SeenPieces()

    def followed(self, model: str, now_s: float) -> str | None:
        """The replica to which the model's last call went within FOLLOW_S, if any."""
        replica, at_s = self._last_sent.get(model, ("", 0.0))
        # Negative where the clock has stepped back.
        return replica if replica and 0 <= now_s - at_s < FOLLOW_S else None

    def sticky(self, request: RouteRequest, now_s: float) -> str | None:
        """The replica that has the KV of the request's key: it went there last, and the replica has
        not lost what was sent at that time."""
        replica, sent = self._sticky.get((request.key, request.served), ("", SentTime(0.0)))
        has_it = replica and self.seen.has_kept(replica, request.model, sent, request.tenant, now_s)
        return replica if has_it else None

    def share(self, request: RouteRequest, replica: str, now_s: float) -> float:
        """The fraction of the request's prompt that a replica was sent and has kept."""
        return self.seen.share(replica, request.model, request.pieces, request.tenant, now_s)

    def note_sent(
        self, request: RouteRequest, replica: str, now_s: float, sent_s: float | None = None
    ) -> None:
        """Notes that a call goes to a replica. `sent_s`: when, no later than its engine has it;
        None: now."""
        if not request.model:
            return  # a call that is no InferenceCall
        sent_s = now_s if sent_s is None else sent_s
        sent = SentTime(sent_s, sent_s + request.stays_s)
        self._last_sent[request.model] = replica, now_s
        self.seen.note(replica, request.model, request.pieces, sent)
        if request.key:
            key = request.key, request.served
            replica_before, before = self._sticky.get(key, (replica, sent))
            self._sticky[key] = replica, sent.merged(before) if replica_before == replica else sent
            self._sticky.move_to_end(key)
            if len(self._sticky) > KEYS:
                self._sticky.popitem(last=False)

    def forget_others(self, replicas: Collection[str]) -> None:
        """Forgets what is known of replicas that are not among these."""
        self.seen.forget_others(replicas)
        for key in [k for k, (replica, _) in self._sticky.items() if replica not in replicas]:
            del self._sticky[key]
        for model in [m for m, (replica, _) in self._last_sent.items() if replica not in replicas]:
            del self._last_sent[model]


class AdapterSlots:
    """The adapters of one replica's engines that are in a slot: the last ones used, as many as
    there are slots, because vLLM gives the least recently used slot to the next. By ticket, because
    a new engine begins with none."""

    def __init__(self) -> None:
        self._used: dict[str, OrderedDict[str, None]] = {}

    def note(self, ticket: str, served: str, slots: int) -> None:
        """Notes that a request for an adapter goes to the engine of a ticket, which has so many
        slots."""
        used = self._used.setdefault(ticket, OrderedDict())
        used[served] = None
        used.move_to_end(served)
        if len(used) > slots:
            used.popitem(last=False)

    def names(self, tickets: Collection[str]) -> list[str]:
        """Names in slots of the engines that serve now, sorted; forgets other engines."""
        self._used = {t: used for t, used in self._used.items() if t in tickets}
        return sorted({name for used in self._used.values() for name in used})
