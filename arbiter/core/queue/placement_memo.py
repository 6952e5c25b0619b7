"""Knows which queued tickets a pass need not try, so that 10,000 cost as little as a few.

The bar is 200 us for one event with 10,000 tickets queued on a node (N2); a try costs about 10 us.
"""

from arbiter.core.eviction import oversize
from arbiter.core.queue import placement
from arbiter.core.records.request_queue import QueueEntry, QueueStats, urgency_of
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.state import CoreState
from arbiter.core.tickets.lendable_devices import compute_books
from arbiter.core.types import Priority
from arbiter.units import Bytes


class PlacementMemo:
    """Keeps what a pass has found unplaceable, and what it has not walked yet.

    Invariant: a ticket that was tried and found no room, for want of bytes alone, proves the same
    of each later ticket that needs no less, is no more urgent and belongs to the same quota group,
    because within a pass bytes are only taken: those of victims are promised to their asker. Three
    shortcuts follow, each of which leaves the decisions as they would be without it:

    - `covers`: a ticket for which this is proved is not tried;
    - `can_skip`: nor looked up, if its need is known by the present version of the estimates;
    - `can_stop`: nor walked to, if this is proved of the whole rest of the queue, by its least need
      and its urgencies, which `QueueStats` keeps across passes.

    Aged tickets and wakes are always tried: an aged ticket reserves devices, and an asleep ticket
    competes only for the devices that it is on.
    """

    def __init__(self, stats: QueueStats) -> None:
        self._unplaceable: list[tuple[Bytes, Priority, str]] = []
        self._judged_count = 0  # of `_unplaceable`, when the rest was last judged
        self._unwalked = dict(stats.urgencies)

    def note(self, need: Bytes, priority: Priority, quota_group: str) -> None:
        """Notes a ticket that found no room for want of bytes."""
        self._unplaceable.append((need, priority, quota_group))

    def walk_past(self, queued: QueueEntry) -> None:
        """Counts a ticket as no longer part of the rest, before it is tried."""
        self._unwalked[urgency_of(queued.request)] -= 1

    def covers(self, need: Bytes, priority: Priority, quota_group: str) -> bool:
        """Says whether a ticket tried before proves that this one is unplaceable."""
        for least, most_urgent, whose in self._unplaceable:
            if need >= least and priority >= most_urgent and quota_group == whose:
                return True
        return False

    def can_skip(self, queued: QueueEntry, version: int) -> bool:
        """Says whether a ticket need not be looked up: most of a long queue."""
        request = queued.request
        if queued.estimates_version != version or queued.is_aged or request.is_asleep:
            return False
        return self.covers(queued.need_bytes, request.priority, queued.quota_group)

    def can_stop(self, state: CoreState, walked: QueueEntry) -> bool:
        """Says whether the rest behind `walked` is unplaceable as well. Judged anew only when
        another ticket was found to be; where tenants differ, each has bytes of its own."""
        if walked.is_aged or len(self._unplaceable) == self._judged_count:
            return False
        self._judged_count = len(self._unplaceable)
        stats = state.queue.stats(walked.node)
        if state.tenants and not stats.is_of_one_quota_group():
            return False
        need, priority, _ = self._unplaceable[-1]
        if any(count > 0 and urgency < priority for urgency, count in self._unwalked.items()):
            return False
        return stats.needs_at_least(need, state.estimates.version)


def need_of(state: CoreState, ticket: Ticket, queued: QueueEntry, most: Bytes) -> Bytes:
    """Returns what a queued ticket will be granted; the estimates are asked anew only when they
    have changed. `most`: see placement.estimated_bytes."""
    version = state.estimates.version
    if queued.estimates_version != version:
        need = placement.estimated_bytes(state, ticket, most)
        if oversize.may_exceed_budget(ticket):
            queued.note_need(need, queued.estimates_version)  # known, but proves nothing of others
        else:
            state.queue.stats(ticket.node).note_need(queued, need, version)
    return queued.need_bytes


def foresee_need(state: CoreState, ticket: Ticket) -> None:
    """Notes a ticket's need as it joins, so that no pass has to walk to it to learn it. A ticket
    of which more must be known than its need is left to its turn."""
    queued = state.queue.find(ticket.id)
    node = state.nodes.get(ticket.node)
    is_special = (
        ticket.gang or ticket.is_prefetch or ticket.role in state.settings.one_resident_roles
    )
    is_special = is_special or oversize.may_exceed_budget(ticket)
    if queued is None or node is None or is_special or ticket.state is not State.QUEUED:
        return
    books = compute_books(state, node)
    most = placement.most_unpinned_bytes(books)
    need = placement.estimated_bytes(state, ticket, most)
    if books and need <= most:
        state.queue.stats(ticket.node).note_need(queued, need, state.estimates.version)
