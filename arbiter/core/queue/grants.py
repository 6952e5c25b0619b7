"""From the line to a grant (SPEC A3, A4, B6, C6, C9): who is next, and where it goes.

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


def place(mind: CoreState, look: GrantPass, entry: Ticket, waiting: QueueEntry) -> None:
    need = _need(mind, look, entry, waiting)
    if need > look.open_bytes and not _may_exceed(mind, look, entry, waiting, need):
        return
    urgent = _urgency(mind, look, waiting)
    if _is_known_unplaceable(look, entry, waiting, need) or _waits_for_own_quota(
        mind, look, entry, need, urgent
    ):
        return
    sites = [s.device for s in placement.devices_for(mind, look.books.values(), entry, need)]
    found = [d for d in sites if d not in look.held]
    if is_excluded_by_role(mind, entry, urgent):
        look.wait(waiting, sites)
        return
    if device := next((d for d in found if look.fits(d, need, entry)), None):
        _grant(mind, look, entry, waiting, {device: need})
        return
    if found and (late := prefetch.cancel_for(mind, entry)):
        reject_queued(mind, entry, late)
        return
    promised = next((d for d in found if look.room(d, entry) >= need), None) or next(
        (d for d in found if make_room(mind, entry, d, need - look.room(d, entry), urgent)), None
    )
    if promised:
        look.promised[promised] += need
    elif found == sites and not _is_closed_to_it_only(mind, look, entry):
        look.hopeless.append((need, entry.priority, waiting.standing))  # for want of bytes
    look.wait(waiting, sites)


def _is_closed_to_it_only(mind: CoreState, look: GrantPass, entry: Ticket) -> bool:
    """Of a device that others may use: they are not hopeless for its sake."""
    return any(pressure.is_closed_to(mind, entry, device) for device in look.books)


def _is_known_unplaceable(look: GrantPass, entry: Ticket, waiting: QueueEntry, need: Bytes) -> bool:
    if waiting.is_due or not look.is_hopeless(need, entry.priority, waiting.standing):
        return False
    look.is_waiting = True
    return True


def _waits_for_own_quota(
    mind: CoreState,
    look: GrantPass,
    entry: Ticket,
    need: Bytes,
    urgent: types.Priority,
    over: Iterable[DeviceId] = (),
) -> bool:
    """Its tenant has too much already (SPEC C10): some of that goes first, or it is refused for
    good. True: it is not its turn, and it holds up nobody. `over`: the devices that it needs
    together; where none is named, any one of the node will do."""
    tenant = entry.client.tenant
    if tenant not in mind.tenants and not look.reserves:
        return False
    bounds = quotas.at_most(mind, tenant, compute_books(mind, look.node))
    bound = sum(bounds[d] for d in over) if over else max(bounds.values(), default=need)
    if never := quotas.never(mind, tenant, need, bound):
        reject_queued(mind, entry, never)
        return True
    if not quotas.over_limit(mind, tenant, need):
        return False
    look.is_waiting = True
    if short := quotas.over_limit_after_drain(mind, tenant, need):
        evict_own(mind, entry, short, urgent)
    mind.alarms.set(("line", look.node.node), after(mind.now, Span(SECOND)))
    return True


def _need(mind: CoreState, look: GrantPass, entry: Ticket, waiting: QueueEntry) -> Bytes:
    """Asked of the estimates anew only when these have changed."""
    if waiting.version != mind.estimates.version:
        waiting.need_bytes = placement.estimated_bytes(mind, entry, look.largest_bytes)
        if not oversize.may_exceed_budget(entry):
            crowd = mind.line.crowd(entry.node)
            crowd.know(waiting, waiting.need_bytes, mind.estimates.version)
    return waiting.need_bytes


def foresee_need(mind: CoreState, entry: Ticket) -> None:
    """As it joins, so that nobody need walk to its place in a long line. About whom there is more
    to say than how much it needs, that is found out when its turn comes."""
    waiting, node = mind.line.find(entry.ticket), mind.nodes.get(entry.node)
    is_special = entry.gang or entry.is_guess or entry.role in mind.settings.one_resident_roles
    is_special = is_special or oversize.may_exceed_budget(entry)
    if waiting is None or node is None or is_special or entry.state is not State.QUEUED:
        return
    books = compute_books(mind, node)
    need = placement.estimated_bytes(
        mind, entry, max((b.budget_bytes for b in books), default=Bytes(0))
    )
    if any(need <= on_demand_of(b) for b in books):
        mind.line.crowd(entry.node).know(waiting, need, mind.estimates.version)


def _may_exceed(
    mind: CoreState, look: GrantPass, entry: Ticket, waiting: QueueEntry, need: Bytes
) -> bool:
    """It is larger than anything waiting can bring (SPEC B6), perhaps for what others have reserved
    (SPEC C10). False: it is dealt with."""
    books = compute_books(mind, look.node)
    bounds = quotas.at_most(mind, entry.client.tenant, books)
    if not books or need <= max(bounds.values()):
        return True  # no device is known yet, or the reserve is its own
    room = look.open_to(mind, entry)
    several = gangs.split(room, need, entry.split, bounds)
    if several := several or gangs.split(books, need, entry.split, bounds):
        _place_parts(mind, look, waiting, [gangs.Part(entry, d, s) for d, s in several.items()])
        return False
    if need <= look.most_bytes:
        return True  # it is told what they leave
    if entry.allow_oversize:
        if never := quotas.never(mind, entry.client.tenant, need, max(bounds.values())):
            reject_queued(mind, entry, never)
            return False
        look.wait(waiting, list(look.books))
        if home := oversize.evict_all_idle(mind, room, entry):
            _grant(mind, look, entry, waiting, home)
            mind.tell("oversize", entry, size=need, granted_bytes=entry.home_bytes)
        else:
            look.held.update(book.device for book in room)
        return False
    if entry.pinned:
        flag_pinned_on(mind, max(books, key=on_demand_of), need)
    reject_queued(mind, entry, NeverFits(entry.ticket, need, look.most_bytes))
    return False


def _urgency(mind: CoreState, look: GrantPass, waiting: QueueEntry) -> types.Priority:
    """One that is due holds others up, and asks for the most urgent of them."""
    if not waiting.is_due:
        return waiting.waiter.priority
    if look.most_urgent is None:
        look.most_urgent = min(w.waiter.priority for w in mind.line.at(look.node.node))
    return look.most_urgent


# -- several parts at once ------------------------------------------------------------------------


def place_gang(mind: CoreState, look: GrantPass, entry: Ticket, waiting: QueueEntry) -> None:
    """The first of its members to come up in the line asks for all of them (SPEC A13)."""
    if gone := [t for t in entry.gang if t in mind.answers]:
        reject_queued(mind, entry, TicketClosed(gone[0]))
        return
    there = gangs.members(mind, entry)
    if there is None and waiting.is_due:  # the other has not asked in all that time
        reject_queued(mind, entry, TicketClosed(entry.ticket))
        return
    if there is None or any(mind.line.is_ahead(e.ticket, entry.ticket) for e in there):
        return
    books, tenant = compute_books(mind, look.node), entry.client.tenant
    sizes = [(e, placement.estimated_bytes(mind, e, look.largest_bytes)) for e in there]
    most = quotas.at_most(mind, tenant, books)
    if not gangs.assign(sizes, books, most):
        need, whole = Bytes(sum(s for _, s in sizes)), Bytes(sum(most.values()))
        fits_alone = gangs.assign(sizes, books, {b.device: on_demand_of(b) for b in books})
        reserved = QuotaExceeded(tenant, Bytes(0), need, whole, "bytes") if fits_alone else None
        for member in there:
            reject_queued(mind, member, reserved or NeverFits(member.ticket, need, whole))
        return
    room = look.open_to(mind, entry)
    free = {b.device: Bytes(min(b.free_bytes, look.room(b.device, entry))) for b in room}
    now = gangs.assign(sizes, room, free) or gangs.assign(sizes, room, most)
    _place_parts(mind, look, waiting, now or gangs.assign(sizes, books, most))


def _place_parts(
    mind: CoreState, look: GrantPass, waiting: QueueEntry, parts: list[gangs.Part]
) -> None:
    """All of them in this step, or none: nobody leaves for a part while another finds no room."""
    needs, first = gangs.totals(parts), parts[0].entry
    urgent = _urgency(mind, look, waiting)
    if _waits_for_own_quota(mind, look, first, Bytes(sum(needs.values())), urgent, needs):
        return
    shut = any(pressure.is_closed_to(mind, p.entry, p.device) for p in parts)
    if shut or needs.keys() & look.held or not needs.keys() <= look.books.keys():
        look.wait(waiting, list(look.books))
    elif all(look.fits(device, size, first) for device, size in needs.items()):
        for ticket in {p.entry.ticket: None for p in parts}:
            mine = [p for p in parts if p.entry.ticket == ticket]
            in_line = mind.line.find(ticket)
            assert in_line is not None
            _grant(mind, look, mine[0].entry, in_line, {p.device: p.size_bytes for p in mine})
    else:
        _make_room_on_each(mind, look, first, needs, urgent)
        look.wait(waiting, list(look.books))


def _make_room_on_each(
    mind: CoreState, look: GrantPass, entry: Ticket, needs: Sizes, urgent: types.Priority
) -> None:
    """Nobody leaves on one device while another would still lack room. Who was on several has left
    all of them, so how much is missing on each is asked anew."""
    lacks = {d: size - look.room(d, entry) for d, size in needs.items()}
    if not all(n <= 0 or victims_for(mind, entry, d, n, urgent) for d, n in lacks.items()):
        return
    for device, size in sorted(needs.items()):
        if (lacking := size - look.room(device, entry)) > 0:
            make_room(mind, entry, device, lacking, urgent)
        look.promised[device] += size


# -- a wake ---------------------------------------------------------------------------------------


def wake(mind: CoreState, look: GrantPass, entry: Ticket, waiting: QueueEntry) -> None:
    """A sleeper wakes where its process lives."""
    home = list(entry.home)
    if any(d not in look.books or pressure.is_closed_to(mind, entry, d) for d in home):
        look.wait(waiting, home)
        return
    urgent = _urgency(mind, look, waiting)
    missing = {d: Bytes(size - entry.charge(d)) for d, size in entry.home.items()}
    more = Bytes(sum(missing.values()))
    if _waits_for_own_quota(mind, look, entry, more, urgent, home):
        return
    if look.held & entry.home.keys() or is_excluded_by_role(mind, entry, urgent):
        look.wait(waiting, home)
    elif all(look.fits(d, size, entry) for d, size in missing.items()):
        entry.wakes_count += 1
        _grant(mind, look, entry, waiting, dict(entry.home))
    elif tight := [d for d in home if entry.home[d] > on_demand_of(look.books[d])]:
        most = on_demand_of(look.books[tight[0]])
        reject_queued(mind, entry, NeverFits(entry.ticket, entry.home[tight[0]], most))
    else:
        _make_room_on_each(mind, look, entry, missing, urgent)
        look.wait(waiting, home)


def return_to_service(mind: CoreState, entry: Ticket) -> None:
    """It was to be woken, but never went to sleep."""
    mind.unqueue(entry)
    mind.say(grant_of(entry))


# -- the grant ------------------------------------------------------------------------------------


def _grant(
    mind: CoreState, look: GrantPass, entry: Ticket, waiting: QueueEntry, home: Sizes
) -> None:
    mind.line.drop(entry.ticket)
    mind.accounts.served(waiting.waiter.turn_bytes)
    count_bypasses(mind, look, waiting.waiter.turn, home)
    charge_and_grant(mind, entry, home)


def charge_and_grant(mind: CoreState, entry: Ticket, home: Sizes) -> None:
    """To LOADING. Whatever is granted already (the copy in host RAM of a sleeper) stays charged."""
    waited = since(entry.since, mind.now)
    entry.home = home
    key = mind.key_of(entry)
    if entry.wakes_count:
        entry.predicted = mind.estimates.wake_time(key)
    else:
        entry.predicted = mind.estimates.load_time(key, entry.need.weights_bytes)
    entry.load_by = after(mind.now, mind.settings.terms.load)
    entry.peak_bytes, entry.readings_count = Bytes(0), 0
    mind.move(entry, State.LOADING, granted={**entry.granted, **home})
    mind.watch(entry, entry.load_by)
    if entry.pinned:
        cap_pins(mind, home)
    mind.say(grant_of(entry))
    mind.tell("ticket_granted", entry, size=entry.home_bytes, took=waited)
    if entry.need_is_explicit and entry.home_bytes > entry.need.device_bytes:
        said = entry.need.device_bytes
        mind.tell("explicit_too_low", entry, size=entry.home_bytes, explicit_bytes=said)
    if entry.lease:
        leases.begin(mind, entry)


def grant_of(entry: Ticket) -> Grant:
    devices = tuple(types.DeviceBytes(d, size) for d, size in sorted(entry.home.items()))
    return Grant(entry.ticket, devices, entry.load_by, entry.predicted)


def age(mind: CoreState, entry: Ticket) -> None:
    """The time rule of overtaking: after so long nobody does."""
    waiting = mind.line.find(entry.ticket)
    if waiting is None or waiting.is_due:
        return
    due_at = after(waiting.waiter.asked, mind.settings.terms.bypass)
    if mind.now >= due_at:
        mind.line.ripen(waiting)
    else:
        mind.watch(entry, due_at)


# -------------------------------------------------------------------------------------------------
# Optional exclusion groups (SPEC A11): of a role that is named, one resident model on each node.
#
# The one that asks swaps with the one that is there, as lawfully as for want of bytes.


AWAKE = frozenset({State.LOADING, State.RESIDENT, State.DRAINING})


def is_excluded_by_role(mind: CoreState, entry: Ticket, urgent: Priority) -> bool:
    """Another model of its role is awake on its node; if it lawfully may, it is asked to leave."""
    if entry.role not in mind.settings.one_resident_roles:
        return False
    others = [e for e in _awake_on(mind, entry) if _excludes(e, entry)]
    residents = [e for e in others if e.state is State.RESIDENT]
    if residents and all(may_swap(mind, e, entry, urgent) for e in residents):
        for victim in residents:
            note_evicted_for(mind, entry, victim)
            revoke(mind, victim, Reason.SWAP, entry)
    return bool(others)


def _awake_on(mind: CoreState, entry: Ticket) -> list[Ticket]:
    node = mind.nodes[entry.node]
    books = (mind.ledger.books[d] for d in sorted(node.devices))
    found = {e.ticket: e for b in books for e in b.entries.values()}
    return [e for e in found.values() if e.lives_in is None]


def _excludes(one: Ticket, other: Ticket) -> bool:
    """Replicas of one model do not exclude each other."""
    same_model = (one.capability, one.model) == (other.capability, other.model)
    return one.state in AWAKE and one.role == other.role and not same_model
