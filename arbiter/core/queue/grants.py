"""Does what can be done now for one queued ticket (A3, A4, B6, C6, C9): grants it on the device
where it fits, asks victims for the room that it lacks, defers it, or rejects it. The walk over the
queue, and so the order in which tickets come here, is grant_pass.py.

A ticket that cannot load now does not hold up a later ticket that can, until it has been bypassed 8
times or has waited 30 s. From then on it is aged: no later ticket is granted on a device that it
could use, and it asks with the priority of the most urgent ticket that it holds up. Bytes that are
on their way back for one ticket are promised to it, and not lent to another.

`entry` is the ticket (`Ticket`), `queued` its place in the queue (`QueueEntry`).
"""

from collections.abc import Iterable

from arbiter.core.decisions import EventKind, Grant, Reason
from arbiter.core.eviction import oversize, pressure
from arbiter.core.eviction.compaction import compact_or_evict
from arbiter.core.eviction.eligibility import may_revoke
from arbiter.core.eviction.eviction import evict_own, revoke, victims_for
from arbiter.core.eviction.ranking import victims_no_more_urgent
from arbiter.core.queue import freeing, gangs, placement
from arbiter.core.queue.outcome import Outcome
from arbiter.core.queue.pass_state import GrantPass, Limits, count_bypasses
from arbiter.core.queue.placement_memo import need_of
from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.request_queue import QueueEntry
from arbiter.core.records.ticket import Sizes, State, Ticket
from arbiter.core.residency import prefetch
from arbiter.core.state import CoreState, Node, reject_queued
from arbiter.core.tickets import leases, quotas
from arbiter.core.tickets.device_limits import (
    cap_pins,
    compute_books,
    flag_pinned_on,
    is_to_be_pinned,
    on_demand_of,
)
from arbiter.core.tickets.exclusion import excluded_by
from arbiter.core.tickets.loads import note_evicted_for
from arbiter.core.types import DeviceBytes, Priority
from arbiter.errors import GpusLost, NeverFits, QuotaExceeded, RolePinned, TicketClosed
from arbiter.units import SECOND, Bytes, DeviceId, Span, after, since

# -- a new load -----------------------------------------------------------------------------------


def place(state: CoreState, pass_: GrantPass, entry: Ticket, queued: QueueEntry) -> Outcome:
    """Grants a new load, or asks for the room it lacks."""
    if entry.is_prefetch:
        return _place_prefetch(state, pass_, entry, queued)
    need = need_of(state, entry, queued, pass_.most_bytes)
    if need > pass_.open_bytes:
        limits = pass_.limits(state, entry, need)
        outcome = _place_beyond_one_device(state, pass_, entry, queued, limits)
        if outcome is not Outcome.NOT_APPLICABLE:
            return outcome
    if not queued.is_aged and pass_.memo.covers(need, entry.priority, queued.quota_group):
        return pass_.defer(queued, ())
    priority = _asker_priority(state, pass_, queued)
    limits = pass_.limits(state, entry, need)
    outcome = _hold_to_quota(state, pass_, entry, limits, priority)
    if outcome is not Outcome.NOT_APPLICABLE:
        return outcome
    outcome = _hold_to_role(state, pass_, entry, queued, priority)
    if outcome is not Outcome.NOT_APPLICABLE:
        return outcome
    books = [b for b in pass_.books.values() if entry.frees or limits.may_ever_fit(b.device)]
    devices = placement.devices_for(state, books, entry, need)
    return _place_on_one(state, pass_, entry, queued, limits, devices)


def _place_prefetch(
    state: CoreState, pass_: GrantPass, entry: Ticket, queued: QueueEntry
) -> Outcome:
    """Grants a prefetch into room that is free, or rejects it (C11): nothing leaves for it, and it
    never waits. A request for its model asks under a ticket of its own."""
    need = need_of(state, entry, queued, pass_.most_bytes)
    limits = pass_.limits(state, entry, need)
    devices = placement.devices_for(state, pass_.books.values(), entry, need)
    usable = [device for device in devices if device not in pass_.reserved_devices]
    device = next((d for d in usable if limits.fits(d, need)), None)
    is_lawful = not (
        quotas.over_limit(state, entry.client.tenant, need)
        or excluded_by(state, entry.node, entry.role, entry.model_name)
    )
    if device and is_lawful:
        return _grant(state, pass_, entry, queued, {device: need})
    prefetch.forget(state, entry.model_name)
    reject_queued(state, entry, TicketClosed(entry.ticket))
    return Outcome.REJECTED


def _place_on_one(
    state: CoreState,
    pass_: GrantPass,
    entry: Ticket,
    queued: QueueEntry,
    limits: Limits,
    devices: list[DeviceId],
) -> Outcome:
    """Grants the ticket on the first of `devices` (best first) on which it fits now. Else promises
    it bytes: on the first device on which it will fit once what is leaving has left, else on the
    first on which victims that suffice are found, which are revoked. Until then it waits."""
    need = limits.need_bytes
    priority = _asker_priority(state, pass_, queued)
    usable = [d for d in devices if d not in pass_.reserved_devices]
    if device := next((d for d in usable if limits.fits(d, need)), None):
        return _grant(state, pass_, entry, queued, {device: need})
    promised = next((d for d in usable if limits.missing(d) <= 0), None)
    promised = promised or _make_room_on_first(state, entry, usable, limits, priority)
    if promised:
        pass_.promised[promised][entry.client.tenant] += need
    elif entry.frees:
        return _take_rest(state, pass_, entry, queued, devices)
    elif usable == devices and not _is_closed_to_it_only(state, pass_, entry, priority):
        pass_.memo.note(need, entry.priority, queued.quota_group)
    return pass_.defer(queued, devices)


def _make_room_on_first(
    state: CoreState, entry: Ticket, devices: list[DeviceId], limits: Limits, priority: Priority
) -> DeviceId | None:
    """Revokes victims that suffice on the first of `devices` that has them, and returns it."""
    for device in devices:
        if compact_or_evict(state, entry, device, limits.missing(device), priority):
            return device
    return None


def _take_rest(
    state: CoreState,
    pass_: GrantPass,
    entry: Ticket,
    queued: QueueEntry,
    devices: list[DeviceId],
) -> Outcome:
    """Has `arbiter free` ask for what there is, once nothing leaves for it any more: a model may
    have been in use after all."""
    if any(book.leaving for book in pass_.books.values()):
        return pass_.defer(queued, devices)
    rest = freeing.rest_bytes(state, entry, pass_.books.values())
    if rest >= queued.need_bytes:
        return pass_.defer(queued, devices)
    if not rest:
        reject_queued(state, entry, leases.nothing_to_free())
        return Outcome.REJECTED
    entry.need_less(rest)
    state.queue.stats(entry.node).know(queued, rest, queued.version)
    return place(state, pass_, entry, queued)


def _is_closed_to_it_only(
    state: CoreState, pass_: GrantPass, entry: Ticket, priority: Priority
) -> bool:
    """Says whether pressure keeps it from a device that others may use, or what leaves for others
    stays for it: that it found no room proves nothing of these."""
    return any(
        pressure.is_closed_to(state, entry, device)
        or _may_be_collated(state, entry, book, priority)
        for device, book in pass_.books.items()
    )


def _may_be_collated(
    state: CoreState, entry: Ticket, book: DeviceAccount, priority: Priority
) -> bool:
    """Says whether a model of a device may stay for this asker alone, because both trade places.
    Where all that is there is more urgent, it stays for every asker that is no more urgent."""
    askers = state.trades.askers_among(entry.model_name, book.copies.keys(), state.now)
    return bool(askers) and any(True for _ in victims_no_more_urgent(state, book, priority))


def _hold_to_quota(
    state: CoreState,
    pass_: GrantPass,
    entry: Ticket,
    limits: Limits,
    priority: Priority,
    together: Iterable[DeviceId] = (),
) -> Outcome:
    """Rejects what its tenant can never have (C10); defers what the tenant has too much for now,
    and revokes some of the tenant's own for it. A ticket deferred here holds up no other.
    `together`: the devices that it needs all of; without them any one of the node will do.
    No quota binds `arbiter free`, which an operator runs."""
    tenant = entry.client.tenant
    need = limits.need_bytes
    if entry.frees or (tenant not in state.tenants and not pass_.reserves):
        return Outcome.NOT_APPLICABLE
    most = sum(limits.most_by_device[d] for d in together) if together else limits.most_bytes
    if never := quotas.never(state, tenant, need, most, pass_.node):
        reject_queued(state, entry, never)
        return Outcome.REJECTED
    if not quotas.over_limit(state, tenant, need):
        return Outcome.NOT_APPLICABLE
    pass_.has_waiting = True
    if short := quotas.over_limit_after_drain(state, tenant, need):
        evict_own(state, entry, short, priority)
    state.timers.set(("queue", pass_.node.node), after(state.now, Span(SECOND)))
    return Outcome.DEFERRED


def _place_beyond_one_device(
    state: CoreState, pass_: GrantPass, entry: Ticket, queued: QueueEntry, limits: Limits
) -> Outcome:
    """Deals with a ticket that is larger than anything waiting can bring on one device (B6),
    perhaps for what other tenants have reserved (C10): over several devices, oversize, or never."""
    need = limits.need_bytes
    most = limits.most_by_device
    if need <= limits.most_bytes:
        return Outcome.NOT_APPLICABLE  # no device is known yet, or the reserve is its own
    books = compute_books(state, pass_.node)
    room = pass_.open_to(state, entry)
    several = gangs.split(room, need, entry.split, most)
    if several := several or gangs.split(books, need, entry.split, most):
        parts = [gangs.Part(entry, device, size) for device, size in several.items()]
        return _place_parts(state, pass_, queued, parts)
    if need <= pass_.most_bytes:  # the quota says what the other tenants leave
        return pass_.defer(queued, ()) if pass_.node.may_gain_devices else Outcome.NOT_APPLICABLE
    if entry.allow_oversize:
        return _place_oversize(state, pass_, entry, queued, limits, room)
    if pass_.node.may_gain_devices:
        return pass_.defer(queued, ())
    if entry.pinned:
        flag_pinned_on(state, max(books, key=on_demand_of), need)
    whole = gangs.most_bytes(entry.split, {b.device: on_demand_of(b) for b in books})
    reject_queued(state, entry, _never_fits(pass_.node, entry, need, whole))
    return Outcome.REJECTED


def _never_fits(node: Node, entry: Ticket, need: Bytes, most: Bytes) -> NeverFits | GpusLost:
    """Returns the error for a ticket that no device of its node can ever hold: to be asked for
    again where devices that the node has lost may come back."""
    if node.lost:
        return GpusLost(node.node)
    return NeverFits(entry.ticket, need, most)


def _place_oversize(
    state: CoreState,
    pass_: GrantPass,
    entry: Ticket,
    queued: QueueEntry,
    limits: Limits,
    room: list[DeviceAccount],
) -> Outcome:
    """Grants all that a device can lend once everything idle has left it."""
    need = limits.need_bytes
    if never := quotas.never(state, entry.client.tenant, need, limits.most_bytes, pass_.node):
        reject_queued(state, entry, never)
        return Outcome.REJECTED
    priority = _asker_priority(state, pass_, queued)
    outcome = _hold_to_role(state, pass_, entry, queued, priority)
    if outcome is not Outcome.NOT_APPLICABLE:
        return outcome
    pass_.defer(queued, [book.device for book in room])
    home = oversize.evict_all_idle(state, room, entry)
    if home is None:
        pass_.reserved_devices.update(book.device for book in room)
        return Outcome.DEFERRED
    limits = pass_.limits(state, entry, Bytes(sum(home.values())))
    outcome = _hold_to_quota(state, pass_, entry, limits, priority)
    if outcome is not Outcome.NOT_APPLICABLE:
        return outcome
    _grant(state, pass_, entry, queued, home)
    state.log(EventKind.OVERSIZE, entry, size=need, granted_bytes=entry.home_bytes)
    return Outcome.GRANTED


def _asker_priority(state: CoreState, pass_: GrantPass, queued: QueueEntry) -> Priority:
    """Returns with which priority a ticket asks. An aged ticket holds others up, and asks with the
    priority of the most urgent of them."""
    if not queued.is_aged:
        return queued.request.priority
    if pass_.most_urgent is None:
        entries = state.queue.at(pass_.node.node)
        pass_.most_urgent = min(e.request.priority for e in entries if not e.is_held)
    return pass_.most_urgent


# -- several parts at once ------------------------------------------------------------------------


def place_gang(state: CoreState, pass_: GrantPass, entry: Ticket, queued: QueueEntry) -> Outcome:
    """Places all members of a gang when the first of them comes up in the queue (A13)."""
    if gone := [t for t in entry.gang if t in state.answers]:
        reject_queued(state, entry, TicketClosed(gone[0]))
        return Outcome.REJECTED
    members = gangs.members(state, entry)
    if members is None and queued.is_aged:  # the other has not asked in all that time
        reject_queued(state, entry, TicketClosed(entry.ticket))
        return Outcome.REJECTED
    if members is None or any(state.queue.is_ahead(e.ticket, entry.ticket) for e in members):
        return Outcome.NOT_APPLICABLE
    books = compute_books(state, pass_.node)
    sizes = [(e, placement.estimated_bytes(state, e, pass_.most_bytes)) for e in members]
    most = pass_.most_for(state, entry.client.tenant)
    if any(_is_held(state, e) for e in members):
        return pass_.defer(queued, ())
    at_best = gangs.assign(sizes, books, most)
    if not at_best and pass_.node.may_gain_devices:
        return pass_.defer(queued, ())
    if not at_best:
        return _reject_gang(state, pass_, entry.client.tenant, books, sizes, most)
    room = pass_.open_to(state, entry)
    free = {b.device: Bytes(min(b.free_bytes, pass_.room(b.device, entry))) for b in room}
    now = gangs.assign(sizes, room, free) or gangs.assign(sizes, room, most)
    return _place_parts(state, pass_, queued, now or at_best)


def _is_held(state: CoreState, entry: Ticket) -> bool:
    queued = state.queue.find(entry.ticket)
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
    fits_alone = gangs.assign(sizes, books, {b.device: on_demand_of(b) for b in books})
    is_reserved = fits_alone and not pass_.node.lost
    reserved = QuotaExceeded(tenant, Bytes(0), need, whole, "bytes") if is_reserved else None
    for member, _ in sizes:
        reject_queued(state, member, reserved or _never_fits(pass_.node, member, need, whole))
    return Outcome.REJECTED


def _place_parts(
    state: CoreState, pass_: GrantPass, queued: QueueEntry, parts: list[gangs.Part]
) -> Outcome:
    """Grants all parts in this step, or none: no victim leaves for a part while another part finds
    no room."""
    needs = gangs.totals(parts)
    first = parts[0].entry
    priority = _asker_priority(state, pass_, queued)
    limits = pass_.limits(state, first, Bytes(sum(needs.values())))
    outcome = _hold_to_quota(state, pass_, first, limits, priority, needs)
    if outcome is not Outcome.NOT_APPLICABLE:
        return outcome
    is_shut = any(pressure.is_closed_to(state, p.entry, p.device) for p in parts)
    if is_shut or not needs.keys() <= pass_.books.keys():
        return pass_.defer(queued, ())
    if needs.keys() & pass_.reserved_devices:
        return pass_.defer(queued, pass_.books)
    for entry in {p.entry.ticket: p.entry for p in parts}.values():
        outcome = _hold_to_role(state, pass_, entry, queued, priority)
        if outcome is not Outcome.NOT_APPLICABLE:
            return outcome
    if not all(limits.fits(device, size) for device, size in needs.items()):
        _make_room_on_each(state, pass_, first, needs, priority)
        return pass_.defer(queued, pass_.books)
    for ticket in {p.entry.ticket: None for p in parts}:
        mine = [p for p in parts if p.entry.ticket == ticket]
        member = state.queue.find(ticket)
        assert member is not None
        _grant(state, pass_, mine[0].entry, member, {p.device: p.size_bytes for p in mine})
    return Outcome.GRANTED


def _make_room_on_each(
    state: CoreState, pass_: GrantPass, entry: Ticket, needs: Sizes, priority: Priority
) -> None:
    """Revokes victims on every device, or on none while one device would still lack room. A victim
    on several devices leaves all of them, so what each lacks is computed anew."""
    lacks = {d: Bytes(size - pass_.room(d, entry)) for d, size in needs.items()}
    if not all(n <= 0 or victims_for(state, entry, d, n, priority) for d, n in lacks.items()):
        return
    for device, size in sorted(needs.items()):
        if (lacking := Bytes(size - pass_.room(device, entry))) > 0:
            compact_or_evict(state, entry, device, lacking, priority)
        pass_.promised[device][entry.client.tenant] += size


# -- a wake ---------------------------------------------------------------------------------------


def wake(state: CoreState, pass_: GrantPass, entry: Ticket, queued: QueueEntry) -> Outcome:
    """Wakes an asleep ticket on the devices where its process lives, or asks for the room it
    lacks."""
    home = list(entry.home)
    if any(d not in pass_.books or pressure.is_closed_to(state, entry, d) for d in home):
        return pass_.defer(queued, ())
    priority = _asker_priority(state, pass_, queued)
    missing = {d: Bytes(size - entry.charge(d)) for d, size in entry.home.items()}
    limits = pass_.limits(state, entry, Bytes(sum(missing.values())))
    if never := _never_wakes(state, pass_, entry, limits, missing):
        reject_queued(state, entry, never)
        return Outcome.REJECTED
    outcome = _hold_to_quota(state, pass_, entry, limits, priority, home)
    if outcome is not Outcome.NOT_APPLICABLE:
        return outcome
    if pass_.reserved_devices & entry.home.keys():
        return pass_.defer(queued, home)
    outcome = _hold_to_role(state, pass_, entry, queued, priority)
    if outcome is not Outcome.NOT_APPLICABLE:
        return outcome
    if all(limits.fits(d, size) for d, size in missing.items()):
        entry.count_wake()
        return _grant(state, pass_, entry, queued, dict(entry.home))
    _make_room_on_each(state, pass_, entry, missing, priority)
    return pass_.defer(queued, home)


def _never_wakes(
    state: CoreState, pass_: GrantPass, entry: Ticket, limits: Limits, missing: Sizes
) -> NeverFits | QuotaExceeded | GpusLost | None:
    """Returns the error for an asleep ticket that can never be awake, however long it waits: its
    devices lend less (B6), or its tenant may have less (C10). What it holds asleep is a part of
    what it will hold, but of a pinned ticket that is left out of all limits."""
    whole = missing if entry.pinned else entry.home
    for device, size in whole.items():
        if size > (most := on_demand_of(pass_.books[device])):
            return NeverFits(entry.ticket, size, most)
    most_by_device = limits.most_by_device
    bound = sum(min(size, most_by_device.get(d, size)) for d, size in whole.items())
    return quotas.never(state, entry.client.tenant, Bytes(sum(whole.values())), bound)


def return_to_service(state: CoreState, entry: Ticket) -> Outcome:
    """Grants again a ticket that was to be woken, but never went to sleep."""
    state.unqueue(entry)
    state.decide(grant_of(entry))
    return Outcome.GRANTED


# -- the grant ------------------------------------------------------------------------------------


def _grant(
    state: CoreState, pass_: GrantPass, entry: Ticket, queued: QueueEntry, home: Sizes
) -> Outcome:
    state.queue.drop(entry.ticket)
    state.trades.note_granted((entry.holder, entry.model))
    state.accounts.served(queued.request.virtual_start_bytes)
    count_bypasses(state, pass_, queued.request.sequence, home)
    charge_and_grant(state, entry, home, since(queued.request.asked_at, state.now))
    return Outcome.GRANTED


def charge_and_grant(state: CoreState, entry: Ticket, home: Sizes, waited: Span = Span(0)) -> None:
    """Moves a ticket to LOADING. What is granted already (the copy in host RAM of an asleep ticket)
    stays charged. `waited`: in the queue."""
    key = entry.model_key
    if entry.wakes_count:
        predicted = state.estimates.wake_time(key)
    else:
        predicted = state.estimates.load_time(key, entry.need.weights_bytes)
    load_by = after(state.now, state.settings.timeouts.load)
    entry.begin_load(load_by, predicted)
    state.move(entry, State.LOADING, granted={**entry.granted, **home}, home=home)
    state.set_timer(entry, load_by)
    if is_to_be_pinned(state, entry):
        cap_pins(state, entry.node)
    state.decide(grant_of(entry))
    state.log(EventKind.TICKET_GRANTED, entry, size=entry.home_bytes, took=waited)
    if entry.need_is_explicit and entry.home_bytes > entry.need.device_bytes:
        declared_bytes = entry.need.device_bytes
        state.log(
            EventKind.EXPLICIT_TOO_LOW, entry, size=entry.home_bytes, explicit_bytes=declared_bytes
        )
    if entry.lease:
        leases.begin(state, entry)


def grant_of(entry: Ticket) -> Grant:
    """Returns the grant of a ticket that has one, as it was or is repeated."""
    devices = tuple(DeviceBytes(d, size) for d, size in sorted(entry.home.items()))
    load = entry.last_load
    return Grant(entry.ticket, devices, load.load_by, load.predicted)


def age(state: CoreState, entry: Ticket) -> None:
    """Runs the time rule of bypassing: after so long a ticket is aged, and at once where the
    settings allow no bypass."""
    queued = state.queue.find(entry.ticket)
    if queued is None or queued.is_aged or queued.is_held:
        return
    ages_at = after(queued.ages_from or queued.request.asked_at, state.settings.timeouts.bypass)
    if state.now >= ages_at or _is_never_bypassed(state, entry):
        state.queue.age(queued)
    else:
        state.set_timer(entry, ages_at)


def _is_never_bypassed(state: CoreState, entry: Ticket) -> bool:
    """Says whether no later ticket may be granted first. A gang takes its place with its last
    member: until then the others cannot be granted."""
    is_whole = not entry.gang or gangs.members(state, entry) is not None
    return not state.settings.bypass_count and is_whole


# -------------------------------------------------------------------------------------------------
# Optional exclusion groups (A11): the asker swaps with the resident model, as lawfully as for want
# of bytes.


def _hold_to_role(
    state: CoreState, pass_: GrantPass, entry: Ticket, queued: QueueEntry, priority: Priority
) -> Outcome:
    """Keeps a ticket to its exclusion group. A ticket deferred here lacks no bytes, so it holds up
    no ticket of another role. Once aged it holds up those of its own: another replica of the model
    that is to leave would keep the place."""
    if entry.role in pass_.reserved_roles:
        return pass_.defer(queued, ())
    outcome = swap_within_role(state, entry, priority)
    if outcome is not Outcome.DEFERRED:
        return outcome
    if queued.is_aged:
        pass_.reserved_roles.add(entry.role)
    return pass_.defer(queued, ())


def swap_within_role(state: CoreState, entry: Ticket, priority: Priority) -> Outcome:
    """Defers a ticket while another model of its role is awake on its node, and revokes that model
    if it lawfully may leave. Rejects the ticket where that model is pinned."""
    others = excluded_by(state, entry.node, entry.role, entry.model_name)
    stays = next((e for e in others if e.pinned and e.state is not State.DRAINING), None)
    if stays is not None:
        reject_queued(state, entry, RolePinned(entry.model, entry.role, entry.node, stays.model))
        return Outcome.REJECTED
    residents = [e for e in others if e.state is State.RESIDENT]
    if residents and all(may_revoke(state, e, entry, priority) for e in residents):
        for victim in residents:
            note_evicted_for(state, entry, victim)
            revoke(state, victim, Reason.SWAP, entry)
    return Outcome.DEFERRED if others else Outcome.NOT_APPLICABLE
