"""From the line to a grant (A3, A4, B6, C6, C9): who is next, and where it goes.

Only nodes on which something has changed are looked at, each in the order of its line. A ticket
that cannot load now does not hold up one behind it that can, until it has been overtaken 8 times or
has waited 30 s: from then on it is due, nobody who came later is granted on a device that it could
use, and it asks with the urgency of the most urgent it holds up. Bytes that are on their way for
one ticket are not lent to another.
"""

from collections.abc import Iterable

from arbiter.core import types
from arbiter.core.decisions import Grant, Reason
from arbiter.core.eviction import oversize, pressure
from arbiter.core.eviction.eligibility import may_swap
from arbiter.core.eviction.eviction import evict_own, make_room, revoke, victims_for
from arbiter.core.queue import gangs, placement
from arbiter.core.queue.pass_state import GrantPass, count_bypasses
from arbiter.core.records.request_queue import QueueEntry
from arbiter.core.records.ticket import Sizes, State, Ticket
from arbiter.core.residency import prefetch
from arbiter.core.state import CoreState, reject_queued
from arbiter.core.tickets import leases, quotas
from arbiter.core.tickets.device_limits import (
    cap_pins,
    compute_books,
    flag_pinned_on,
    on_demand_of,
)
from arbiter.core.tickets.loads import note_evicted_for
from arbiter.core.types import Priority
from arbiter.errors import NeverFits, QuotaExceeded, TicketClosed
from arbiter.units import SECOND, Bytes, DeviceId, Span, after, since

# -- a new load -----------------------------------------------------------------------------------


def place(state: CoreState, pass_: GrantPass, entry: Ticket, waiting: QueueEntry) -> None:
    need = _need(state, pass_, entry, waiting)
    if need > pass_.open_bytes and not _may_exceed(state, pass_, entry, waiting, need):
        return
    urgent = _urgency(state, pass_, waiting)
    if _is_known_unplaceable(pass_, entry, waiting, need) or _waits_for_own_quota(
        state, pass_, entry, need, urgent
    ):
        return
    sites = [s.device for s in placement.devices_for(state, pass_.books.values(), entry, need)]
    found = [d for d in sites if d not in pass_.reserved_devices]
    if is_excluded_by_role(state, entry, urgent):
        pass_.defer(waiting, sites)
        return
    if device := next((d for d in found if pass_.fits(d, need, entry)), None):
        _grant(state, pass_, entry, waiting, {device: need})
        return
    if found and (late := prefetch.cancel_for(state, entry)):
        reject_queued(state, entry, late)
        return
    promised = next((d for d in found if pass_.room(d, entry) >= need), None) or next(
        (d for d in found if make_room(state, entry, d, need - pass_.room(d, entry), urgent)), None
    )
    if promised:
        pass_.promised[promised] += need
    elif found == sites and not _is_closed_to_it_only(state, pass_, entry):
        pass_.unplaceable.append((need, entry.priority, waiting.quota_group))  # for want of bytes
    pass_.defer(waiting, sites)


def _is_closed_to_it_only(state: CoreState, pass_: GrantPass, entry: Ticket) -> bool:
    """Of a device that others may use: they are not unplaceable for its sake."""
    return any(pressure.is_closed_to(state, entry, device) for device in pass_.books)


def _is_known_unplaceable(
    pass_: GrantPass, entry: Ticket, waiting: QueueEntry, need: Bytes
) -> bool:
    if waiting.is_aged or not pass_.is_unplaceable(need, entry.priority, waiting.quota_group):
        return False
    pass_.is_waiting = True
    return True


def _waits_for_own_quota(
    state: CoreState,
    pass_: GrantPass,
    entry: Ticket,
    need: Bytes,
    urgent: types.Priority,
    over: Iterable[DeviceId] = (),
) -> bool:
    """Its tenant has too much already (C10): some of that goes first, or it is refused for
    good. True: it is not its turn, and it holds up nobody. `over`: the devices that it needs
    together; where none is named, any one of the node will do."""
    tenant = entry.client.tenant
    if tenant not in state.tenants and not pass_.reserves:
        return False
    bounds = quotas.at_most(state, tenant, compute_books(state, pass_.node))
    bound = sum(bounds[d] for d in over) if over else max(bounds.values(), default=need)
    if never := quotas.never(state, tenant, need, bound):
        reject_queued(state, entry, never)
        return True
    if not quotas.over_limit(state, tenant, need):
        return False
    pass_.is_waiting = True
    if short := quotas.over_limit_after_drain(state, tenant, need):
        evict_own(state, entry, short, urgent)
    state.timers.set(("queue", pass_.node.node), after(state.now, Span(SECOND)))
    return True


def _need(state: CoreState, pass_: GrantPass, entry: Ticket, waiting: QueueEntry) -> Bytes:
    """Asked of the estimates anew only when these have changed."""
    if waiting.version != state.estimates.version:
        waiting.need_bytes = placement.estimated_bytes(state, entry, pass_.largest_bytes)
        if not oversize.may_exceed_budget(entry):
            stats = state.queue.stats(entry.node)
            stats.know(waiting, waiting.need_bytes, state.estimates.version)
    return waiting.need_bytes


def foresee_need(state: CoreState, entry: Ticket) -> None:
    """As it joins, so that nobody need walk to its place in a long line. About whom there is more
    to say than how much it needs, that is found out when its turn comes."""
    waiting, node = state.queue.find(entry.ticket), state.nodes.get(entry.node)
    is_special = entry.gang or entry.is_prefetch or entry.role in state.settings.one_resident_roles
    is_special = is_special or oversize.may_exceed_budget(entry)
    if waiting is None or node is None or is_special or entry.state is not State.QUEUED:
        return
    books = compute_books(state, node)
    need = placement.estimated_bytes(
        state, entry, max((b.budget_bytes for b in books), default=Bytes(0))
    )
    if any(need <= on_demand_of(b) for b in books):
        state.queue.stats(entry.node).know(waiting, need, state.estimates.version)


def _may_exceed(
    state: CoreState, pass_: GrantPass, entry: Ticket, waiting: QueueEntry, need: Bytes
) -> bool:
    """It is larger than anything waiting can bring (B6), perhaps for what others have reserved
    (C10). False: it is dealt with."""
    books = compute_books(state, pass_.node)
    bounds = quotas.at_most(state, entry.client.tenant, books)
    if not books or need <= max(bounds.values()):
        return True  # no device is known yet, or the reserve is its own
    room = pass_.open_to(state, entry)
    several = gangs.split(room, need, entry.split, bounds)
    if several := several or gangs.split(books, need, entry.split, bounds):
        _place_parts(state, pass_, waiting, [gangs.Part(entry, d, s) for d, s in several.items()])
        return False
    if need <= pass_.most_bytes:
        return True  # it is told what they leave
    if entry.allow_oversize:
        if never := quotas.never(state, entry.client.tenant, need, max(bounds.values())):
            reject_queued(state, entry, never)
            return False
        pass_.defer(waiting, list(pass_.books))
        if home := oversize.evict_all_idle(state, room, entry):
            _grant(state, pass_, entry, waiting, home)
            state.log("oversize", entry, size=need, granted_bytes=entry.home_bytes)
        else:
            pass_.reserved_devices.update(book.device for book in room)
        return False
    if entry.pinned:
        flag_pinned_on(state, max(books, key=on_demand_of), need)
    reject_queued(state, entry, NeverFits(entry.ticket, need, pass_.most_bytes))
    return False


def _urgency(state: CoreState, pass_: GrantPass, waiting: QueueEntry) -> types.Priority:
    """One that is due holds others up, and asks for the most urgent of them."""
    if not waiting.is_aged:
        return waiting.request.priority
    if pass_.most_urgent is None:
        pass_.most_urgent = min(w.request.priority for w in state.queue.at(pass_.node.node))
    return pass_.most_urgent


# -- several parts at once ------------------------------------------------------------------------


def place_gang(state: CoreState, pass_: GrantPass, entry: Ticket, waiting: QueueEntry) -> None:
    """The first of its members to come up in the line asks for all of them (A13)."""
    if gone := [t for t in entry.gang if t in state.answers]:
        reject_queued(state, entry, TicketClosed(gone[0]))
        return
    there = gangs.members(state, entry)
    if there is None and waiting.is_aged:  # the other has not asked in all that time
        reject_queued(state, entry, TicketClosed(entry.ticket))
        return
    if there is None or any(state.queue.is_ahead(e.ticket, entry.ticket) for e in there):
        return
    books, tenant = compute_books(state, pass_.node), entry.client.tenant
    sizes = [(e, placement.estimated_bytes(state, e, pass_.largest_bytes)) for e in there]
    most = quotas.at_most(state, tenant, books)
    if not gangs.assign(sizes, books, most):
        need, whole = Bytes(sum(s for _, s in sizes)), Bytes(sum(most.values()))
        fits_alone = gangs.assign(sizes, books, {b.device: on_demand_of(b) for b in books})
        reserved = QuotaExceeded(tenant, Bytes(0), need, whole, "bytes") if fits_alone else None
        for member in there:
            reject_queued(state, member, reserved or NeverFits(member.ticket, need, whole))
        return
    room = pass_.open_to(state, entry)
    free = {b.device: Bytes(min(b.free_bytes, pass_.room(b.device, entry))) for b in room}
    now = gangs.assign(sizes, room, free) or gangs.assign(sizes, room, most)
    _place_parts(state, pass_, waiting, now or gangs.assign(sizes, books, most))


def _place_parts(
    state: CoreState, pass_: GrantPass, waiting: QueueEntry, parts: list[gangs.Part]
) -> None:
    """All of them in this step, or none: nobody leaves for a part while another finds no room."""
    needs, first = gangs.totals(parts), parts[0].entry
    urgent = _urgency(state, pass_, waiting)
    if _waits_for_own_quota(state, pass_, first, Bytes(sum(needs.values())), urgent, needs):
        return
    shut = any(pressure.is_closed_to(state, p.entry, p.device) for p in parts)
    if shut or needs.keys() & pass_.reserved_devices or not needs.keys() <= pass_.books.keys():
        pass_.defer(waiting, list(pass_.books))
    elif all(pass_.fits(device, size, first) for device, size in needs.items()):
        for ticket in {p.entry.ticket: None for p in parts}:
            mine = [p for p in parts if p.entry.ticket == ticket]
            in_line = state.queue.find(ticket)
            assert in_line is not None
            _grant(state, pass_, mine[0].entry, in_line, {p.device: p.size_bytes for p in mine})
    else:
        _make_room_on_each(state, pass_, first, needs, urgent)
        pass_.defer(waiting, list(pass_.books))


def _make_room_on_each(
    state: CoreState, pass_: GrantPass, entry: Ticket, needs: Sizes, urgent: types.Priority
) -> None:
    """Nobody leaves on one device while another would still lack room. Who was on several has left
    all of them, so how much is missing on each is asked anew."""
    lacks = {d: size - pass_.room(d, entry) for d, size in needs.items()}
    if not all(n <= 0 or victims_for(state, entry, d, n, urgent) for d, n in lacks.items()):
        return
    for device, size in sorted(needs.items()):
        if (lacking := size - pass_.room(device, entry)) > 0:
            make_room(state, entry, device, lacking, urgent)
        pass_.promised[device] += size


# -- a wake ---------------------------------------------------------------------------------------


def wake(state: CoreState, pass_: GrantPass, entry: Ticket, waiting: QueueEntry) -> None:
    """A sleeper wakes where its process lives."""
    home = list(entry.home)
    if any(d not in pass_.books or pressure.is_closed_to(state, entry, d) for d in home):
        pass_.defer(waiting, home)
        return
    urgent = _urgency(state, pass_, waiting)
    missing = {d: Bytes(size - entry.charge(d)) for d, size in entry.home.items()}
    more = Bytes(sum(missing.values()))
    if _waits_for_own_quota(state, pass_, entry, more, urgent, home):
        return
    if pass_.reserved_devices & entry.home.keys() or is_excluded_by_role(state, entry, urgent):
        pass_.defer(waiting, home)
    elif all(pass_.fits(d, size, entry) for d, size in missing.items()):
        entry.wakes_count += 1
        _grant(state, pass_, entry, waiting, dict(entry.home))
    elif tight := [d for d in home if entry.home[d] > on_demand_of(pass_.books[d])]:
        most = on_demand_of(pass_.books[tight[0]])
        reject_queued(state, entry, NeverFits(entry.ticket, entry.home[tight[0]], most))
    else:
        _make_room_on_each(state, pass_, entry, missing, urgent)
        pass_.defer(waiting, home)


def return_to_service(state: CoreState, entry: Ticket) -> None:
    """It was to be woken, but never went to sleep."""
    state.unqueue(entry)
    state.decide(grant_of(entry))


# -- the grant ------------------------------------------------------------------------------------


def _grant(
    state: CoreState, pass_: GrantPass, entry: Ticket, waiting: QueueEntry, home: Sizes
) -> None:
    state.queue.drop(entry.ticket)
    state.accounts.served(waiting.request.virtual_start_bytes)
    count_bypasses(state, pass_, waiting.request.sequence, home)
    charge_and_grant(state, entry, home)


def charge_and_grant(state: CoreState, entry: Ticket, home: Sizes) -> None:
    """To LOADING. Whatever is granted already (the copy in host RAM of a sleeper) stays charged."""
    waited = since(entry.since, state.now)
    entry.home = home
    key = state.key_of(entry)
    if entry.wakes_count:
        entry.predicted = state.estimates.wake_time(key)
    else:
        entry.predicted = state.estimates.load_time(key, entry.need.weights_bytes)
    entry.load_by = after(state.now, state.settings.timeouts.load)
    entry.peak_bytes, entry.readings_count = Bytes(0), 0
    state.move(entry, State.LOADING, granted={**entry.granted, **home})
    state.set_timer(entry, entry.load_by)
    if entry.pinned:
        cap_pins(state, home)
    state.decide(grant_of(entry))
    state.log("ticket_granted", entry, size=entry.home_bytes, took=waited)
    if entry.need_is_explicit and entry.home_bytes > entry.need.device_bytes:
        said = entry.need.device_bytes
        state.log("explicit_too_low", entry, size=entry.home_bytes, explicit_bytes=said)
    if entry.lease:
        leases.begin(state, entry)


def grant_of(entry: Ticket) -> Grant:
    devices = tuple(types.DeviceBytes(d, size) for d, size in sorted(entry.home.items()))
    return Grant(entry.ticket, devices, entry.load_by, entry.predicted)


def age(state: CoreState, entry: Ticket) -> None:
    """The time rule of overtaking: after so long nobody does."""
    waiting = state.queue.find(entry.ticket)
    if waiting is None or waiting.is_aged:
        return
    ages_at = after(waiting.request.asked, state.settings.timeouts.bypass)
    if state.now >= ages_at:
        state.queue.age(waiting)
    else:
        state.set_timer(entry, ages_at)


# -------------------------------------------------------------------------------------------------
# Optional exclusion groups (A11): of a role that is named, one resident model on each node.
#
# The one that asks swaps with the one that is there, as lawfully as for want of bytes.


AWAKE = frozenset({State.LOADING, State.RESIDENT, State.DRAINING})


def is_excluded_by_role(state: CoreState, entry: Ticket, urgent: Priority) -> bool:
    """Another model of its role is awake on its node; if it lawfully may, it is asked to leave."""
    if entry.role not in state.settings.one_resident_roles:
        return False
    others = [e for e in _awake_on(state, entry) if _excludes(e, entry)]
    residents = [e for e in others if e.state is State.RESIDENT]
    if residents and all(may_swap(state, e, entry, urgent) for e in residents):
        for victim in residents:
            note_evicted_for(state, entry, victim)
            revoke(state, victim, Reason.SWAP, entry)
    return bool(others)


def _awake_on(state: CoreState, entry: Ticket) -> list[Ticket]:
    node = state.nodes[entry.node]
    books = (state.ledger.books[d] for d in sorted(node.devices))
    found = {e.ticket: e for b in books for e in b.entries.values()}
    return list(found.values())


def _excludes(one: Ticket, other: Ticket) -> bool:
    """Replicas of one model do not exclude each other."""
    same_model = (one.capability, one.model) == (other.capability, other.model)
    return one.state in AWAKE and one.role == other.role and not same_model
