"""Who goes so that another may come (SPEC A6, A9, B4, C3), and the answers of those asked.

Lawful here means: awake and not loading, not pinned, past its minimum residency, not just refused.
The policy only prices them; the core takes the cheapest set that suffices (victims.py), or none.
"""

from dataclasses import replace
from enum import Enum, auto

from arbiter.decisions import Probe, Reason, Revoke, Tier
from arbiter.events import Floor, Priority
from arbiter.ledger import Book, Entry, Sizes, State
from arbiter.rules import tenants, urgency
from arbiter.rules.budget import share
from arbiter.rules.choices import Choice
from arbiter.rules.loads import displace, guesses_for
from arbiter.rules.mind import Mind
from arbiter.rules.ranking import in_order, no_more_urgent
from arbiter.rules.reclaim import charged, is_counted_on, take
from arbiter.rules.victims import EXACT_COUNT, Option, choose
from arbiter.units import (
    SECOND,
    Bytes,
    DeviceId,
    Instant,
    Span,
    TicketId,
    after,
    host_device,
    in_seconds,
    since,
)

Victims = list[Entry]


class Obstacle(Enum):
    """Why somebody may not be revoked for one that waits."""

    ITSELF = auto()
    UNLAWFUL = auto()
    AHEAD = auto()
    URGENT = auto()
    LATELY = auto()
    RESERVED = auto()


# -- choosing -------------------------------------------------------------------------------------


def make_room(mind: Mind, waiting: Entry, device: DeviceId, short: int, urgent: Priority) -> bool:
    """Asks for `short` bytes beyond what is on its way; `urgent`: how urgent it is to `waiting`.
    All or nothing: nobody leaves for a ticket that still would not fit."""
    book = mind.ledger.books[device]
    if guesses := guesses_for(mind, book, short):  # as loads that were abandoned
        for guess in guesses:
            take(mind, guess, Reason.WITHDRAWN)
        return True
    options, chosen = _weigh(mind, book, waiting, Bytes(short), urgent)
    if chosen:
        _remember(mind, book, waiting, Bytes(short), options, chosen)
    victims = [book.entries[option.ticket] for option in chosen]
    for victim in victims:
        displace(mind, waiting, victim)
        revoke(mind, victim, Reason.SWAP, waiting)
    return bool(victims)


def make_way(mind: Mind, waiting: Entry, short: Bytes, urgent: Priority) -> bool:
    """Of its own tenant only, on whatever device, the cheapest that free `short` (SPEC C10)."""
    own = {e.ticket: e for e in tenants.tickets_of(mind, waiting.client.tenant)}
    books = {d for e in own.values() for d in e.home if d in mind.ledger.books}
    options: dict[TicketId, Option] = {}
    for device in sorted(books):
        for entry, option in in_order(mind, mind.ledger.books[device]):
            if entry.ticket in own and may_swap(mind, entry, waiting, urgent):
                freed = tenants.process_bytes(mind, entry)
                options[entry.ticket] = replace(option, freed_bytes=freed)
    chosen = choose(options.values(), short)
    for option in chosen:
        displace(mind, waiting, own[option.ticket])
        revoke(mind, own[option.ticket], Reason.SWAP, waiting)
    return bool(chosen)


def room_for(mind: Mind, waiting: Entry, device: DeviceId, short: int, urgent: Priority) -> Victims:
    """Who would leave; nobody where all who may be asked would not do."""
    book = mind.ledger.books[device]
    if guesses := guesses_for(mind, book, short):
        return guesses
    _, chosen = _weigh(mind, book, waiting, Bytes(short), urgent)
    return [book.entries[option.ticket] for option in chosen]


def relieve(mind: Mind) -> None:
    """Overcommitted devices: idle models leave until the rest fits. The one that took more than it
    was granted goes first; what is in use stays, and is asked again when it falls idle."""
    for node in mind.changed():
        for book in mind.ledger.overcommitted(node):
            short = Bytes(-book.free_bytes - coming_back(book))
            if short > 0:
                mind.alarms.set(("line", node), after(mind.now, Span(SECOND)))
                for victim in _as_far_as(mind, book, short):
                    revoke(mind, victim, Reason.FIT, None)


def coming_back(book: Book) -> Bytes:
    """Asked for or being reclaimed already, so not to be asked for twice."""
    if not book.leaving:
        return Bytes(0)
    returning = (
        e.charge(book.device) - (e.granted.get(book.device, 0) if _stays_on(book, e) else 0)
        for e in book.leaving.values()
        if is_counted_on(e)
    )
    return Bytes(sum(returning))


def _stays_on(book: Book, entry: Entry) -> bool:
    """Host bytes reserved for a model on its way to sleep are not coming back."""
    return entry.state is State.DRAINING and book.device not in entry.home


def _is_lawful(mind: Mind, entry: Entry) -> bool:
    return (
        entry.state in (State.RESIDENT, State.ASLEEP)
        and not entry.pinned
        and entry.lives_in is None
        and (entry.lease is None or entry.lease.preemptible)
        and not (entry.state is State.ASLEEP and _floor(mind, entry) is Floor.HOST)
        and mind.now >= entry.refused_until
    )


def _obstacle(mind: Mind, entry: Entry, waiting: Entry, urgent: Priority) -> Obstacle | None:
    """None: it may be revoked for `waiting`. Never one more urgent than who asks; an equal only
    after its minimum residency (SPEC C2, C4). A sleeper that waits to be woken gives way to those
    before it in the line, never to those behind: what it still holds on the device could keep the
    first in line waiting for ever."""
    if entry is waiting:
        return Obstacle.ITSELF
    if not _is_lawful(mind, entry):
        return Obstacle.UNLAWFUL
    if mind.tenants and tenants.is_reserved(mind, entry, waiting.client.tenant):
        return Obstacle.RESERVED
    if entry.ticket in mind.line:
        is_ahead = mind.line.is_ahead(waiting.ticket, entry.ticket)
        return None if is_ahead else Obstacle.AHEAD
    its_own = urgency.of(mind, entry)
    if its_own < urgent:
        return Obstacle.URGENT
    if its_own == urgent and mind.now < min_residency_ends(mind, entry):
        return Obstacle.LATELY
    return None


def may_swap(mind: Mind, entry: Entry, waiting: Entry, urgent: Priority) -> bool:
    return _obstacle(mind, entry, waiting, urgent) is None


def obstacle(mind: Mind, entry: Entry, waiting: Entry, urgent: Priority) -> str | None:
    """The same in words; None: it may."""
    match _obstacle(mind, entry, waiting, urgent):
        case Obstacle.ITSELF:
            return "it is the one that waits"
        case Obstacle.UNLAWFUL:
            return _never(mind, entry)
        case Obstacle.RESERVED:
            return f"it is of what is reserved for {entry.client.tenant}"
        case Obstacle.AHEAD:
            return "it waits itself, further ahead"
        case Obstacle.URGENT:
            its_own = urgency.of(mind, entry).name.lower()
            return f"it is more urgent ({its_own} before {urgent.name.lower()})"
        case Obstacle.LATELY:
            left_s = in_seconds(since(mind.now, min_residency_ends(mind, entry)))
            return f"it came lately, and stays {left_s:.1f} s yet for what its load took"
    return None


def _never(mind: Mind, entry: Entry) -> str:
    if entry.pinned:
        return "it is pinned"
    if entry.lives_in:
        return f"it goes when {entry.lives_in} goes"
    if mind.now < entry.refused_until:
        left_s = in_seconds(since(mind.now, entry.refused_until))
        return f"it was busy when asked, and is left alone for {left_s:.1f} s"
    return f"it is {entry.state.value}"


def may_leave(mind: Mind, entry: Entry) -> bool:
    """For want of real memory minimum residency does not count; being in use does."""
    return _is_lawful(mind, entry) and entry.inflight == 0 and entry.ticket not in mind.line


def min_residency_ends(mind: Mind, entry: Entry) -> Instant:
    if entry.state is not State.RESIDENT or entry.is_guess:
        return entry.since
    settings = mind.settings
    in_loads = Span(int(entry.load_took * settings.min_residency_loads))
    at_least = max(settings.min_residency, min(in_loads, settings.min_residency_most))
    return after(entry.resident_since, at_least)


def _weigh(
    mind: Mind, book: Book, waiting: Entry, short: Bytes, urgent: Priority
) -> tuple[list[Option], list[Option]]:
    """Lawful options, and the cheapest set of them that suffices, or none. In an order that is long
    nobody looks far behind those that would do."""
    options: list[Option] = []
    missing, spare_count = int(short), EXACT_COUNT
    spare = tenants.Spare(mind, book, waiting.client.tenant)
    for option in no_more_urgent(mind, book, urgent):
        if missing <= 0 and (spare_count == 0 or option.rank != options[-1].rank):
            break
        entry = book.entries[option.ticket]
        if _obstacle(mind, entry, waiting, urgent) is not None:
            continue
        if worth := spare.take(entry, option.freed_bytes):
            spare_count -= missing <= 0
            missing -= worth
            is_all = worth == option.freed_bytes
            options.append(option if is_all else replace(option, freed_bytes=worth))
    return options, choose(options, short) if missing <= 0 else []


def _remember(
    mind: Mind, book: Book, waiting: Entry, short: Bytes, options: list[Option],
    chosen: list[Option],
) -> None:  # fmt: skip
    """What was weighed, for whoever asks why (SPEC K3)."""
    mind.choices.add(
        Choice(
            mind.now, waiting.ticket, waiting.model, book.device, short, mind.settings.evict,
            tuple(options), tuple(book.entries[option.ticket].model for option in options),
            frozenset(option.ticket for option in chosen),
        )
    )  # fmt: skip


def _as_far_as(mind: Mind, book: Book, short: Bytes) -> Victims:
    """As many as help, even if not all is found: the memory is already taken."""
    chosen: Victims = []
    missing = int(short)
    ranked = in_order(mind, book)
    for entry, option in sorted(ranked, key=lambda pair: not _took_more(pair[0], book.device)):
        if missing > 0 and may_leave(mind, entry) and not entry.allow_oversize:
            chosen.append(entry)
            missing -= option.freed_bytes
    return chosen


def _took_more(entry: Entry, device: DeviceId) -> bool:
    return entry.measured.get(device, 0) > entry.granted.get(device, 0)


# -- asking ---------------------------------------------------------------------------------------


def revoke(mind: Mind, entry: Entry, reason: Reason, waiting: Entry | None) -> None:
    """A resident is asked, a sleeper has nothing in flight and is taken."""
    size = charged(entry)
    for_whom = waiting.ticket if waiting else None
    mind.tell("eviction", entry, size=size, reason=reason.value, waiting=for_whom)
    entry.revoked_at = mind.now
    if entry.state is State.ASLEEP:
        take(mind, entry, reason)
        return
    sleeps = reason in (Reason.SWAP, Reason.FIT) or _floor(mind, entry) is Floor.HOST
    granted = _with_bed(mind, entry) if sleeps else None
    entry.leaving, entry.to = reason, Tier.ASLEEP if granted else Tier.GONE
    entry.unloading_since = entry.slept_at = None
    notice = entry.lease.notice if entry.lease else mind.settings.terms.barrier
    entry.barrier_until = after(mind.now, notice)
    mind.move(entry, State.DRAINING, granted)
    mind.watch(entry, after(entry.barrier_until, mind.settings.terms.answer))
    ask(mind, entry)


def _floor(mind: Mind, entry: Entry) -> Floor:
    return mind.floors.get((entry.capability, entry.model), Floor.COLD)


def ask(mind: Mind, entry: Entry) -> None:
    reason = entry.leaving or Reason.SWAP
    mind.say(Revoke(entry.ticket, entry.holder, reason, entry.to, entry.barrier_until))


def _with_bed(mind: Mind, entry: Entry) -> Sizes | None:
    """What it is granted plus host RAM to sleep in; None when it cannot or there is no room."""
    host = mind.ledger.books.get(host_device(entry.node))
    bed = entry.need.host_bytes
    if host is None or bed == 0 or not mind.estimates.can_sleep(mind.key_of(entry)):
        return None
    already = entry.charge(host.device)  # a copy still measured since its last sleep
    if bed - already > host.free_bytes:
        return None
    return {**entry.granted, host.device: bed}


# -- their answers --------------------------------------------------------------------------------


def refused(mind: Mind, entry: Entry, kind: str, inflight: int) -> None:
    """DRAINING -> RESIDENT: work in flight outlived the barrier, or arrived before a revoke that
    only takes the idle. It is not asked again at once; the waiter keeps its place."""
    reason = entry.leaving or Reason.SWAP
    entry.inflight, entry.last_used = inflight, mind.now
    entry.refused_until = after(mind.now, mind.settings.terms.refusal)
    took = since(entry.since, mind.now)
    mind.move(entry, State.RESIDENT, granted=dict(entry.home))
    entry.leaving = entry.revoked_at = None
    mind.watch(entry, entry.refused_until)
    mind.tell(kind, entry, took=took, reason=reason.value, inflight=inflight)


def slept(mind: Mind, entry: Entry) -> None:
    """Its holder says so; a reading must agree (SPEC D1)."""
    if entry.to is not Tier.ASLEEP:
        take(mind, entry, entry.leaving or Reason.FAILED)  # nobody reserved host RAM for it
        return
    if entry.slept_at is None:
        entry.slept_at = mind.now
        entry.slept_from_bytes = Bytes(max(entry.home_bytes, entry.at_home_bytes))
        mind.say(Probe(entry.node))
        mind.watch(entry, after(mind.now, mind.settings.terms.reclaim_alarm))


def confirm_sleep(mind: Mind, entry: Entry) -> None:
    """A reading has come: DRAINING -> ASLEEP once the device bytes are seen to have fallen."""
    if entry.state is not State.DRAINING or entry.slept_at is None:
        return
    fallen = entry.slept_from_bytes - entry.at_home_bytes
    if fallen < share(entry.home_bytes, mind.settings.slept_fraction):
        return
    reason = entry.leaving or Reason.SWAP
    took = since(entry.since, mind.now)
    bed = {d: size for d, size in entry.granted.items() if d not in entry.home}
    mind.move(entry, State.ASLEEP, granted=bed)
    if entry.revoked_at is not None:
        mind.estimates.left(entry.capability, since(entry.revoked_at, mind.now))
    entry.leaving, entry.inflight = None, 0
    entry.settles = entry.settles and _floor(mind, entry) is not Floor.HOST
    size = Bytes(fallen)
    mind.tell("model_unload", entry, size=size, took=took, reason=reason.value, to="asleep")
    mind.watch(entry, mind.now)


def doubt_sleeper(mind: Mind, entry: Entry) -> None:
    """A reading has come of a sleeper that perhaps nobody saw fall asleep: its holder rejoined
    with it. A sleeper may grow a little; one that never gave back half of its share is none."""
    believed = entry.home_bytes - share(entry.home_bytes, mind.settings.slept_fraction) // 2
    if entry.state is State.ASLEEP and entry.at_home_bytes > believed:
        _is_not_asleep(mind, entry, Reason.FAILED)


def tend_draining(mind: Mind, entry: Entry) -> None:
    """The time rules of DRAINING."""
    terms = mind.settings.terms
    if entry.slept_at is not None:
        _doubt_sleep(mind, entry, after(entry.slept_at, terms.reclaim_alarm))
        return
    answer_by = after(entry.barrier_until, terms.answer)
    if entry.unloading_since is not None:
        unload_by = after(entry.unloading_since, terms.unload)
        if mind.now >= unload_by:  # holds bytes with nothing in flight
            mind.tell("unload_overdue", entry, took=since(entry.since, mind.now))
            take(mind, entry, entry.leaving or Reason.SWAP)
            return
        mind.watch(entry, unload_by)
    elif mind.now >= answer_by and entry.lease:  # it was given notice, and is not asked again
        mind.tell("lease_overdue", entry, size=charged(entry), took=since(entry.since, mind.now))
        take(mind, entry, entry.leaving or Reason.SWAP)
        return
    elif mind.now >= answer_by and mind.is_silent(entry.holder):  # neither answers nor beats
        mind.tell("revoke_unanswered", entry, took=since(entry.since, mind.now))
        take(mind, entry, entry.leaving or Reason.SWAP)
        return
    mind.watch(entry, answer_by if mind.now < answer_by else after(mind.now, terms.answer))


def _doubt_sleep(mind: Mind, entry: Entry, believe_by: Instant) -> None:
    if mind.now < believe_by:
        mind.watch(entry, believe_by)
        return
    _is_not_asleep(mind, entry, entry.leaving or Reason.SWAP)


def _is_not_asleep(mind: Mind, entry: Entry, reason: Reason) -> None:
    wanted = mind.settings.slept_fraction
    mind.tell("not_asleep", entry, size=entry.at_home_bytes, wanted_fraction=wanted)
    mind.estimates.did_not_sleep(mind.key_of(entry))
    take(mind, entry, reason)
