"""Knows which queued tickets a pass need not try, so that 10,000 cost as little as a few.

The bar is 200 us for one event with 10,000 tickets queued on a node (N2); a try costs about 10 us.
"""

from arbiter.core.eviction import oversize
from arbiter.core.queue import placement
from arbiter.core.records.request_queue import QueueEntry, QueueStats, urgency_of
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.state import CoreState
from arbiter.core.tickets.device_limits import compute_books, on_demand_of
from arbiter.core.types import Priority
from arbiter.units import Bytes, Instant, Span


class PlacementMemo:
    """Keeps what a pass has found unplaceable, and what it has not walked yet.

    Invariant: a ticket that was tried and found no room, for want of bytes alone, proves the same
    of each later ticket that needs no less, is no more urgent and belongs to the same quota group,
    because within a pass bytes are only taken: those of victims are promised to their asker. A
    ticket that waits for cheaper victims (C4) stands for those alone whose deadline allows that
    wait. Three shortcuts follow, each of which leaves the decisions as they would be without it,
    but that a larger ticket may share such a wait though cheaper victims do not suffice for it:

    - `covers`: a ticket for which this is proved is not tried;
    - `can_skip`: nor looked up, if its need is known by the present version of the estimates;
    - `can_stop`: nor walked to, if this is proved of the whole rest of the queue, by its least need
      and its urgencies, which `QueueStats` keeps across passes.

    Aged tickets and wakes are always tried: an aged ticket reserves devices, and an asleep ticket
    competes only for the devices that it is on.
    """

    def __init__(self, stats: QueueStats) -> None:
        self._found: list[tuple[Bytes, Priority, str, Instant]] = []
        self._judged_count = 0  # of `_found`, when the rest was last judged
        self._unwalked = dict(stats.urgencies)
        self._unwalked_deadlines_count = stats.deadlines_count

    def note(
        self, waiting: QueueEntry, need: Bytes, priority: Priority, until: Instant | None
    ) -> None:
        """Notes a ticket that found no room for want of bytes. `until`: it could have made room,
        but waits so long for cheaper victims."""
        self._found.append((need, priority, waiting.quota_group, until or Instant(0)))

    def walk_past(self, waiting: QueueEntry) -> None:
        """Counts a ticket as no longer part of the rest, before it is tried."""
        self._unwalked[urgency_of(waiting.request)] -= 1
        self._unwalked_deadlines_count -= waiting.deadline is not None

    @property
    def has_deadlines_left(self) -> bool:
        """Says whether a ticket with a deadline is among the rest."""
        return self._unwalked_deadlines_count > 0

    def covers(self, waiting: QueueEntry, need: Bytes, priority: Priority) -> bool:
        """Says whether a ticket tried before proves that this one is unplaceable."""
        group = waiting.quota_group
        for least, most_urgent, whose, until in self._found:
            if need >= least and priority >= most_urgent and group == whose:
                if waiting.can_wait_until >= until:
                    return True
        return False

    def can_skip(self, waiting: QueueEntry, version: int) -> bool:
        """Says whether a ticket need not be looked up: most of a long queue."""
        request = waiting.request
        if waiting.version != version or waiting.is_aged or request.is_asleep:
            return False
        return self.covers(waiting, waiting.need_bytes, request.priority)

    def can_stop(self, state: CoreState, walked: QueueEntry) -> bool:
        """Says whether the rest behind `walked` is unplaceable as well. Judged anew only when
        another ticket was found to be; where tenants differ, each has bytes of its own."""
        if walked.is_aged or len(self._found) == self._judged_count:
            return False
        need, priority, _, until = self._found[-1]
        stats = state.queue.stats(walked.node)
        if self.has_deadlines_left and stats.soonest < until:
            return False
        self._judged_count = len(self._found)
        if state.tenants and not stats.is_of_one_quota_group():
            return False
        if any(count > 0 and urgent < priority for urgent, count in self._unwalked.items()):
            return False
        return stats.needs_at_least(need, state.estimates.version)


def need_of(state: CoreState, entry: Ticket, waiting: QueueEntry, largest: Bytes) -> Bytes:
    """Returns what a queued ticket will be granted; the estimates are asked anew only when they
    have changed. `largest`: the largest budget of its node."""
    version = state.estimates.version
    if waiting.version != version:
        need = placement.estimated_bytes(state, entry, largest)
        _note_lead(state, entry, waiting)
        if oversize.may_exceed_budget(entry):
            waiting.note_need(need, waiting.version)  # known, but proves nothing of others
        else:
            state.queue.stats(entry.node).know(waiting, need, version)
    return waiting.need_bytes


def foresee_need(state: CoreState, entry: Ticket) -> None:
    """Notes a ticket's need as it joins, so that no pass has to walk to it to learn it. A ticket
    of which more must be known than its need is left to its turn."""
    waiting = state.queue.find(entry.ticket)
    node = state.nodes.get(entry.node)
    is_special = entry.gang or entry.is_prefetch or entry.role in state.settings.one_resident_roles
    is_special = is_special or oversize.may_exceed_budget(entry)
    if waiting is None or node is None or is_special or entry.state is not State.QUEUED:
        return
    books = compute_books(state, node)
    largest = max((b.budget_bytes for b in books), default=Bytes(0))
    need = placement.estimated_bytes(state, entry, largest)
    if any(need <= on_demand_of(b) for b in books):
        _note_lead(state, entry, waiting)
        state.queue.stats(entry.node).know(waiting, need, state.estimates.version)


def _note_lead(state: CoreState, entry: Ticket, waiting: QueueEntry) -> None:
    """Notes how long before its deadline a ticket must have room."""
    if waiting.deadline is not None:
        load = state.estimates.load_time(entry.model_key, entry.need.weights_bytes)
        waiting.note_lead(Span(state.estimates.turnover(entry.capability) + load))
