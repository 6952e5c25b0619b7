"""Pins tickets up to a share of each device, and logs where more is pinned than can be lent (B2,
C8).
"""

from collections.abc import Iterable

from arbiter.core.decisions import EventKind
from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.state import CoreState
from arbiter.core.tickets.budget import fraction_of, pinned_overcommit
from arbiter.core.tickets.lendable_devices import compute_books
from arbiter.errors import UnknownCapability, UnknownModel
from arbiter.units import Bytes, DeviceId, NodeId


def log_pinned_overcommit(state: CoreState, devices: Iterable[DeviceId]) -> None:
    """Logs devices on which more is pinned than they can lend: the table or a node has changed."""
    for device in devices:
        log_pinned_overcommit_on(state, state.ledger.books[device], Bytes(0))


def log_pinned_overcommit_on(state: CoreState, book: DeviceAccount, more: Bytes) -> None:
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
