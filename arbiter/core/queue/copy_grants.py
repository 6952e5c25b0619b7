"""Grants the leases under which node agents hold copies of models' files in host RAM (D4).

So a copy is on the books of the host before a byte of it is written. It is granted at once into
free host RAM, or refused: nothing leaves for it, because without it the engine reads the files. But
copies that no engine uses leave then, so that the next has room.
"""

from arbiter.core.eviction.eviction import release_copies
from arbiter.core.queue.grants import charge_and_grant
from arbiter.core.records.ticket import Ticket
from arbiter.core.state import CoreState
from arbiter.core.tickets.lendable_devices import is_readable
from arbiter.errors import HostRamShort
from arbiter.units import Bytes, host_device


def grant(state: CoreState, ticket: Ticket) -> None:
    """Answers the request for a copy's lease."""
    book, need = state.ledger.books.get(host_device(ticket.node)), ticket.need.device_bytes
    node = state.nodes.get(ticket.node)
    is_open = book and node and is_readable(state, node, book.device, state.now)
    if book is None or not is_open or not state.is_settled or book.free_bytes < need:
        free = book.free_bytes if book and is_open else Bytes(0)
        state.answer_error_finally(ticket.id, HostRamShort(ticket.model, need, free))
        release_copies(state, ticket.node, need)
        return
    state.ledger.open(ticket)
    charge_and_grant(state, ticket, {book.device: need})
    ticket.note_use(1, ticket.priority, state.now)  # by its agent, which is about to fill it
