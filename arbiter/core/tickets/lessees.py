"""Counts what a process takes of its lease where no agent measures that process (A15).

The arbiter may not know who uses a lease: `arbiter free --for 1h` makes room for whatever a person
starts then, and a process in another container has no pid here. What such a process takes is
foreign, and its lease is charged as well, so its bytes would count twice. Hence what has become
foreign on a device since the lease began counts as taken of the lease, up to its size, whichever
process took it. Charged is never less than taken, because what is not counted as foreign is on the
books as the lease.
"""

from collections.abc import Container, Iterator

from arbiter.core.records.ticket import Sizes, Ticket
from arbiter.core.state import CoreState, Node
from arbiter.core.types import DeviceBytes, LeaseHistory
from arbiter.units import Bytes, DeviceId, TicketId


def note_begun(state: CoreState, ticket: Ticket) -> None:
    """Notes what is foreign on its devices as a lease begins."""
    if node := state.nodes.get(ticket.node):
        ticket.note_lessee(_foreign(node, ticket), is_measured=False)


def note_reading(state: CoreState, node: Node, measured: Container[TicketId]) -> None:
    """Notes a reading, after the measured bytes of tickets. `measured`: the tickets it names."""
    for ticket in state.ledger.leases():
        if ticket.node == node.node:
            ticket.note_lessee(_foreign(node, ticket), ticket.id in measured)


def taken_bytes(state: CoreState, node: Node, device: DeviceId) -> Bytes:
    """Returns how much of what is foreign on a device is charged as leases already. Where only a
    total is known of engines, what is foreign is known too badly for that."""
    if device in node.inexact:
        return Bytes(0)
    before, lent = None, 0
    for ticket in _unmeasured(state, device):
        assert ticket.lease is not None
        least = ticket.lease.foreign_before.get(device)
        if least is not None:
            before = least if before is None else min(before, least)
            lent += ticket.charge(device)
    if before is None:
        return Bytes(0)
    return Bytes(max(0, min(node.readings[device].foreign_bytes - before, lent)))


def history_of(state: CoreState, ticket: Ticket) -> LeaseHistory:
    """Returns what the next epoch must know of a lease."""
    before = ticket.lease.foreign_before if ticket.lease else {}
    return LeaseHistory(
        tuple(DeviceBytes(device, size) for device, size in before.items()),
        tuple(state.freed_for.get(ticket.id, ())),
    )


def restore(state: CoreState, ticket: Ticket, history: LeaseHistory) -> None:
    """Takes what an earlier epoch knew of a lease that rejoins."""
    before = {foreign.device: foreign.size_bytes for foreign in history.foreign_before}
    ticket.note_lessee(before, is_measured=False)
    if history.returning:
        state.freed_for[ticket.id] = dict.fromkeys(history.returning)


def _unmeasured(state: CoreState, device: DeviceId) -> Iterator[Ticket]:
    """Yields leases that are charged on a device for a process that no agent reads. A lease that
    only asks is on no device."""
    for ticket in state.ledger.books[device].tickets.values():
        if ticket.lease and not ticket.lease.is_measured:
            yield ticket


def _foreign(node: Node, ticket: Ticket) -> Sizes:
    readings = {device: node.readings.get(device) for device in ticket.home}
    return {device: reading.foreign_bytes for device, reading in readings.items() if reading}
