"""Devices whose driver names no sizes per process (A16): only a total is known.

The agent measures the bytes of all engines on such a device together, by how much the device has
filled since no engine was there. This module splits the total by current grants. A split share is
inferred, so it neither ends an asleep ticket nor teaches a peak, and the whole device shows a
sleep.
"""

from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.ticket import CHARGED, Sizes, Ticket
from arbiter.core.state import CoreState, Node
from arbiter.units import Bytes, TicketId


def shared(
    state: CoreState, node: Node, seen_bytes: dict[TicketId, Sizes]
) -> dict[TicketId, Sizes]:
    """Returns the measured bytes, with the total of each such device split by current grants,
    because the agent does not know which engines sleep."""
    if not node.inexact:
        return seen_bytes
    exact = {ticket: dict(sizes) for ticket, sizes in seen_bytes.items()}
    for device in node.inexact:
        entries = {t: e for t in seen_bytes if (e := state.ledger.find(t)) and e.state in CHARGED}
        granted = {ticket: entry.granted.get(device, 0) for ticket, entry in entries.items()}
        total = sum(exact[t].get(device, 0) for t in entries)
        all_granted = sum(granted.values())
        for ticket, size in granted.items() if all_granted else ():
            exact[ticket][device] = Bytes(total * size // all_granted)
    return {ticket: {d: size for d, size in s.items() if size} for ticket, s in exact.items()}


def is_at_home(state: CoreState, entry: Ticket) -> bool:
    """Says whether a ticket computes on such a device."""
    node = state.nodes.get(entry.node)
    return node is not None and not node.inexact.isdisjoint(entry.home)


def held_at_home(state: CoreState, entry: Ticket) -> Bytes:
    """Returns what is measured on the ticket's devices: its own bytes, or those of all engines
    where only a total is known."""
    if not is_at_home(state, entry):
        return entry.at_home_bytes
    homes = _homes(state, entry)
    return Bytes(sum(e.measured.get(b.device, 0) for b in homes for e in b.entries.values()))


def teaches(state: CoreState, entry: Ticket) -> bool:
    """Says whether a ticket's measured bytes are its own: where other engines hold bytes of such a
    device, the share is inferred."""
    if not is_at_home(state, entry):
        return True
    return all(book.entries.keys() <= {entry.ticket} for book in _homes(state, entry))


def _homes(state: CoreState, entry: Ticket) -> list[DeviceAccount]:
    return [book for device in entry.home if (book := state.ledger.books.get(device))]
