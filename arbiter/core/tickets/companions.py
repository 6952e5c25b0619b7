"""Tickets whose bytes lie in the process of another: a drafter in its target's engine (SPEC A13).

The two are a gang and granted in one step, on one device. From then on the lodger goes where its
host goes (Mind.move): it serves, drains and ends with it, and is nobody's victim by itself. Its
holder says nothing of it but that it is there. What the kernel measures of their one process is
shared between them as it was granted, for it cannot be told apart.
"""

from arbiter.core.decisions import Reason
from arbiter.core.records.ticket import Sizes, State, Ticket
from arbiter.core.state import CoreState
from arbiter.core.tickets.reclaim import on_timer as tend_reclaiming
from arbiter.core.tickets.reclaim import reclaim
from arbiter.units import Bytes, DeviceId, TicketId


def end_with_primary(mind: CoreState, host: Ticket, device: DeviceId) -> Bytes:
    """What comes back on a device when it leaves, itself included."""
    own = host.charge(device)
    return Bytes(own + sum(e.charge(device) for e in mind.lodgers_of(host))) if host.gang else own


def on_timer(mind: CoreState, lodger: Ticket) -> None:
    """Its time rules are its host's. One whose host is off the books is nobody's any more; its
    agent knows no process of it, and says so."""
    if lodger.state is State.RECLAIMING and not mind.host_of(lodger):
        tend_reclaiming(mind, lodger)
    elif lodger.state not in (State.QUEUED, State.RECLAIMING) and not mind.host_of(lodger):
        reclaim(mind, lodger, Reason.LOST)


def shared_bytes(mind: CoreState, seen_bytes: dict[TicketId, Sizes]) -> dict[TicketId, Sizes]:
    """What was measured of each process, with the lodgers' part on their own tickets."""
    told = dict(seen_bytes)
    for ticket, sizes in seen_bytes.items():
        host = mind.ledger.find(ticket)
        lodgers = mind.lodgers_of(host) if host else []
        if host is None or not lodgers:
            continue
        told[ticket] = dict(sizes)
        for lodger in lodgers:
            told[lodger.ticket] = {
                d: _part(size, d, host, lodgers, lodger) for d, size in sizes.items()
            }
            for device, part in told[lodger.ticket].items():
                told[ticket][device] = Bytes(told[ticket][device] - part)
    return told


def _part(
    size: Bytes, device: DeviceId, host: Ticket, lodgers: list[Ticket], lodger: Ticket
) -> Bytes:
    whole = sum(e.granted.get(device, 0) for e in (host, *lodgers))
    return Bytes(size * lodger.granted.get(device, 0) // max(1, whole))
