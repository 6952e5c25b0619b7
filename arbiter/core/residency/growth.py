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
from arbiter.core.tickets.budget import unpinned
from arbiter.core.tickets.lendable_devices import readable_devices, watch_claims
from arbiter.errors import GrowthRefused, NeverFits, TicketClosed
from arbiter.units import Bytes, DeviceId, HolderId, NodeId, Span, TicketId, after, since

Devices = tuple[types.DeviceBytes, ...]


def on_growth_asked(state: CoreState, event: ev.GrowthAsked) -> None:
    """Notes a wish to grow, or refuses it at once where it could never be granted. Raises
    TicketClosed, to this asker alone, for a ticket that another holder has."""
    ticket = state.ledger.find(event.ticket)
    if ticket is not None and event.holder not in (None, ticket.holder):
        state.stale_count += 1
        raise TicketClosed(event.ticket)
    ticket = state.find_or_count_stale(event.ticket, State.RESIDENT)
    if ticket is None:
        return state.answer_error(event.ticket, TicketClosed(event.ticket))
    _end(state, ticket)
    until = after(state.now, event.within)
    ticket.ask_growth(event.more_bytes, until)
    if event.more_bytes <= 0:  # it wants no more
        return
    if any(device not in state.ledger.books for device in ticket.home):
        return _reject(state, ticket, _error(ticket, "its device is gone"))
    if never := _never_fits(state, ticket):
        return _reject(state, ticket, never)
    if _is_over_quota(state, ticket):
        return _reject(state, ticket, _error(ticket, "its tenant may not have as much"))
    if not all(_can_wait(state, t) for t in (*_growing(state), ticket)):
        return _reject(
            state, ticket, _error(ticket, "it would wait on a holder that waits as well")
        )
    state.growing[ticket.id] = None
    state.set_timer(ticket, until)
    state.log(EventKind.GROWTH_ASKED, ticket, size=event.more_bytes)


def on_gave_back(state: CoreState, event: ev.GaveBack) -> None:
    """Takes what a resident gave back. A message that was under way when the ticket grew again says
    nothing about that growth; if it holds all the same, heartbeats will say so."""
    ticket = state.find_or_count_stale(event.ticket, State.RESIDENT)
    if ticket is None:
        return
    if ticket.grown and state.now < ticket.grown.shrinks_from:
        state.stale_count += 1
    else:
        _shrink(state, ticket, event.devices)


def is_less(ticket: Ticket, devices: Devices) -> bool:
    """Says whether the holder reports less than the ticket was granted."""
    return any(part.size_bytes < ticket.home.get(part.device, 0) for part in devices)


def on_heartbeat(state: CoreState, ticket: Ticket, devices: Devices) -> None:
    """Takes what a heartbeat says of its size. When that has been less for as long as a message may
    be under way, then a grant of more, or the word that it was given back, was lost."""
    if not is_less(ticket, devices):
        ticket.note_less_since(None)
    elif ticket.less_since is None:
        ticket.note_less_since(state.now)
    elif since(ticket.less_since, state.now) >= state.settings.timeouts.unconfirmed:
        _shrink(state, ticket, devices)


def _shrink(state: CoreState, ticket: Ticket, devices: Devices) -> None:
    """Reduces a ticket to what its holder says; what it is still measured to hold stays on the
    books."""
    sizes = {part.device: part.size_bytes for part in devices}
    before = ticket.granted_home_bytes
    ticket.note_less_since(None)
    home = {d: min(size, sizes.get(d, size)) for d, size in ticket.home.items()}
    if home == ticket.home:
        return
    _resize(state, ticket, home)
    less = Bytes(before - ticket.granted_home_bytes)
    if ticket.grown is None or not ticket.grown.beyond_load_bytes:
        ticket.note_drafter_gone()  # it never grew, or gave that back before
    ticket.note_shrunk(less)
    ticket.forget_peak()
    state.log(EventKind.GROWTH_GIVEN_BACK, ticket, size=less)


def grant_waiting(state: CoreState) -> None:
    """Grants growth in the order it was asked for, before the queue: growing tickets are in service
    already. What suffices for a ticket that waits is left to it."""
    ahead: Counter[DeviceId] = Counter()
    tickets = _growing(state)
    _watch_claims(state, tickets)
    for ticket in tickets:
        is_gone = any(device not in state.ledger.books for device in ticket.home)
        may_be = not (is_gone or _is_over_quota(state, ticket)) and _may_be_lent(state, ticket)
        if ticket.state is not State.RESIDENT or is_gone:
            _reject(state, ticket, _error(ticket, "it is leaving"))
        elif may_be and _has_room(state, ticket, ahead):
            _grow(state, ticket)
        elif ticket.growth is None or state.now >= ticket.growth.until:
            _reject(state, ticket, _error(ticket, "there was no room in time"))
        elif may_be:
            _make_room(state, ticket, ahead)
            lacking = {d: max(0, part) for d, part in _lacking(ticket).items()}
            if all(part + ahead[d] <= _coming(state, ticket, d) for d, part in lacking.items()):
                ahead.update(lacking)


def _watch_claims(state: CoreState, tickets: list[Ticket]) -> None:
    """Has growth looked at again once claims to engines on the tickets' devices are over."""
    if not state.is_settled or state.closing_by is not None:
        return
    for name in dict.fromkeys(ticket.node for ticket in tickets):
        node = state.nodes.get(name)
        if node is not None:
            watch_claims(state, node)


def promised(state: CoreState, node: NodeId) -> defaultdict[DeviceId, Counter[str]]:
    """Returns what is free or on its way back on a node's devices and suffices for tickets that
    grow there, which are before the queue, by tenant."""
    sizes: defaultdict[DeviceId, Counter[str]] = defaultdict(Counter)
    for ticket in _growing(state):
        is_there = ticket.node == node and all(d in state.ledger.books for d in ticket.home)
        if is_there and not _is_over_quota(state, ticket):
            lacking = _lacking(ticket)
            if all(part <= _coming(state, ticket, d) for d, part in lacking.items()):
                for device, part in lacking.items():
                    sizes[device][ticket.client.tenant] += max(0, part)
    return sizes


def _lacking(ticket: Ticket) -> dict[DeviceId, int]:
    """Returns what it wants beyond what it took already, which is charged."""
    sizes = _wanted_sizes(ticket).items()
    return {d: part + ticket.granted.get(d, 0) - ticket.charge(d) for d, part in sizes}


def _is_over_quota(state: CoreState, ticket: Ticket) -> bool:
    """Says whether its tenant may not be charged what the growth would take beyond what the ticket
    took already."""
    more = Bytes(sum(max(0, part) for part in _lacking(ticket).values()))
    return quotas.over_limit(state, ticket.client.tenant, more) > 0


def _coming(state: CoreState, ticket: Ticket, device: DeviceId) -> int:
    """Returns what is free for it on a device, or on its way back."""
    book = state.ledger.books[device]
    return _free(state, ticket, book, has_left=True) + returning_bytes(book)


def _may_be_lent(state: CoreState, ticket: Ticket) -> bool:
    """Says whether its devices may be lent from, as for a load: not while holders of the last epoch
    are awaited, nor on a device that was not read lately or whose real memory is short."""
    node = state.nodes.get(ticket.node)
    if node is None or not state.is_settled or state.closing_by is not None:
        return False
    open_to = {book.device for book in readable_devices(state, node)}
    return all(d in open_to and not pressure.is_closed_to(state, ticket, d) for d in ticket.home)


def _growing(state: CoreState) -> list[Ticket]:
    """Returns the tickets that wait for growth, in the order in which they asked, without those
    that have closed."""
    tickets = []
    for ticket_id in list(state.growing):
        ticket = state.ledger.find(ticket_id)
        if ticket is None:  # its engine ended, and its bytes were seen back, in one step
            del state.growing[ticket_id]
            state.answer_error(ticket_id, TicketClosed(ticket_id))
        else:
            tickets.append(ticket)
    return tickets


def _grow(state: CoreState, ticket: Ticket) -> None:
    """Grants a ticket the growth that it waits for."""
    sizes = _wanted_sizes(ticket)
    home = {d: Bytes(size + sizes.get(d, 0)) for d, size in ticket.home.items()}
    _resize(state, ticket, home)
    state.growing.pop(ticket.id, None)
    more = ticket.grows_bytes
    ticket.end_growth()
    late = state.settings.timeouts.unconfirmed if ticket.grown else Span(0)
    ticket.note_grown(more, shrinks_from=after(state.now, late))
    devices = tuple(types.DeviceBytes(d, size) for d, size in sorted(home.items()))
    load_by = after(state.now, state.settings.timeouts.load)
    time = state.estimates.load_time(ticket.model_key)  # growing may be a restart of the engine
    state.decide(Grant(ticket.id, devices, load_by, time))
    state.log(EventKind.GROWTH_GRANTED, ticket, size=more)


def _resize(state: CoreState, ticket: Ticket, home: Sizes) -> None:
    """Charges a ticket what it has now while it is awake, in bytes by device."""
    others = {d: size for d, size in ticket.granted.items() if d not in home}
    state.ledger.resize(ticket, {**others, **home}, home)
    if ticket.pinned:  # there is less room for other pins now, or more
        state.timers.set(("pins", ticket.node), state.now)


def _reject(state: CoreState, ticket: Ticket, error: GrowthRefused | NeverFits) -> None:
    """Answers a wish to grow with an error, which is not remembered: the ticket goes on."""
    _end(state, ticket)
    ticket.end_growth()
    state.answer_error(ticket.id, error)


def _end(state: CoreState, ticket: Ticket) -> None:
    """Has it wait for growth no more; it may make room for the queue again."""
    state.growing.pop(ticket.id, None)
    state.mark_dirty(ticket.node)


def _error(ticket: Ticket, cause: str) -> GrowthRefused:
    """Returns the error for a growth that is refused."""
    return GrowthRefused(ticket.id, ticket.grows_bytes, cause)


# -- how much where -------------------------------------------------------------------------------


def _wanted_sizes(ticket: Ticket) -> Sizes:
    """Returns the bytes that a ticket wants to grow by, by device."""
    return {d: part for (d, _), part in _by_share(ticket, ticket.grows_bytes) if part}


def _by_share(ticket: Ticket, total: Bytes) -> list[tuple[tuple[DeviceId, Bytes], Bytes]]:
    """Divides a total over a ticket's devices, in the proportion of what it has there; the first
    device takes what rounding leaves. Each part comes with its device and the bytes there."""
    home = sorted(ticket.home.items())
    parts = [total * size // max(1, ticket.granted_home_bytes) for _, size in home]
    parts[0] += total - sum(parts)
    return [(item, Bytes(part)) for item, part in zip(home, parts, strict=True)]


def _has_room(state: CoreState, ticket: Ticket, ahead: Counter[DeviceId]) -> bool:
    """Says whether the growth fits now beside what those `ahead` wait for. What the ticket took
    beyond its grant is charged already."""
    return all(
        part + (ahead[d] if part > 0 else 0) <= _free(state, ticket, state.ledger.books[d])
        for d, part in _lacking(ticket).items()
    )


def _free(state: CoreState, ticket: Ticket, book: DeviceAccount, has_left: bool = False) -> Bytes:
    """Returns the free bytes without what is kept for other tenants; `has_left`: see
    quotas.reserved_for_others."""
    reserved_bytes = quotas.reserved_for_others(
        quotas.reserves(state), book, ticket.client.tenant, has_left=has_left
    )
    return Bytes(book.free_bytes - reserved_bytes)


# -- making room ----------------------------------------------------------------------------------


def _never_fits(state: CoreState, ticket: Ticket) -> NeverFits | None:
    """Returns the error for a growth that could never be granted; None where it could."""
    for device, part in _wanted_sizes(ticket).items():
        book = state.ledger.books[device]
        others = (t for t in book.tickets.values() if t is not ticket and not _may_go(t))
        most = unpinned(book.budget_bytes, Bytes(sum(t.charge(device) for t in others)))
        need = Bytes(ticket.home[device] + part)
        if need > most:
            return NeverFits(ticket.id, need, most)
    return None


def _may_go(other: Ticket) -> bool:
    """Says whether another ticket may leave some time, so that this one may grow."""
    return not other.pinned


def _waiting_holders(state: CoreState, ticket: Ticket) -> set[HolderId]:
    """Returns the holders that it must not wait for."""
    return {t.holder for t in _growing(state) if t is not ticket}


def _can_wait(state: CoreState, ticket: Ticket) -> bool:
    """Says whether there would be room if every ticket left that may, except those that wait for
    growth themselves. Asked of all that wait each time another joins them."""
    waiting = _waiting_holders(state, ticket)
    return all(
        part <= _reachable(state.ledger.books[d], ticket, waiting)
        for d, part in _lacking(ticket).items()
    )


def _reachable(book: DeviceAccount, ticket: Ticket, waiting: set[HolderId]) -> Bytes:
    """Returns the bytes of a device that would be free if every other ticket left that may, except
    those of holders in `waiting`."""
    leavable = (
        t.charge(book.device)
        for t in book.tickets.values()
        if t is not ticket and _may_go(t) and t.holder not in waiting
    )
    return Bytes(book.free_bytes + sum(leavable))


def _make_room(state: CoreState, ticket: Ticket, ahead: Counter[DeviceId]) -> None:
    """Revokes idle tickets no more urgent than it: all that is missing on all of its devices, or
    none."""
    leaving: dict[TicketId, Ticket] = {}
    for device, part in _lacking(ticket).items():
        wanted = part + (ahead[device] if part > 0 else 0)
        chosen = _victims(state, ticket, state.ledger.books[device], wanted, leaving)
        if chosen is None:
            return
        leaving |= chosen
    for victim in leaving.values():
        revoke(state, victim, Reason.SWAP, ticket)


def _victims(
    state: CoreState,
    ticket: Ticket,
    book: DeviceAccount,
    part: int,
    leaving: dict[TicketId, Ticket],
) -> dict[TicketId, Ticket] | None:
    """Returns which tickets must leave a device beside those in `leaving`; None where these would
    not suffice."""
    short = part - _free(state, ticket, book, has_left=True) - returning_bytes(book)
    waiting = _waiting_holders(state, ticket)
    chosen: dict[TicketId, Ticket] = {}
    spare = quotas.ReserveSlack(state, book, ticket.client.tenant)
    for victim in leaving.values():
        short -= spare.take(victim, victim.charge(book.device))
    for victim, option in ranked_victims(state, book) if short > 0 else ():
        is_lawful = may_leave(state, victim) and victim.holder not in waiting
        is_lawful = is_lawful and effective_priority(state, victim) >= ticket.priority
        if short <= 0 or victim is ticket or victim.id in leaving or not is_lawful:
            continue
        if worth := spare.take(victim, option.freed_bytes):
            chosen[victim.id] = victim
            short -= worth
    return chosen if short <= 0 else None
