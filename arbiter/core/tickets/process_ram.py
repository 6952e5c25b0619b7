"""RAM of an engine's own process on a node with GPUs (B1, B4).

The agent measures this RAM on the host, and no ticket asks for it, so the books charge it as
measured while the process lives. A sleeping process needs the copy of its weights beside its RAM.
The ticket keeps the size from before its first sleep, because a driver may keep the pinned copy in
the process after a wake.
"""

from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.state import CoreState
from arbiter.core.types import DeviceKind
from arbiter.units import Bytes, host_device


def note(state: CoreState, ticket: Ticket) -> None:
    """Keeps the RAM of the process from a new reading, until the first sleep."""
    held = ticket.measured.get(host_device(ticket.node), Bytes(0))
    has_slept = ticket.wakes_count > 0 or ticket.state not in (State.LOADING, State.RESIDENT)
    if held != ticket.ram_bytes and not has_slept and _is_beside_gpus(state, ticket):
        ticket.note_ram(held)


def is_all_it_holds(book: DeviceAccount, ticket: Ticket) -> bool:
    """Says whether a ticket holds nothing on a book but its process: on the host's book, while it
    is awake. The arbiter lent it no RAM, so a short host budget does not cost it its device. Real
    shortage of RAM is for the pressure rules."""
    is_awake = ticket.state is not State.ASLEEP and book.device not in ticket.granted
    return book.kind is DeviceKind.HOST and is_awake


def _is_beside_gpus(state: CoreState, ticket: Ticket) -> bool:
    books = (state.ledger.books.get(device) for device in ticket.home)
    return any(book is not None and book.kind is DeviceKind.GPU for book in books)
