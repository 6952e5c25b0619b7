"""Says where a ticket could go: devices that may be lent from, and how much waiting could ever
bring.
"""

from collections.abc import Iterable

from arbiter.core.decisions import EventKind
from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.state import CoreState, Node
from arbiter.core.tickets.budget import fraction_of, pinned_overcommit, unpinned
from arbiter.core.types import DeviceKind
from arbiter.errors import UnknownCapability, UnknownModel
from arbiter.units import Bytes, DeviceId, Instant, NodeId, after, since

COMPUTE = frozenset({DeviceKind.GPU, DeviceKind.CPU})


def compute_books(state: CoreState, node: Node) -> list[DeviceAccount]:
    """Returns the accounts of the devices of a node that compute."""
    books = state.ledger.books
    return [books[d] for d in node.computing if d in books]


def unpinned_bytes(book: DeviceAccount) -> Bytes:
    """Returns the most that waiting can ever bring on a device: its budget without what is pinned,
    because pinned models are never victims (B2)."""
    return unpinned(book.budget_bytes, book.pinned_bytes)


def flag_pinned(state: CoreState, devices: Iterable[DeviceId]) -> None:
    """Logs devices on which more is pinned than they can lend: the table or a node has changed."""
    for device in devices:
        flag_pinned_on(state, state.ledger.books[device], Bytes(0))


def flag_pinned_on(state: CoreState, book: DeviceAccount, more: Bytes) -> None:
    """Logs a device on which more is pinned than it can lend, with `more` about to be. What a
    pinned model needs is known once it asks, which it does at start (B2)."""
    pinned = Bytes(book.pinned_bytes + more)
    if over := pinned_overcommit(book.budget_bytes, pinned):
        lent = book.budget_bytes
        state.log(
            EventKind.PINNED_OVERCOMMIT, size=over, device=book.device, pinned=pinned, budget=lent
        )


def cap_pins(state: CoreState, *nodes: NodeId) -> None:
    """Pins what is to be pinned on these nodes, up to a share of each device that computes (C8).
    The oldest ticket comes first, after a restart the first that rejoined; what comes on top of
    that is a victim like any other until there is room for it."""
    for name in nodes:
        node = state.nodes.get(name)
        books = compute_books(state, node) if node else []
        holding = {
            ticket_id: ticket for book in books for ticket_id, ticket in book.tickets.items()
        }
        pins = [ticket for ticket in holding.values() if is_to_be_pinned(state, ticket)]
        room = {b.device: _most_pinned_bytes(state, b) for b in books}
        for ticket in sorted(pins, key=lambda e: (e.opened, e.id)):
            sizes = {device: ticket.charge(device) for device in room}
            over = next((d for d, size in sizes.items() if size > room[d]), None)
            if over is None:
                room = {d: Bytes(left - sizes[d]) for d, left in room.items()}
            elif ticket.pinned:
                most = _most_pinned_bytes(state, state.ledger.books[over])
                state.log(EventKind.PIN_OVER_CAP, ticket, size=sizes[over], device=over, cap=most)
            state.ledger.pin(ticket, over is None)


def _most_pinned_bytes(state: CoreState, book: DeviceAccount) -> Bytes:
    return fraction_of(book.budget_bytes, state.settings.pinned_most_fraction)


def is_to_be_pinned(state: CoreState, ticket: Ticket) -> bool:
    """Says whether a ticket is to be pinned as far as its devices have room for pins. What is being
    reclaimed is not, though it stays charged."""
    if ticket.lease or ticket.state is State.RECLAIMING:
        return False
    try:
        return state.is_pinned(ticket.model_name)
    except (UnknownCapability, UnknownModel):
        return False


def is_readable(state: CoreState, node: Node, device: DeviceId, now: Instant) -> bool:
    """Says whether the memory of a device was read in this epoch and lately, and no engine that no
    holder has claimed may still be growing on it."""
    if node.heard_at is None or since(node.heard_at, now) >= state.settings.timeouts.reading:
        return False
    return device in node.readings and now >= _unclaimed_until(state, node, device)


def _unclaimed_until(state: CoreState, node: Node, device: DeviceId) -> Instant:
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
    """Has the node's queue looked at again once claims to engines on its devices are over."""
    for book in compute_books(state, node) if node.unclaimed else ():
        over_at = _unclaimed_until(state, node, book.device)
        if state.now < over_at:
            state.timers.set(("queue", node.node), over_at)
