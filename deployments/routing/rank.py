"""Which replica of a capability a request should go to: pure, asked by deployments.router.

A model that has to be brought costs seconds, an adapter that has to be put into a slot milliseconds
to tens of them, a conversation without its cached prefix a prefill, and a longer queue a share of a
batch. So they are compared in that order, and the first that differs decides.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum


class ModelPresence(IntEnum):
    """What one replica has of a model, the better the higher."""

    COLD = 0
    ASLEEP = 1
    COMING = 2  # in its line or loading: whoever comes now waits for the same load
    RESIDENT = 3


# A replica with this many requests more than the least busy one is crowded: conversations and
# adapters move away from it. Every one more in a batch of a small model slowed all by a few
# hundredths, so four cost less than a prefill does.
CROWD_COUNT = 4
# A call was just sent somewhere to have its model brought: for so long others follow it, until the
# replica itself says what it has (it is asked each second, and a load may wait for its grant).
FOLLOW_S = 3.0
# Remembered conversations of one capability, about 3 MB; the longest unused are forgotten.
CONVERSATIONS = 10_000


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """One request, as far as it matters here."""

    model: str  # the one to be resident
    served: str  # what the engine is asked for: the model, or one of its adapters by full name
    conversation: str = ""  # with its tenant; empty: belongs to none


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """One replica, as far as it is known."""

    replica: str
    queue_count: int = 0
    is_full: bool = False  # takes no more now
    models: Mapping[str, int] = field(default_factory=dict)  # to Warmth, those above COLD
    adapters: Collection[str] = ()  # in slots, by full name


def rank(
    wish: RouteRequest,
    offers: Sequence[ReplicaState],
    *,
    stuck: str | None = None,
    sent: str | None = None,
) -> list[str]:
    """All replicas, best first. `stuck`: the one that holds the conversation; `sent`: the one to
    which the model's last call went a moment ago."""
    least_count = min((one.queue_count for one in offers), default=0)

    def price(one: ReplicaState) -> tuple[bool, int, bool, bool, int, str]:
        warmth = one.models.get(wish.model, ModelPresence.COLD)
        if one.replica == sent:  # it has not said so yet, perhaps
            warmth = max(warmth, ModelPresence.RESIDENT if sent == stuck else ModelPresence.COMING)
        is_crowded = one.queue_count >= least_count + CROWD_COUNT
        has_slot = wish.served == wish.model or wish.served in one.adapters
        return (
            one.is_full,
            -warmth,
            is_crowded or not has_slot,
            is_crowded or one.replica != stuck,
            one.queue_count,
            one.replica,
        )

    return [one.replica for one in sorted(offers, key=price)]


class RoutingHistory:
    """Where calls of one capability went. Times are seconds of any one clock."""

    def __init__(self) -> None:
        self._sent: dict[str, tuple[str, float]] = {}  # by model
        self._stuck: OrderedDict[tuple[str, str], str] = OrderedDict()

    def sent(self, model: str, now_s: float) -> str | None:
        replica, at_s = self._sent.get(model, ("", 0.0))
        return replica if replica and now_s - at_s < FOLLOW_S else None

    def stuck(self, wish: RouteRequest) -> str | None:
        return self._stuck.get((wish.conversation, wish.model)) if wish.conversation else None

    def chosen(self, wish: RouteRequest, replica: str, now_s: float) -> None:
        """The call goes to `replica`."""
        if not wish.model:
            return  # of a call that is not ours nothing is to be learned
        self._sent[wish.model] = replica, now_s
        if wish.conversation:
            key = wish.conversation, wish.model
            self._stuck[key] = replica
            self._stuck.move_to_end(key)
            if len(self._stuck) > CONVERSATIONS:
                self._stuck.popitem(last=False)

    def keep(self, replicas: Collection[str]) -> None:
        """Those that live; what is known of others is forgotten."""
        for key in [k for k, replica in self._stuck.items() if replica not in replicas]:
            del self._stuck[key]
        for model in [m for m, (replica, _) in self._sent.items() if replica not in replicas]:
            del self._sent[model]


class AdapterSlots:
    """The adapters of one replica's engines that are in a slot: the last ones used, as many as
    there are slots, for vLLM gives the slot unused longest to the next. By ticket, since a new
    engine begins with none."""

    def __init__(self) -> None:
        self._used: dict[str, OrderedDict[str, None]] = {}

    def note(self, ticket: str, served: str, slots: int) -> None:
        used = self._used.setdefault(ticket, OrderedDict())
        used[served] = None
        used.move_to_end(served)
        if len(used) > slots:
            used.popitem(last=False)

    def names(self, tickets: Collection[str]) -> list[str]:
        """Of the engines that serve now, sorted; what was known of others is forgotten."""
        self._used = {t: used for t, used in self._used.items() if t in tickets}
        return sorted({name for used in self._used.values() for name in used})
