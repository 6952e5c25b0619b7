"""Devices whose driver names no sizes per process (A16): only a total is known.

The agent measures the bytes of all engines on such a device together, by how much the device has
filled since no engine was there. This module splits the total by current grants. A split share is
inferred, so it neither ends an asleep ticket nor teaches a peak. Whether a model sleeps is told by
the fall of the device's total.
"""

from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.ticket import CHARGED, Sizes, Ticket
from arbiter.core.state import CoreState, Node
from arbiter.units import Bytes, TicketId


def shared(
    state: CoreState, node: Node, seen_bytes: dict[TicketId, Sizes]
) -> dict[TicketId, Sizes]:
    """Returns the measured bytes of each ticket, where the total of each device of which only a
    total is known is split by current grants: the agent does not know which engines sleep.
    `seen_bytes`: as the agent reported them."""
    if not node.inexact:
        return seen_bytes
    exact = {ticket_id: dict(sizes) for ticket_id, sizes in seen_bytes.items()}
    for device in node.inexact:
        seen = [t for ticket_id in seen_bytes if (t := state.ledger.find(ticket_id))]
        granted = {t.id: t.granted.get(device, 0) for t in seen if t.state in CHARGED}
        total = sum(exact[ticket_id].get(device, 0) for ticket_id in granted)
        all_granted = sum(granted.values())
        for ticket_id, size in granted.items() if all_granted else ():
            exact[ticket_id][device] = Bytes(total * size // all_granted)
    return {ticket_id: {d: size for d, size in s.items() if size} for ticket_id, s in exact.items()}


def is_at_home(state: CoreState, ticket: Ticket) -> bool:
    """Says whether a device of a ticket's home is one of which only a total is known."""
    node = state.nodes.get(ticket.node)
    return node is not None and not node.inexact.isdisjoint(ticket.home)


def measured_at_home(state: CoreState, ticket: Ticket) -> Bytes:
    """Returns the bytes that are measured on the ticket's home: its own, or those of all engines
    there where only a total is known."""
    if not is_at_home(state, ticket):
        return ticket.measured_home_bytes
    homes = _homes(state, ticket)
    return Bytes(sum(t.measured.get(b.device, 0) for b in homes for t in b.tickets.values()))


def teaches(state: CoreState, ticket: Ticket) -> bool:
    """Says whether a ticket's measured bytes are its own: where other engines hold bytes of such a
    device, the share is inferred."""
    if not is_at_home(state, ticket):
        return True
    return all(book.tickets.keys() <= {ticket.id} for book in _homes(state, ticket))


def _homes(state: CoreState, ticket: Ticket) -> list[DeviceAccount]:
    """Returns the accounts of the devices of a ticket's home."""
    return [book for device in ticket.home if (book := state.ledger.books.get(device))]
