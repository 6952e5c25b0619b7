"""A resident that wants more, or gives some back (SPEC A14).

Idle models make room for it. It never waits on a holder that itself waits for growth: two of those
could wait for each other for ever, so the later one is refused, at once, and goes on with what it
has. Every wait has an end in any case.
"""

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Grant, Reason
from arbiter.core.eviction import pressure
from arbiter.core.eviction.eligibility import may_leave
from arbiter.core.eviction.eviction import returning_bytes, revoke
from arbiter.core.eviction.ranking import effective_priority, ranked_victims
from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.ticket import Sizes, State, Ticket
from arbiter.core.state import CoreState
from arbiter.core.tickets import quotas
from arbiter.core.tickets.budget import on_demand
from arbiter.core.tickets.device_limits import readable_devices
from arbiter.errors import GrowthRefused, NeverFits, TicketClosed
from arbiter.units import Bytes, DeviceId, HolderId, Span, after, since

Devices = tuple[types.DeviceBytes, ...]


def on_growth_asked(mind: CoreState, event: ev.GrowthAsked) -> None:
    entry = mind.live(event.ticket, State.RESIDENT, by=event.holder)
    if entry is None:
        return mind.say_no(event.ticket, TicketClosed(event.ticket))
    mind.growing.pop(entry.ticket, None)
    entry.grows_bytes = event.more_bytes
    if event.more_bytes <= 0:  # it wants no more
        return
    if any(device not in mind.ledger.books for device in entry.home):
        return _reject(mind, entry, _error(entry, "its device is gone"))
    if never := _never_fits(mind, entry):
        return _reject(mind, entry, never)
    if quotas.over_limit(mind, entry.client.tenant, event.more_bytes):
        return _reject(mind, entry, _error(entry, "its tenant may not have as much"))
    if not all(_can_wait(mind, e) for e in (*_growing(mind), entry)):
        return _reject(mind, entry, _error(entry, "it would wait on a holder that waits as well"))
    entry.grows_by = after(mind.now, event.within)
    mind.growing[entry.ticket] = None
    mind.watch(entry, entry.grows_by)
    mind.tell("growth_asked", entry, size=event.more_bytes)


def on_gave_back(mind: CoreState, event: ev.GaveBack) -> None:
    """One that was under way when it grew again says nothing about that; if it holds all the same,
    heartbeats will say so."""
    entry = mind.live(event.ticket, State.RESIDENT)
    if entry is None:
        return
    if entry.shrinks_from is not None and mind.now < entry.shrinks_from:
        mind.stale_count += 1
    else:
        _shrink(mind, entry, event.devices)


def is_less(entry: Ticket, devices: Devices) -> bool:
    """Its holder says that it has less than it was granted."""
    return any(said.size_bytes < entry.home.get(said.device, 0) for said in devices)


def on_heartbeat(mind: CoreState, entry: Ticket, devices: Devices) -> None:
    """A heartbeat says what it has. When it has been less for as long as a message may be under
    way, then a grant of more, or the word that it was given back, was lost."""
    if not is_less(entry, devices):
        entry.less_since = None
    elif entry.less_since is None:
        entry.less_since = mind.now
    elif since(entry.less_since, mind.now) >= mind.settings.terms.unconfirmed:
        _shrink(mind, entry, devices)


def _shrink(mind: CoreState, entry: Ticket, devices: Devices) -> None:
    """To what its holder says; what it is still measured to hold stays on the books."""
    said = {part.device: part.size_bytes for part in devices}
    before, entry.less_since = entry.home_bytes, None
    home = {d: min(size, said.get(d, size)) for d, size in entry.home.items()}
    if home == entry.home:
        return
    _resize(mind, entry, home)
    less = Bytes(before - entry.home_bytes)
    entry.grown_bytes = Bytes(max(0, entry.grown_bytes - less))
    entry.peak_bytes, entry.readings_count = Bytes(0), 0  # as after a load
    mind.tell("growth_given_back", entry, size=less)


def grant_waiting(mind: CoreState) -> None:
    """In the order they asked. Before the line: they are in service already."""
    for entry in _growing(mind):
        is_gone = any(device not in mind.ledger.books for device in entry.home)
        may_be = not is_gone and _may_be_lent(mind, entry)
        if entry.state is not State.RESIDENT or is_gone:
            _reject(mind, entry, _error(entry, "it is leaving"))
        elif may_be and _has_room(mind, entry):
            _grow(mind, entry)
        elif mind.now >= entry.grows_by:
            _reject(mind, entry, _error(entry, "there was no room in time"))
        elif may_be:
            for device, part in _wanted(entry).items():
                _make_room(mind, entry, mind.ledger.books[device], part)


def _may_be_lent(mind: CoreState, entry: Ticket) -> bool:
    """As for a load: nothing is lent while holders of the last epoch are awaited, on a device that
    was not read lately, or where real memory is short."""
    node = mind.nodes.get(entry.node)
    if node is None or not mind.is_settled or mind.closing_by is not None:
        return False
    open_to = {book.device for book in readable_devices(mind, node)}
    return all(d in open_to and not pressure.is_closed_to(mind, entry, d) for d in entry.home)


def _growing(mind: CoreState) -> list[Ticket]:
    found = []
    for ticket in list(mind.growing):
        entry = mind.ledger.find(ticket)
        if entry is None:
            del mind.growing[ticket]
        else:
            found.append(entry)
    return found


def _grow(mind: CoreState, entry: Ticket) -> None:
    wanted = _wanted(entry)
    home = {d: Bytes(size + wanted.get(d, 0)) for d, size in entry.home.items()}
    _resize(mind, entry, home)
    mind.growing.pop(entry.ticket, None)
    more, entry.grows_bytes = entry.grows_bytes, Bytes(0)
    has_grown_before = entry.shrinks_from is not None
    late = mind.settings.terms.unconfirmed if has_grown_before else Span(0)
    entry.shrinks_from, entry.less_since = after(mind.now, late), None
    entry.grown_bytes = Bytes(entry.grown_bytes + more)
    devices = tuple(types.DeviceBytes(d, size) for d, size in sorted(home.items()))
    load_by = after(mind.now, mind.settings.terms.load)
    time = mind.estimates.load_time(mind.key_of(entry))  # growing may be a restart of the engine
    mind.say(Grant(entry.ticket, devices, load_by, time))
    mind.tell("growth_granted", entry, size=more)


def _resize(mind: CoreState, entry: Ticket, home: Sizes) -> None:
    others = {d: size for d, size in entry.granted.items() if d not in home}
    entry.home = home
    mind.ledger.resize(entry, {**others, **home})


def _reject(mind: CoreState, entry: Ticket, error: GrowthRefused | NeverFits) -> None:
    """Not remembered as the ticket's answer: the ticket goes on."""
    mind.growing.pop(entry.ticket, None)
    entry.grows_bytes = Bytes(0)
    mind.say_no(entry.ticket, error)


def _error(entry: Ticket, cause: str) -> GrowthRefused:
    return GrowthRefused(entry.ticket, entry.grows_bytes, cause)


# -- how much where -------------------------------------------------------------------------------


def _wanted(entry: Ticket) -> Sizes:
    return {d: part for (d, _), part in _by_share(entry, entry.grows_bytes) if part}


def _by_share(entry: Ticket, total: Bytes) -> list[tuple[tuple[DeviceId, Bytes], Bytes]]:
    """Of a total over its devices, in the proportion of what it has; the first takes the rest."""
    home = sorted(entry.home.items())
    parts = [total * size // max(1, entry.home_bytes) for _, size in home]
    parts[0] += total - sum(parts)
    return [(item, Bytes(part)) for item, part in zip(home, parts, strict=True)]


def _has_room(mind: CoreState, entry: Ticket) -> bool:
    """What it took already beyond its grant is charged already."""
    return not quotas.over_limit(mind, entry.client.tenant, entry.grows_bytes) and all(
        part
        <= _free(mind, entry, mind.ledger.books[d])
        + entry.charge(d)
        - entry.granted.get(d, Bytes(0))
        for d, part in _wanted(entry).items()
    )


def _free(mind: CoreState, entry: Ticket, book: DeviceAccount, has_left: bool = False) -> Bytes:
    """Without what is kept for other tenants; `has_left`: see there."""
    kept = quotas.kept(quotas.reserves(mind), book, entry.client.tenant, has_left)
    return Bytes(book.free_bytes - kept)


# -- who makes room -------------------------------------------------------------------------------


def _never_fits(mind: CoreState, entry: Ticket) -> NeverFits | None:
    for device, part in _wanted(entry).items():
        book = mind.ledger.books[device]
        others = (e for e in book.entries.values() if e is not entry and not _may_go(e, entry))
        most = on_demand(book.budget_bytes, Bytes(sum(e.charge(device) for e in others)))
        need = Bytes(entry.home[device] + part)
        if need > most:
            return NeverFits(entry.ticket, need, most)
    return None


def _may_go(other: Ticket, entry: Ticket) -> bool:
    """Some time, so that it may grow. What lives in its own process does not."""
    return not other.pinned and other.lives_in != entry.ticket


def _waiting_holders(mind: CoreState, entry: Ticket) -> set[HolderId]:
    """Whom it must not wait for."""
    return {e.holder for e in _growing(mind) if e is not entry}


def _can_wait(mind: CoreState, entry: Ticket) -> bool:
    """There would be room if everybody left who may, but those who wait for growth themselves.
    Asked of all that wait each time another joins them."""
    waiting = _waiting_holders(mind, entry)
    return all(
        part <= _reachable(mind.ledger.books[d], entry, waiting)
        for d, part in _wanted(entry).items()
    )


def _reachable(book: DeviceAccount, entry: Ticket, waiting: set[HolderId]) -> Bytes:
    leavable = (
        e.charge(book.device)
        for e in book.entries.values()
        if e is not entry and _may_go(e, entry) and e.holder not in waiting
    )
    return Bytes(book.free_bytes + sum(leavable))


def _make_room(mind: CoreState, entry: Ticket, book: DeviceAccount, part: Bytes) -> None:
    """Idle ones no more urgent than it; all that is missing or nobody."""
    short = part - _free(mind, entry, book, has_left=True) - returning_bytes(book)
    if short <= 0:
        return
    waiting = _waiting_holders(mind, entry)
    chosen: list[Ticket] = []
    spare = quotas.ReserveSlack(mind, book, entry.client.tenant)
    for victim, option in ranked_victims(mind, book):
        is_lawful = may_leave(mind, victim) and victim.holder not in waiting
        is_lawful = is_lawful and effective_priority(mind, victim) >= entry.priority
        if short <= 0 or victim is entry or not is_lawful:
            continue
        if worth := spare.take(victim, option.freed_bytes):
            chosen.append(victim)
            short -= worth
    for victim in chosen if short <= 0 else []:
        revoke(mind, victim, Reason.SWAP, entry)
