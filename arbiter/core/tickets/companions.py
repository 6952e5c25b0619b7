"""Keeps tickets whose bytes lie in the process of another: a drafter in its target's engine (A13).

The two are a gang and granted in one step, on one device. From then on the companion goes where its
primary goes (CoreState.move): it serves, drains and ends with it, and is never a victim by itself.
Its holder says nothing of it but that it is there. What the kernel measures of their one process is
shared between them as it was granted, because it cannot be told apart.
"""

from arbiter.core.decisions import Reason
from arbiter.core.records.ticket import Sizes, State, Ticket
from arbiter.core.state import CoreState
from arbiter.core.tickets.reclaim import on_timer as tend_reclaiming
from arbiter.core.tickets.reclaim import reclaim
from arbiter.units import Bytes, DeviceId, TicketId


def end_with_primary(state: CoreState, primary: Ticket, device: DeviceId) -> Bytes:
    """Returns what comes back on a device when a ticket leaves, its companions included."""
    own = primary.charge(device)
    return (
        Bytes(own + sum(e.charge(device) for e in state.companions_of(primary)))
        if primary.gang
        else own
    )


def on_timer(state: CoreState, companion: Ticket) -> None:
    """Follows the primary's timers. A companion whose primary is off the books is reclaimed: its
    agent knows no process of it, and says so."""
    if companion.state is State.RECLAIMING and not state.primary_of(companion):
        tend_reclaiming(state, companion)
    elif companion.state not in (State.QUEUED, State.RECLAIMING) and not state.primary_of(
        companion
    ):
        reclaim(state, companion, Reason.LOST)


def shared_bytes(state: CoreState, seen_bytes: dict[TicketId, Sizes]) -> dict[TicketId, Sizes]:
    """Returns what was measured of each process, with the companions' part on their own tickets."""
    told = dict(seen_bytes)
    for ticket, sizes in seen_bytes.items():
        primary = state.ledger.find(ticket)
        companions = state.companions_of(primary) if primary else []
        if primary is None or not companions:
            continue
        told[ticket] = dict(sizes)
        for companion in companions:
            told[companion.ticket] = {
                d: _part(size, d, primary, companions, companion) for d, size in sizes.items()
            }
            for device, part in told[companion.ticket].items():
                told[ticket][device] = Bytes(told[ticket][device] - part)
    return told


def _part(
    size: Bytes, device: DeviceId, primary: Ticket, companions: list[Ticket], companion: Ticket
) -> Bytes:
    whole = sum(e.granted.get(device, 0) for e in (primary, *companions))
    return Bytes(size * companion.granted.get(device, 0) // max(1, whole))
