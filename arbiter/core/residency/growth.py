"""Lets a resident hold more, or give some back (A14).

Idle models make room for growth. A growing ticket never waits on a holder that itself waits for
growth: two of those could wait for each other for ever, so the later one is refused, at once, and
goes on with what it has. Every wait has an end in any case.
"""

from collections import Counter, defaultdict

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import EventKind, Grant, Reason
from arbiter.core.eviction import pressure
from arbiter.core.eviction.eligibility import may_leave
from arbiter.core.eviction.eviction import returning_bytes, revoke
from arbiter.core.eviction.ranking import effective_priority, ranked_victims
from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.ticket import Sizes, State, Ticket
from arbiter.core.state import CoreState
from arbiter.core.tickets import quotas
from arbiter.core.tickets.budget import on_demand
from arbiter.core.tickets.device_limits import readable_devices, watch_claims
from arbiter.errors import GrowthRefused, NeverFits, TicketClosed
from arbiter.units import Bytes, DeviceId, HolderId, NodeId, Span, TicketId, after, since

Devices = tuple[types.DeviceBytes, ...]


def on_growth_asked(state: CoreState, event: ev.GrowthAsked) -> None:
    """Notes a wish to grow, or refuses it at once where it could never be granted."""
    entry = state.live(event.ticket, State.RESIDENT, by=event.holder)
    if entry is None:
        return state.answer_error(event.ticket, TicketClosed(event.ticket))
    _end(state, entry)
    until = after(state.now, event.within)
    entry.ask_growth(event.more_bytes, until)
    if event.more_bytes <= 0:  # it wants no more
        return
    if any(device not in state.ledger.books for device in entry.home):
        return _reject(state, entry, _error(entry, "its device is gone"))
    if never := _never_fits(state, entry):
        return _reject(state, entry, never)
    if _is_over_quota(state, entry):
        return _reject(state, entry, _error(entry, "its tenant may not have as much"))
    if not all(_can_wait(state, e) for e in (*_growing(state), entry)):
        return _reject(state, entry, _error(entry, "it would wait on a holder that waits as well"))
    state.growing[entry.ticket] = None
    state.set_timer(entry, until)
    state.log(EventKind.GROWTH_ASKED, entry, size=event.more_bytes)


def on_gave_back(state: CoreState, event: ev.GaveBack) -> None:
    """Takes what a resident gave back. A message that was under way when the ticket grew again says
    nothing about that growth; if it holds all the same, heartbeats will say so."""
    entry = state.live(event.ticket, State.RESIDENT)
    if entry is None:
        return
    if entry.grown and state.now < entry.grown.shrinks_from:
        state.stale_count += 1
    else:
        _shrink(state, entry, event.devices)


def is_less(entry: Ticket, devices: Devices) -> bool:
    """Says whether the holder reports less than the ticket was granted."""
    return any(part.size_bytes < entry.home.get(part.device, 0) for part in devices)


def on_heartbeat(state: CoreState, entry: Ticket, devices: Devices) -> None:
    """Takes what a heartbeat says of its size. When that has been less for as long as a message may
    be under way, then a grant of more, or the word that it was given back, was lost."""
    if not is_less(entry, devices):
        entry.note_less_since(None)
    elif entry.less_since is None:
        entry.note_less_since(state.now)
    elif since(entry.less_since, state.now) >= state.settings.timeouts.unconfirmed:
        _shrink(state, entry, devices)


def _shrink(state: CoreState, entry: Ticket, devices: Devices) -> None:
    """Reduces a ticket to what its holder says; what it is still measured to hold stays on the
    books."""
    sizes = {part.device: part.size_bytes for part in devices}
    before = entry.home_bytes
    entry.note_less_since(None)
    home = {d: min(size, sizes.get(d, size)) for d, size in entry.home.items()}
    if home == entry.home:
        return
    _resize(state, entry, home)
    less = Bytes(before - entry.home_bytes)
    if entry.grown is None or not entry.grown.beyond_load_bytes:
        entry.note_drafter_gone()  # it never grew, or gave that back before
    entry.note_shrunk(less)
    entry.forget_peak()
    state.log(EventKind.GROWTH_GIVEN_BACK, entry, size=less)


def grant_waiting(state: CoreState) -> None:
    """Grants growth in the order it was asked for, before the queue: growing tickets are in service
    already. What suffices for a ticket that waits is left to it."""
    ahead: Counter[DeviceId] = Counter()
    for entry in _growing(state):
        is_gone = any(device not in state.ledger.books for device in entry.home)
        may_be = not (is_gone or _is_over_quota(state, entry)) and _may_be_lent(state, entry)
        if entry.state is not State.RESIDENT or is_gone:
            _reject(state, entry, _error(entry, "it is leaving"))
        elif may_be and _has_room(state, entry, ahead):
            _grow(state, entry)
        elif entry.growth is None or state.now >= entry.growth.until:
            _reject(state, entry, _error(entry, "there was no room in time"))
        elif may_be:
            _make_room(state, entry, ahead)
            lacking = {d: max(0, part) for d, part in _lacking(entry).items()}
            if all(part + ahead[d] <= _coming(state, entry, d) for d, part in lacking.items()):
                ahead.update(lacking)


def promised(state: CoreState, node: NodeId) -> defaultdict[DeviceId, Counter[str]]:
    """Returns what is free or on its way back on a node's devices and suffices for tickets that
    grow there, which are before the queue, by tenant."""
    sizes: defaultdict[DeviceId, Counter[str]] = defaultdict(Counter)
    for entry in _growing(state):
        is_there = entry.node == node and all(d in state.ledger.books for d in entry.home)
        if is_there and not _is_over_quota(state, entry):
            lacking = _lacking(entry)
            if all(part <= _coming(state, entry, d) for d, part in lacking.items()):
                for device, part in lacking.items():
                    sizes[device][entry.client.tenant] += max(0, part)
    return sizes


def _lacking(entry: Ticket) -> dict[DeviceId, int]:
    """Returns what it wants beyond what it took already, which is charged."""
    sizes = _wanted(entry).items()
    return {d: part + entry.granted.get(d, 0) - entry.charge(d) for d, part in sizes}


def _is_over_quota(state: CoreState, entry: Ticket) -> bool:
    """Says whether its tenant may not be charged what the growth would take beyond what the ticket
    took already."""
    more = Bytes(sum(max(0, part) for part in _lacking(entry).values()))
    return quotas.over_limit(state, entry.client.tenant, more) > 0


def _coming(state: CoreState, entry: Ticket, device: DeviceId) -> int:
    """Returns what is free for it on a device, or on its way back."""
    book = state.ledger.books[device]
    return _free(state, entry, book, has_left=True) + returning_bytes(book)


def _may_be_lent(state: CoreState, entry: Ticket) -> bool:
    """Says whether its devices may be lent from, as for a load: not while holders of the last epoch
    are awaited, nor on a device that was not read lately or whose real memory is short."""
    node = state.nodes.get(entry.node)
    if node is None or not state.is_settled or state.closing_by is not None:
        return False
    watch_claims(state, node)
    open_to = {book.device for book in readable_devices(state, node)}
    return all(d in open_to and not pressure.is_closed_to(state, entry, d) for d in entry.home)


def _growing(state: CoreState) -> list[Ticket]:
    entries = []
    for ticket in list(state.growing):
        entry = state.ledger.find(ticket)
        if entry is None:  # its engine ended, and its bytes were seen back, in one step
            del state.growing[ticket]
            state.answer_error(ticket, TicketClosed(ticket))
        else:
            entries.append(entry)
    return entries


def _grow(state: CoreState, entry: Ticket) -> None:
    sizes = _wanted(entry)
    home = {d: Bytes(size + sizes.get(d, 0)) for d, size in entry.home.items()}
    _resize(state, entry, home)
    state.growing.pop(entry.ticket, None)
    more = entry.grows_bytes
    entry.end_growth()
    late = state.settings.timeouts.unconfirmed if entry.grown else Span(0)
    entry.note_grown(more, shrinks_from=after(state.now, late))
    devices = tuple(types.DeviceBytes(d, size) for d, size in sorted(home.items()))
    load_by = after(state.now, state.settings.timeouts.load)
    time = state.estimates.load_time(entry.model_key)  # growing may be a restart of the engine
    state.decide(Grant(entry.ticket, devices, load_by, time))
    state.log(EventKind.GROWTH_GRANTED, entry, size=more)


def _resize(state: CoreState, entry: Ticket, home: Sizes) -> None:
    others = {d: size for d, size in entry.granted.items() if d not in home}
    state.ledger.resize(entry, {**others, **home}, home)
    if entry.pinned:  # there is less room for other pins now, or more
        state.timers.set(("pins", entry.node), state.now)


def _reject(state: CoreState, entry: Ticket, error: GrowthRefused | NeverFits) -> None:
    """Answers a wish to grow with an error, which is not remembered: the ticket goes on."""
    _end(state, entry)
    entry.end_growth()
    state.answer_error(entry.ticket, error)


def _end(state: CoreState, entry: Ticket) -> None:
    """Has it wait for growth no more; it may make room for the queue again."""
    state.growing.pop(entry.ticket, None)
    state.mark_dirty(entry.node)


def _error(entry: Ticket, cause: str) -> GrowthRefused:
    return GrowthRefused(entry.ticket, entry.grows_bytes, cause)


# -- how much where -------------------------------------------------------------------------------


def _wanted(entry: Ticket) -> Sizes:
    return {d: part for (d, _), part in _by_share(entry, entry.grows_bytes) if part}


def _by_share(entry: Ticket, total: Bytes) -> list[tuple[tuple[DeviceId, Bytes], Bytes]]:
    """Divides a total over its devices, in the proportion of what it has; the first takes the
    rest."""
    home = sorted(entry.home.items())
    parts = [total * size // max(1, entry.home_bytes) for _, size in home]
    parts[0] += total - sum(parts)
    return [(item, Bytes(part)) for item, part in zip(home, parts, strict=True)]


def _has_room(state: CoreState, entry: Ticket, ahead: Counter[DeviceId]) -> bool:
    """Says whether the growth fits now beside what those `ahead` wait for. What the ticket took
    beyond its grant is charged already."""
    return all(
        part + (ahead[d] if part > 0 else 0) <= _free(state, entry, state.ledger.books[d])
        for d, part in _lacking(entry).items()
    )


def _free(state: CoreState, entry: Ticket, book: DeviceAccount, has_left: bool = False) -> Bytes:
    """Returns the free bytes without what is kept for other tenants; `has_left`: see
    quotas.kept."""
    reserved_bytes = quotas.kept(
        quotas.reserves(state), book, entry.client.tenant, has_left=has_left
    )
    return Bytes(book.free_bytes - reserved_bytes)


# -- making room ----------------------------------------------------------------------------------


def _never_fits(state: CoreState, entry: Ticket) -> NeverFits | None:
    for device, part in _wanted(entry).items():
        book = state.ledger.books[device]
        others = (e for e in book.entries.values() if e is not entry and not _may_go(e))
        most = on_demand(book.budget_bytes, Bytes(sum(e.charge(device) for e in others)))
        need = Bytes(entry.home[device] + part)
        if need > most:
            return NeverFits(entry.ticket, need, most)
    return None


def _may_go(other: Ticket) -> bool:
    """Says whether another ticket may leave some time, so that this one may grow."""
    return not other.pinned


def _waiting_holders(state: CoreState, entry: Ticket) -> set[HolderId]:
    """Returns the holders that it must not wait for."""
    return {e.holder for e in _growing(state) if e is not entry}


def _can_wait(state: CoreState, entry: Ticket) -> bool:
    """Says whether there would be room if every ticket left that may, except those that wait for
    growth themselves. Asked of all that wait each time another joins them."""
    waiting = _waiting_holders(state, entry)
    return all(
        part <= _reachable(state.ledger.books[d], entry, waiting)
        for d, part in _lacking(entry).items()
    )


def _reachable(book: DeviceAccount, entry: Ticket, waiting: set[HolderId]) -> Bytes:
    leavable = (
        e.charge(book.device)
        for e in book.entries.values()
        if e is not entry and _may_go(e) and e.holder not in waiting
    )
    return Bytes(book.free_bytes + sum(leavable))


def _make_room(state: CoreState, entry: Ticket, ahead: Counter[DeviceId]) -> None:
    """Revokes idle tickets no more urgent than it: all that is missing on all of its devices, or
    none."""
    leaving: dict[TicketId, Ticket] = {}
    for device, part in _lacking(entry).items():
        wanted = part + (ahead[device] if part > 0 else 0)
        chosen = _victims(state, entry, state.ledger.books[device], wanted, leaving)
        if chosen is None:
            return
        leaving |= chosen
    for victim in leaving.values():
        revoke(state, victim, Reason.SWAP, entry)


def _victims(
    state: CoreState,
    entry: Ticket,
    book: DeviceAccount,
    part: int,
    leaving: dict[TicketId, Ticket],
) -> dict[TicketId, Ticket] | None:
    """Returns which tickets must leave a device beside those in `leaving`; None where these would
    not suffice."""
    short = part - _free(state, entry, book, has_left=True) - returning_bytes(book)
    waiting = _waiting_holders(state, entry)
    chosen: dict[TicketId, Ticket] = {}
    spare = quotas.ReserveSlack(state, book, entry.client.tenant)
    for victim in leaving.values():
        short -= spare.take(victim, victim.charge(book.device))
    for victim, option in ranked_victims(state, book) if short > 0 else ():
        is_lawful = may_leave(state, victim) and victim.holder not in waiting
        is_lawful = is_lawful and effective_priority(state, victim) >= entry.priority
        if short <= 0 or victim is entry or victim.ticket in leaving or not is_lawful:
            continue
        if worth := spare.take(victim, option.freed_bytes):
            chosen[victim.ticket] = victim
            short -= worth
    return chosen if short <= 0 else None
