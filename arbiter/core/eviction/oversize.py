"""A model larger than a whole budget, where its configuration allows that (B6).

Everything idle and unpinned leaves the device with the most to lend; then it loads with what there
is, is charged that, and what it takes beyond is measured. Nothing else fits beside it.
"""

from collections.abc import Iterable

from arbiter.core.decisions import Reason
from arbiter.core.eviction.eligibility import may_leave
from arbiter.core.eviction.eviction import revoke
from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.ticket import Sizes, State, Ticket
from arbiter.core.state import CoreState
from arbiter.core.tickets.device_limits import on_demand_of
from arbiter.core.tickets.loads import note_evicted_for
from arbiter.core.types import Split
from arbiter.units import Bytes

ON_THE_MOVE = frozenset({State.LOADING, State.DRAINING})


def may_exceed_budget(entry: Ticket) -> bool:
    """It may find room where one that needs less and must lie on one device does not: so what is
    said of all who need as much (line.Crowd) is never said of it."""
    return entry.split is not Split.NONE or entry.allow_oversize


def evict_all_idle(state: CoreState, books: Iterable[DeviceAccount], entry: Ticket) -> Sizes | None:
    """What it is granted once nobody idle is left there; None: they have been asked to leave."""
    book = max(books, key=lambda b: (on_demand_of(b), b.device), default=None)
    if book is None:
        return None
    for other in list(book.entries.values()):
        if may_leave(state, other):
            note_evicted_for(state, entry, other)
            revoke(state, other, Reason.SWAP, entry)
    left = [e for e in book.entries.values() if _returning_bytes(e)]
    return None if left or book.free_bytes <= 0 else {book.device: Bytes(book.free_bytes)}


def _returning_bytes(entry: Ticket) -> bool:
    """Its bytes are awaited, or will be."""
    if entry.state is State.RECLAIMING:
        return not entry.reclaim_late
    is_idle = entry.inflight == 0 and not entry.pinned
    return entry.state in ON_THE_MOVE or (entry.state is State.RESIDENT and is_idle)
