"""Does what can be done now for a queued ticket whose model must load (A3, A4, B6, C6, C9): grants
it on the device where it fits, asks victims for the room that it lacks, defers it, or rejects it.
The walk over the queue, and so the order in which tickets come here, is grant_pass.py.

A ticket that cannot load now does not hold up a later ticket that can, until it has been bypassed
`Settings.bypass_count` times or has waited for `Timeouts.bypass`. From then on it is aged: no later
ticket is granted on a device that it could use, and it asks with the priority of the most urgent
ticket that it holds up. Bytes that are on their way back for one ticket are promised to it, and not
lent to another.
"""

from arbiter.core.decisions import EventKind
from arbiter.core.eviction import oversize, pressure
from arbiter.core.eviction.compaction import compact_or_evict
from arbiter.core.eviction.ranking import victims_no_more_urgent
from arbiter.core.queue import freeing, gangs, placement
from arbiter.core.queue.grant_limits import apply_exclusion, apply_quota, asker_priority
from arbiter.core.queue.grants import grant
from arbiter.core.queue.outcome import Outcome
from arbiter.core.queue.pass_state import GrantPass, Limits
from arbiter.core.queue.placement_memo import need_of
from arbiter.core.queue.several_devices import never_fits, place_parts
from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.request_queue import QueueEntry
from arbiter.core.records.ticket import Ticket
from arbiter.core.residency import prefetch
from arbiter.core.state import CoreState, reject_queued
from arbiter.core.tickets import leases, quotas
from arbiter.core.tickets.exclusion import excluded_by
from arbiter.core.tickets.lendable_devices import compute_books, unpinned_bytes
from arbiter.core.tickets.pins import log_pinned_overcommit_on
from arbiter.core.types import Priority
from arbiter.errors import TicketClosed
from arbiter.units import Bytes, DeviceId


def place(state: CoreState, pass_: GrantPass, ticket: Ticket, queued: QueueEntry) -> Outcome:
    """Grants a queued ticket whose model must load, or asks victims for the room that it lacks."""
    if ticket.is_prefetch:
        return _place_prefetch(state, pass_, ticket, queued)
    need = need_of(state, ticket, queued, pass_.most_bytes)
    if need > pass_.open_bytes:
        limits = pass_.limits(state, ticket, need)
        outcome = _place_beyond_one_device(state, pass_, ticket, queued, limits)
        if outcome is not Outcome.NOT_APPLICABLE:
            return outcome
    if not queued.is_aged and pass_.memo.covers(need, ticket.priority, queued.quota_group):
        return pass_.defer(queued, ())
    priority = asker_priority(state, pass_, queued)
    limits = pass_.limits(state, ticket, need)
    outcome = apply_quota(state, pass_, ticket, limits, priority)
    if outcome is not Outcome.NOT_APPLICABLE:
        return outcome
    outcome = apply_exclusion(state, pass_, ticket, queued, priority)
    if outcome is not Outcome.NOT_APPLICABLE:
        return outcome
    books = [b for b in pass_.books.values() if ticket.frees or limits.may_ever_fit(b.device)]
    devices = placement.devices_for(state, books, ticket, need)
    return _place_on_one(state, pass_, ticket, queued, limits, devices)


def _place_prefetch(
    state: CoreState, pass_: GrantPass, ticket: Ticket, queued: QueueEntry
) -> Outcome:
    """Grants a prefetch into room that is free, or rejects it (C11): nothing leaves for it, and it
    never waits. A request for its model asks under a ticket of its own."""
    need = need_of(state, ticket, queued, pass_.most_bytes)
    limits = pass_.limits(state, ticket, need)
    devices = placement.devices_for(state, pass_.books.values(), ticket, need)
    usable = [device for device in devices if device not in pass_.reserved_devices]
    device = next((d for d in usable if limits.fits(d, need)), None)
    is_lawful = not (
        quotas.over_limit(state, ticket.client.tenant, need)
        or excluded_by(state, ticket.node, ticket.role, ticket.model_name)
    )
    if device and is_lawful:
        return grant(state, pass_, ticket, queued, {device: need})
    prefetch.forget(state, ticket.model_name)
    reject_queued(state, ticket, TicketClosed(ticket.id))
    return Outcome.REJECTED


def _place_on_one(
    state: CoreState,
    pass_: GrantPass,
    ticket: Ticket,
    queued: QueueEntry,
    limits: Limits,
    devices: list[DeviceId],
) -> Outcome:
    """Grants the ticket on the first of `devices` (best first) on which it fits now. Else promises
    it bytes: on the first device on which it will fit once what is leaving has left, else on the
    first on which victims that suffice are found, which are revoked. Until then it waits."""
    need = limits.need_bytes
    priority = asker_priority(state, pass_, queued)
    usable = [d for d in devices if d not in pass_.reserved_devices]
    if device := next((d for d in usable if limits.fits(d, need)), None):
        return grant(state, pass_, ticket, queued, {device: need})
    promised = next((d for d in usable if limits.missing(d) <= 0), None)
    promised = promised or _make_room_on_first(state, ticket, usable, limits, priority)
    if promised:
        pass_.promised[promised][ticket.client.tenant] += need
    elif ticket.frees:
        return _take_rest(state, pass_, ticket, queued, devices)
    elif usable == devices and not _lacks_more_than_bytes(state, pass_, ticket, priority):
        pass_.memo.note(need, ticket.priority, queued.quota_group)
    return pass_.defer(queued, devices)


def _make_room_on_first(
    state: CoreState, ticket: Ticket, devices: list[DeviceId], limits: Limits, priority: Priority
) -> DeviceId | None:
    """Revokes victims that suffice on the first of `devices` that has them, and returns it."""
    for device in devices:
        if compact_or_evict(state, ticket, device, limits.missing(device), priority):
            return device
    return None


def _take_rest(
    state: CoreState,
    pass_: GrantPass,
    ticket: Ticket,
    queued: QueueEntry,
    devices: list[DeviceId],
) -> Outcome:
    """Reduces the need of a lease of `arbiter free` to what can be had, once nothing leaves for it
    any more: a model that was asked to leave may have been in use after all."""
    if any(book.leaving for book in pass_.books.values()):
        return pass_.defer(queued, devices)
    rest = freeing.rest_bytes(state, ticket, pass_.books.values())
    if rest >= queued.need_bytes:
        return pass_.defer(queued, devices)
    if not rest:
        reject_queued(state, ticket, leases.nothing_to_free())
        return Outcome.REJECTED
    ticket.reduce_need(rest)
    state.queue.stats(ticket.node).note_need(queued, rest, queued.estimates_version)
    return place(state, pass_, ticket, queued)


def _lacks_more_than_bytes(
    state: CoreState, pass_: GrantPass, ticket: Ticket, priority: Priority
) -> bool:
    """Says whether a ticket that found no room may lack it for other reasons than bytes: pressure
    keeps it from a device that others may use, or a model that leaves for others stays for it. Then
    it proves nothing of later tickets."""
    return any(
        pressure.is_closed_to(state, ticket, device)
        or _may_be_collated(state, ticket, book, priority)
        for device, book in pass_.books.items()
    )


def _may_be_collated(
    state: CoreState, ticket: Ticket, book: DeviceAccount, priority: Priority
) -> bool:
    """Says whether a model of a device may stay for this asker alone, because both trade places.
    Where every model there is more urgent than the asker, each stays for all askers that are no
    more urgent."""
    askers = state.trades.askers_among(ticket.model_name, book.copies.keys(), state.now)
    return bool(askers) and any(True for _ in victims_no_more_urgent(state, book, priority))


def _place_beyond_one_device(
    state: CoreState, pass_: GrantPass, ticket: Ticket, queued: QueueEntry, limits: Limits
) -> Outcome:
    """Deals with a ticket that is larger than anything waiting can bring on one device (B6),
    perhaps for what other tenants have reserved (C10): over several devices, oversize, or never."""
    need = limits.need_bytes
    most = limits.most_by_device
    if need <= limits.most_bytes:
        return Outcome.NOT_APPLICABLE  # no device is known yet, or the reserve is its own
    books = compute_books(state, pass_.node)
    room = pass_.open_to(state, ticket)
    several = gangs.split(room, need, ticket.split, most)
    if several := several or gangs.split(books, need, ticket.split, most):
        parts = [gangs.Part(ticket, device, size) for device, size in several.items()]
        return place_parts(state, pass_, queued, parts)
    if need <= pass_.most_bytes:  # the quota says what the other tenants leave
        return pass_.defer(queued, ()) if pass_.node.may_gain_devices else Outcome.NOT_APPLICABLE
    if ticket.allow_oversize:
        return _place_oversize(state, pass_, ticket, queued, limits, room)
    if pass_.node.may_gain_devices:
        return pass_.defer(queued, ())
    if ticket.pinned:
        log_pinned_overcommit_on(state, max(books, key=unpinned_bytes), need)
    whole = gangs.most_bytes(ticket.split, {b.device: unpinned_bytes(b) for b in books})
    reject_queued(state, ticket, never_fits(pass_.node, ticket, need, whole))
    return Outcome.REJECTED


def _place_oversize(
    state: CoreState,
    pass_: GrantPass,
    ticket: Ticket,
    queued: QueueEntry,
    limits: Limits,
    room: list[DeviceAccount],
) -> Outcome:
    """Grants a ticket all that a device can lend once everything idle has left it."""
    need = limits.need_bytes
    if never := quotas.never_fits(state, ticket.client.tenant, need, limits.most_bytes, pass_.node):
        reject_queued(state, ticket, never)
        return Outcome.REJECTED
    priority = asker_priority(state, pass_, queued)
    outcome = apply_exclusion(state, pass_, ticket, queued, priority)
    if outcome is not Outcome.NOT_APPLICABLE:
        return outcome
    pass_.defer(queued, [book.device for book in room])
    home = oversize.evict_all_idle(state, room, ticket)
    if home is None:
        pass_.reserved_devices.update(book.device for book in room)
        return Outcome.DEFERRED
    limits = pass_.limits(state, ticket, Bytes(sum(home.values())))
    outcome = apply_quota(state, pass_, ticket, limits, priority)
    if outcome is not Outcome.NOT_APPLICABLE:
        return outcome
    grant(state, pass_, ticket, queued, home)
    state.log(EventKind.OVERSIZE, ticket, size=need, granted_bytes=ticket.granted_home_bytes)
    return Outcome.GRANTED
