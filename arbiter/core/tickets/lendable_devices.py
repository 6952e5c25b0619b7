"""Says which devices of a node may be lent from now, and how much waiting could ever bring there.

A device may be lent from while its memory was read lately, and while no engine whose ticket no
holder has named may still be growing on it.
"""

from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.state import CoreState, Node
from arbiter.core.tickets.budget import unpinned
from arbiter.core.types import DeviceKind
from arbiter.units import Bytes, DeviceId, Instant, after, since

COMPUTE = frozenset({DeviceKind.GPU, DeviceKind.CPU})


def compute_books(state: CoreState, node: Node) -> list[DeviceAccount]:
    """Returns the accounts of the devices of a node that compute."""
    books = state.ledger.books
    return [books[d] for d in node.computing if d in books]


def unpinned_bytes(book: DeviceAccount) -> Bytes:
    """Returns the most that waiting can ever bring on a device: its budget without what is pinned,
    because pinned models are never victims (B2)."""
    return unpinned(book.budget_bytes, book.pinned_bytes)


def is_readable(state: CoreState, node: Node, device: DeviceId, now: Instant) -> bool:
    """Says whether the memory of a device was read in this epoch and lately, and no engine that no
    holder has claimed may still be growing on it."""
    if node.heard_at is None or since(node.heard_at, now) >= state.settings.timeouts.reading:
        return False
    return device in node.readings and now >= _unclaimed_until(state, node, device)


def _unclaimed_until(state: CoreState, node: Node, device: DeviceId) -> Instant:
    """Returns until when an engine that no holder has claimed may still be growing on a device; an
    instant in the past where there is none."""
    if not node.unclaimed:
        return Instant(0)
    patience = state.settings.timeouts.reclaim_overdue
    first_seen = [e.first_seen for e in node.unclaimed.values() if device in e.measured]
    return after(max([state.settled_at, *first_seen]), patience) if first_seen else Instant(0)


def readable_devices(state: CoreState, node: Node) -> list[DeviceAccount]:
    """Returns the devices of a node that compute and may be lent from now."""
    books = compute_books(state, node)
    return [b for b in books if is_readable(state, node, b.device, state.now)]


def watch_claims(state: CoreState, node: Node) -> None:
    """Sets a timer for the node's next grant pass: the instant from which no unclaimed engine keeps
    its devices from being lent."""
    for book in compute_books(state, node) if node.unclaimed else ():
        over_at = _unclaimed_until(state, node, book.device)
        if state.now < over_at:
            state.timers.set(("queue", node.node), over_at)
