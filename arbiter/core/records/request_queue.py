"""The line of waiting tickets: per node, in the order of the admission policy (SPEC C6).

A ticket competes only with those of its own node, for its holder loads there. It may be overtaken
by later ones, so often and for so long; then it is *due*, and stands before all that are not.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from arbiter.core.types import Priority
from arbiter.core.view import Key, QueuedRequest
from arbiter.units import Bytes, HolderId, Instant, NodeId, TicketId

NO_HOLDER = HolderId("")
WAKE_URGENCY = (
    0  # before every priority: a sleeper is looked at by itself, for it wakes where it is
)


@dataclass(slots=True)
class QueueEntry:
    waiter: QueuedRequest
    key: Key  # its place
    model: str  # capability and model: what the per-model bound counts
    node: NodeId
    deadline: Instant | None
    holder: HolderId = NO_HOLDER
    is_of_gang: bool = False
    predicted_at: Instant | None = None  # when it was expected to serve, as it joined
    overtaken_count: int = 0
    is_due: bool = False
    need_bytes: Bytes = Bytes(0)
    standing: str = ""  # of its tenant: see tenants.standing
    version: int = -1  # of the estimates that say so


@dataclass(slots=True)
class QueueStats:
    """What is known of all who wait on one node, so that a long line need not be walked."""

    urgencies: Counter[int] = field(default_factory=Counter)  # a sleeper that wakes: as WAKES
    version: int = -1  # of the estimates
    known_count: int = 0  # whose need is known by that version
    least_bytes: Bytes = Bytes(0)  # none of those needs less
    standings: Counter[str] = field(default_factory=Counter)

    def count(self, waiting: QueueEntry, more: int) -> None:
        self.urgencies[urgency_of(waiting.waiter)] += more
        self.standings[waiting.standing] += more
        if waiting.version == self.version:
            self.known_count += more
            self.least_bytes = min(self.least_bytes, waiting.need_bytes)

    def know(self, waiting: QueueEntry, need: Bytes, version: int) -> None:
        if version != self.version:
            self.version, self.known_count, self.least_bytes = version, 0, need
        self.known_count += waiting.version != version
        self.least_bytes = min(self.least_bytes, need)
        waiting.need_bytes, waiting.version = need, version

    def needs_at_least(self, need: Bytes, version: int) -> bool:
        """Each of them, as far as all of them are known."""
        is_known = self.version == version and self.known_count == self.urgencies.total()
        return is_known and self.least_bytes >= need

    def is_of_one_standing(self) -> bool:
        return sum(1 for count in self.standings.values() if count) == 1


def urgency_of(waiter: QueuedRequest) -> int:
    return WAKE_URGENCY if waiter.is_asleep else int(waiter.priority)  # an enum hashes slowly


class RequestQueue:
    def __init__(self, place_of: Callable[[QueuedRequest], Key]) -> None:
        self._place_of = place_of
        self._waiting: dict[TicketId, QueueEntry] = {}
        self._order: dict[NodeId, list[tuple[Key, TicketId]]] = {}
        self._walked: set[NodeId] = set()  # see walk
        self._crowds: dict[NodeId, QueueStats] = {}
        self._of_model: dict[str, dict[TicketId, None]] = {}
        self._where: dict[str, Counter[NodeId]] = {}  # by the standing of who waits there
        self._loads: Counter[tuple[NodeId, str]] = Counter()  # in flight
        self._turn = 0
        self.changed: set[NodeId] = set()

    # -- coming and going ----------------------------------------------------------------------

    def add(
        self,
        ticket: TicketId,
        model: str,
        node: NodeId,
        now: Instant,
        deadline: Instant | None = None,
        priority: Priority = Priority.NORMAL,
        *,
        holder: HolderId = NO_HOLDER,
        is_of_gang: bool = False,
        is_asleep: bool = False,
        turn_bytes: Bytes = Bytes(0),
        standing: str = "",
    ) -> QueueEntry:
        self._turn += 1
        is_warm = is_asleep or self._loads[node, model] > 0
        waiter = QueuedRequest(ticket, now, self._turn, priority, is_warm, is_asleep, turn_bytes)
        waiting = QueueEntry(
            waiter, (), model, node, deadline, holder, is_of_gang, standing=standing
        )
        self._waiting[ticket] = waiting
        self._of_model.setdefault(model, {})[ticket] = None
        if standing not in self._where:
            self._where[standing] = Counter()
        self._where[standing][node] += 1
        self._insert(waiting)
        return waiting

    def drop(self, ticket: TicketId) -> None:
        if waiting := self._waiting.pop(ticket, None):
            self._remove(waiting)
            del self._of_model[waiting.model][ticket]
            if not self._of_model[waiting.model]:
                del self._of_model[waiting.model]
            where = self._where[waiting.standing]
            where[waiting.node] -= 1
            if not where[waiting.node]:
                del where[waiting.node]

    def _insert(self, waiting: QueueEntry) -> None:
        waiter = waiting.waiter
        place = (waiter.asked, waiter.turn) if waiting.is_due else self._place_of(waiter)
        waiting.key = (not waiting.is_due, *place)
        insort(self._own_order(waiting.node), (waiting.key, waiter.ticket))
        if waiting.node not in self._crowds:
            self._crowds[waiting.node] = QueueStats()
        self._crowds[waiting.node].count(waiting, 1)
        self.changed.add(waiting.node)

    def _remove(self, waiting: QueueEntry) -> None:
        order = self._own_order(waiting.node)
        del order[bisect_left(order, (waiting.key, waiting.waiter.ticket))]
        self._crowds[waiting.node].count(waiting, -1)
        if not order:
            del self._order[waiting.node], self._crowds[waiting.node]
        self.changed.add(waiting.node)

    def _own_order(self, node: NodeId) -> list[tuple[Key, TicketId]]:
        """To be changed: a copy while somebody walks it."""
        order = self._order.setdefault(node, [])
        if node in self._walked:
            self._walked.discard(node)
            order = self._order[node] = list(order)
        return order

    # -- moving up -----------------------------------------------------------------------------

    def hurry(self, ticket: TicketId, priority: Priority) -> None:
        """Somebody more urgent waits for it too."""
        waiting = self._waiting[ticket]
        self._change(waiting, replace(waiting.waiter, priority=priority))

    def wait_longer(self, ticket: TicketId, deadline: Instant | None) -> None:
        """Somebody waits for it as well who can wait until then; None: as long as it takes."""
        waiting = self._waiting[ticket]
        if waiting.deadline is not None and (deadline is None or deadline > waiting.deadline):
            waiting.deadline = deadline

    def loading(self, node: NodeId, model: str, more: int) -> None:
        """A load of the model begins (1) or ends (-1): it is warm meanwhile (SPEC C6)."""
        was_warm = self._loads[node, model] > 0
        self._loads[node, model] += more
        is_warm = self._loads[node, model] > 0
        if not is_warm:
            del self._loads[node, model]
        if is_warm != was_warm:
            for ticket in list(self._of_model.get(model, ())):
                waiting = self._waiting[ticket]
                if waiting.node == node and not waiting.waiter.is_asleep:
                    self._change(waiting, replace(waiting.waiter, is_warm=is_warm))

    def overtaken(self, waiting: QueueEntry, most_count: int) -> None:
        waiting.overtaken_count += 1
        if waiting.overtaken_count >= most_count:
            self.ripen(waiting)

    def ripen(self, waiting: QueueEntry) -> None:
        """Nobody overtakes it any more."""
        if not waiting.is_due:
            self._remove(waiting)
            waiting.is_due = True
            self._insert(waiting)

    def _change(self, waiting: QueueEntry, waiter: QueuedRequest) -> None:
        self._remove(waiting)
        waiting.waiter = waiter
        self._insert(waiting)

    def reorder(self, place_of: Callable[[QueuedRequest], Key]) -> None:
        """Another policy."""
        self._place_of = place_of
        for waiting in self._waiting.values():
            self._change(waiting, waiting.waiter)

    # -- looking -------------------------------------------------------------------------------

    def is_ahead(self, ticket: TicketId, other: TicketId) -> bool:
        """Both wait on one node; `ticket` comes first."""
        return (self._waiting[ticket].key, ticket) < (self._waiting[other].key, other)

    def find(self, ticket: TicketId) -> QueueEntry | None:
        return self._waiting.get(ticket)

    def at(self, node: NodeId) -> list[QueueEntry]:
        """Who waits there, first to last."""
        return [self._waiting[ticket] for _, ticket in self._order.get(node, ())]

    def walk(self, node: NodeId) -> Iterator[QueueEntry]:
        """The same one by one, as they stand when it begins; who has left meanwhile is left out.
        Most walks end soon, so the order is copied only when it changes under one."""
        is_first = node not in self._walked
        self._walked.add(node)
        try:
            for _, ticket in self._order.get(node, ()):
                if waiting := self._waiting.get(ticket):
                    yield waiting
        finally:
            if is_first:
                self._walked.discard(node)

    def where(self, standing: str) -> list[NodeId]:
        """On which nodes somebody of this tenant waits."""
        return list(self._where.get(standing, ()))

    def first(self, node: NodeId, count: int) -> list[QueueEntry]:
        return [self._waiting[ticket] for _, ticket in self._order.get(node, [])[:count]]

    def ahead_count(self, waiting: QueueEntry) -> int:
        return bisect_left(self._order[waiting.node], (waiting.key, waiting.waiter.ticket))

    def weigh(self, node: NodeId) -> None:
        """What the least of them needs, from all of them."""
        crowd = self.crowd(node)
        known = [w.need_bytes for w in self.at(node) if w.version == crowd.version]
        crowd.least_bytes = min(known, default=Bytes(0))

    def crowd(self, node: NodeId) -> QueueStats:
        return self._crowds.get(node) or QueueStats()

    def is_empty(self, node: NodeId) -> bool:
        return node not in self._order

    def of_model(self, model: str) -> list[TicketId]:
        return list(self._of_model.get(model, ()))

    def tickets(self) -> list[TicketId]:
        """All of them, first to last as if they stood in one line."""
        return [t for _, t in sorted(row for order in self._order.values() for row in order)]

    @property
    def nodes(self) -> list[NodeId]:
        return list(self._order)

    def count(self, model: str) -> int:
        return len(self._of_model.get(model, ()))

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, ticket: TicketId) -> bool:
        return ticket in self._waiting
