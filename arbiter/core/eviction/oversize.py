"""Loads a model larger than a whole budget, where its configuration allows that (B6).

Everything idle leaves the device with the most to lend, but for what is pinned and leases that may
not be interrupted; then the model loads with what there is, is charged that, and what it takes
beyond is measured. Nothing else fits beside it.
"""

from collections.abc import Iterable

from arbiter.core.decisions import Reason
from arbiter.core.eviction.eligibility import may_leave
from arbiter.core.eviction.eviction import revoke
from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.ticket import Sizes, State, Ticket
from arbiter.core.state import CoreState
from arbiter.core.tickets.failed_swaps import note_evicted_for
from arbiter.core.tickets.lendable_devices import unpinned_bytes
from arbiter.core.types import Split
from arbiter.units import Bytes

ON_THE_MOVE = frozenset({State.LOADING, State.DRAINING})


def may_exceed_budget(ticket: Ticket) -> bool:
    """Says whether a ticket may be larger than any one device. Such a ticket may find room where a
    smaller ticket that must lie on one device does not, so a PlacementMemo proves nothing by it."""
    return ticket.split is not Split.NONE or ticket.allow_oversize


def evict_all_idle(
    state: CoreState, books: Iterable[DeviceAccount], ticket: Ticket
) -> Sizes | None:
    """Has everything idle leave the device with the most to lend. Returns what the ticket is
    granted there once it has left, in bytes by device; None until then."""
    book = max(books, key=lambda b: (unpinned_bytes(b), b.device), default=None)
    if book is None:
        return None
    for other in list(book.tickets.values()):
        if may_leave(state, other):
            note_evicted_for(state, ticket, other)
            revoke(state, other, Reason.SWAP, ticket)
    returning = [t for t in book.tickets.values() if _is_awaited(t)]
    return None if returning or book.free_bytes <= 0 else {book.device: Bytes(book.free_bytes)}


def _is_awaited(ticket: Ticket) -> bool:
    """Says whether an oversize load waits for a ticket to leave: its bytes are on their way back,
    or it may leave once it has loaded or is idle."""
    if ticket.state is State.RECLAIMING:
        return not ticket.reclaim_late
    if ticket.state in ON_THE_MOVE:
        return True
    stays = ticket.pinned or (ticket.lease is not None and not ticket.lease.terms.preemptible)
    return ticket.state is State.RESIDENT and ticket.inflight == 0 and not stays
