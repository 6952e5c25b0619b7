"""Places what needs several devices or several tickets at once: a gang, and a ticket that is split
over devices (A13, B6). All parts are granted in one step, or none.
"""

from arbiter.core.eviction import pressure
from arbiter.core.eviction.compaction import compact_or_evict
from arbiter.core.eviction.eviction import victims_for
from arbiter.core.queue import gangs, placement
from arbiter.core.queue.grant_limits import apply_exclusion, apply_quota, asker_priority
from arbiter.core.queue.grants import grant
from arbiter.core.queue.outcome import Outcome
from arbiter.core.queue.pass_state import GrantPass
from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.request_queue import QueueEntry
from arbiter.core.records.ticket import Sizes, Ticket
from arbiter.core.state import CoreState, Node, reject_queued
from arbiter.core.tickets.lendable_devices import compute_books, unpinned_bytes
from arbiter.core.types import Priority
from arbiter.errors import GpusLost, NeverFits, QuotaExceeded, TicketClosed
from arbiter.units import Bytes


def place_gang(state: CoreState, pass_: GrantPass, ticket: Ticket, queued: QueueEntry) -> Outcome:
    """Places all members of a gang when the first of them comes up in the queue (A13)."""
    if gone := [t for t in ticket.gang if t in state.answers]:
        reject_queued(state, ticket, TicketClosed(gone[0]))
        return Outcome.REJECTED
    members = gangs.members(state, ticket)
    if members is None and queued.is_aged:  # the other has not asked in all that time
        reject_queued(state, ticket, TicketClosed(ticket.id))
        return Outcome.REJECTED
    if members is None or any(state.queue.is_ahead(m.id, ticket.id) for m in members):
        return Outcome.NOT_APPLICABLE
    books = compute_books(state, pass_.node)
    sizes = [(m, placement.estimated_bytes(state, m, pass_.most_bytes)) for m in members]
    most = pass_.most_for(state, ticket.client.tenant)
    if any(_is_held(state, m) for m in members):
        return pass_.defer(queued, ())
    at_best = gangs.assign(sizes, books, most)
    if not at_best and pass_.node.may_gain_devices:
        return pass_.defer(queued, ())
    if not at_best:
        return _reject_gang(state, pass_, ticket.client.tenant, books, sizes, most)
    room = pass_.open_to(state, ticket)
    free = {b.device: Bytes(min(b.free_bytes, pass_.room(b.device, ticket))) for b in room}
    now = gangs.assign(sizes, room, free) or gangs.assign(sizes, room, most)
    return place_parts(state, pass_, queued, now or at_best)


def _is_held(state: CoreState, ticket: Ticket) -> bool:
    queued = state.queue.find(ticket.id)
    return queued is not None and queued.is_held


def _reject_gang(
    state: CoreState,
    pass_: GrantPass,
    tenant: str,
    books: list[DeviceAccount],
    sizes: list[tuple[Ticket, Bytes]],
    most: Sizes,
) -> Outcome:
    """Rejects every member of a gang that can never be placed: for other tenants' reserves, or for
    its size."""
    need = Bytes(sum(size for _, size in sizes))
    whole = Bytes(sum(most.values()))
    fits_alone = gangs.assign(sizes, books, {b.device: unpinned_bytes(b) for b in books})
    is_reserved = fits_alone and not pass_.node.lost
    reserved = QuotaExceeded(tenant, Bytes(0), need, whole, "bytes") if is_reserved else None
    for member, _ in sizes:
        reject_queued(state, member, reserved or never_fits(pass_.node, member, need, whole))
    return Outcome.REJECTED


def place_parts(
    state: CoreState, pass_: GrantPass, queued: QueueEntry, parts: list[gangs.Part]
) -> Outcome:
    """Grants all parts in this step, or none: no victim leaves for a part while another part finds
    no room."""
    needs = gangs.totals(parts)
    first = parts[0].ticket
    priority = asker_priority(state, pass_, queued)
    limits = pass_.limits(state, first, Bytes(sum(needs.values())))
    outcome = apply_quota(state, pass_, first, limits, priority, needs)
    if outcome is not Outcome.NOT_APPLICABLE:
        return outcome
    is_shut = any(pressure.is_closed_to(state, p.ticket, p.device) for p in parts)
    if is_shut or not needs.keys() <= pass_.books.keys():
        return pass_.defer(queued, ())
    if needs.keys() & pass_.reserved_devices:
        return pass_.defer(queued, pass_.books)
    for ticket in {p.ticket.id: p.ticket for p in parts}.values():
        outcome = apply_exclusion(state, pass_, ticket, queued, priority)
        if outcome is not Outcome.NOT_APPLICABLE:
            return outcome
    if not all(limits.fits(device, size) for device, size in needs.items()):
        make_room_on_each(state, pass_, first, needs, priority)
        return pass_.defer(queued, pass_.books)
    for ticket_id in {p.ticket.id: None for p in parts}:
        mine = [p for p in parts if p.ticket.id == ticket_id]
        member = state.queue.find(ticket_id)
        assert member is not None
        grant(state, pass_, mine[0].ticket, member, {p.device: p.size_bytes for p in mine})
    return Outcome.GRANTED


def make_room_on_each(
    state: CoreState, pass_: GrantPass, ticket: Ticket, needs: Sizes, priority: Priority
) -> None:
    """Revokes victims on every device, or on none while one device would still lack room. A victim
    on several devices leaves all of them, so what each lacks is computed anew."""
    lacks = {d: Bytes(size - pass_.room(d, ticket)) for d, size in needs.items()}
    if not all(n <= 0 or victims_for(state, ticket, d, n, priority) for d, n in lacks.items()):
        return
    for device, size in sorted(needs.items()):
        if (lacking := Bytes(size - pass_.room(device, ticket))) > 0:
            compact_or_evict(state, ticket, device, lacking, priority)
        pass_.promised[device][ticket.client.tenant] += size


def never_fits(node: Node, ticket: Ticket, need: Bytes, most: Bytes) -> NeverFits | GpusLost:
    """Returns the error for a ticket that no device of its node can ever hold: to be asked for
    again where devices that the node has lost may come back."""
    if node.lost:
        return GpusLost(node.node)
    return NeverFits(ticket.id, need, most)
