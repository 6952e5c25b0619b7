"""Says how much `arbiter free` can have at once, and what stays (A15).

The lease of `arbiter free` asks before every other request, for what is free or idle on one device
of its node, however lately that was loaded and however urgent it was. What is pinned or in use
stays, also what proves to be in use when it is asked to leave; a lease that asks for more than the
rest gets the rest.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.eviction.eligibility import find_obstacle, leaves_too_late
from arbiter.core.eviction.obstacle_text import obstacle_text
from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.ticket import Ticket
from arbiter.core.state import CoreState
from arbiter.core.tickets import leases, quotas
from arbiter.core.tickets.lendable_devices import readable_devices, unpinned_bytes
from arbiter.core.types import Priority
from arbiter.units import Bytes, Instant, after


def as_attainable(state: CoreState, event: ev.Requested) -> ev.Requested:
    """Returns the request of `arbiter free` with as many of its bytes as can be had at once; any
    other request as it is."""
    if event.lease is None or not event.lease.frees:
        return event
    holder = state.holders.get(event.holder)
    node = state.nodes.get(holder.node) if holder else None
    if holder is None or node is None:
        return event
    asker = leases.new_ticket(state, holder, event, event.lease)
    books = readable_devices(state, node)
    by = None if event.deadline is None else after(state.now, event.deadline)
    most = max((_attainable_bytes(state, book, asker, by) for book in books), default=0)
    need = types.Need(Bytes(max(0, min(event.need.device_bytes, most))))
    return replace(event, need=need, priority=Priority.URGENT)


def rest_bytes(state: CoreState, asker: Ticket, books: Iterable[DeviceAccount]) -> Bytes:
    """Returns how much a queued lease of `arbiter free` can have now."""
    queued = state.queue.find(asker.id)
    by = queued.deadline if queued else None
    rest = max((_attainable_bytes(state, book, asker, by) for book in books), default=0)
    return Bytes(max(0, rest))


def _attainable_bytes(
    state: CoreState, book: DeviceAccount, asker: Ticket, by: Instant | None
) -> int:
    """Returns how many bytes of a device a lease of `arbiter free` can have: what is free and what
    idle tickets hold that may leave in time. `by`: when the lease's wait ends."""
    tenant = asker.client.tenant
    reserved_bytes = quotas.reserved_for_others(quotas.reserves(state), book, tenant)
    spare = quotas.ReserveSlack(state, book, tenant)
    idle = (
        spare.take(ticket, ticket.charge(book.device))
        for ticket in book.tickets.values()
        if find_obstacle(state, ticket, asker, Priority.URGENT) is None
        and not leaves_too_late(state, ticket, by)
    )
    return min(unpinned_bytes(book), max(0, book.free_bytes - reserved_bytes) + sum(idle))


def staying(state: CoreState, asker: Ticket) -> Iterator[tuple[Ticket, str]]:
    """Yields the tickets on the devices of the asker's node that would not leave for it, with the
    reason."""
    node = state.nodes.get(asker.node)
    books = readable_devices(state, node) if node else ()
    holding = {ticket_id: ticket for book in books for ticket_id, ticket in book.tickets.items()}
    for ticket in holding.values():
        why = obstacle_text(state, ticket, asker, Priority.URGENT)
        if why is not None and ticket is not asker:
            yield ticket, why
