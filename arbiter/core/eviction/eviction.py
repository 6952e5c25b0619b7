"""Chooses victims, revokes them, and handles their replies (SPEC A6, A9, B4, C3).

The policy only prices lawful candidates (eligibility.py); the core takes the cheapest set that
suffices (records/victim_set.py), or none.
"""

from dataclasses import replace

from arbiter.core.decisions import Reason, Revoke, Tier
from arbiter.core.eviction.eligibility import find_obstacle, floor_of, may_leave, may_swap
from arbiter.core.eviction.ranking import ranked_victims, victims_no_more_urgent
from arbiter.core.eviction.sleep import _start_doubt, grant_with_host_copy
from arbiter.core.records.eviction_history import EvictionRecord
from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.records.victim_set import EXACT_COUNT, PricedVictim, choose
from arbiter.core.state import CoreState
from arbiter.core.tickets import quotas
from arbiter.core.tickets.loads import note_evicted_for, prefetches_that_make_room
from arbiter.core.tickets.reclaim import charged, is_counted_on, kill_and_notify
from arbiter.core.types import Floor, Priority
from arbiter.units import (
    SECOND,
    Bytes,
    DeviceId,
    Span,
    TicketId,
    after,
    since,
)

Victims = list[Ticket]


# -- choosing -------------------------------------------------------------------------------------


def make_room(
    mind: CoreState, waiting: Ticket, device: DeviceId, short: int, urgent: Priority
) -> bool:
    """Asks for `short` bytes beyond what is on its way; `urgent`: how urgent it is to `waiting`.
    All or nothing: nobody leaves for a ticket that still would not fit."""
    book = mind.ledger.books[device]
    if guesses := prefetches_that_make_room(mind, book, short):  # as loads that were abandoned
        for guess in guesses:
            kill_and_notify(mind, guess, Reason.WITHDRAWN)
        return True
    options, chosen = _weigh(mind, book, waiting, Bytes(short), urgent)
    if chosen:
        _remember(mind, book, waiting, Bytes(short), options, chosen)
    victims = [book.entries[option.ticket] for option in chosen]
    for victim in victims:
        note_evicted_for(mind, waiting, victim)
        revoke(mind, victim, Reason.SWAP, waiting)
    return bool(victims)


def evict_own(mind: CoreState, waiting: Ticket, short: Bytes, urgent: Priority) -> bool:
    """Of its own tenant only, on whatever device, the cheapest that free `short` (SPEC C10)."""
    own = {e.ticket: e for e in quotas.tickets_of(mind, waiting.client.tenant)}
    books = {d for e in own.values() for d in e.home if d in mind.ledger.books}
    options: dict[TicketId, PricedVictim] = {}
    for device in sorted(books):
        for entry, option in ranked_victims(mind, mind.ledger.books[device]):
            if entry.ticket in own and may_swap(mind, entry, waiting, urgent):
                freed = quotas.process_bytes(mind, entry)
                options[entry.ticket] = replace(option, freed_bytes=freed)
    chosen = choose(options.values(), short)
    for option in chosen:
        note_evicted_for(mind, waiting, own[option.ticket])
        revoke(mind, own[option.ticket], Reason.SWAP, waiting)
    return bool(chosen)


def victims_for(
    mind: CoreState, waiting: Ticket, device: DeviceId, short: int, urgent: Priority
) -> Victims:
    """Who would leave; nobody where all who may be asked would not do."""
    book = mind.ledger.books[device]
    if guesses := prefetches_that_make_room(mind, book, short):
        return guesses
    _, chosen = _weigh(mind, book, waiting, Bytes(short), urgent)
    return [book.entries[option.ticket] for option in chosen]


def evict_overcommitted(mind: CoreState) -> None:
    """Overcommitted devices: idle models leave until the rest fits. The one that took more than it
    was granted goes first; what is in use stays, and is asked again when it falls idle."""
    for node in mind.changed():
        for book in mind.ledger.overcommitted(node):
            short = Bytes(-book.free_bytes - returning_bytes(book))
            if short > 0:
                mind.alarms.set(("line", node), after(mind.now, Span(SECOND)))
                for victim in _victims_as_far_as_possible(mind, book, short):
                    revoke(mind, victim, Reason.FIT, None)


def returning_bytes(book: DeviceAccount) -> Bytes:
    """Asked for or being reclaimed already, so not to be asked for twice."""
    if not book.leaving:
        return Bytes(0)
    returning = (
        e.charge(book.device) - (e.granted.get(book.device, 0) if _stays_on(book, e) else 0)
        for e in book.leaving.values()
        if is_counted_on(e)
    )
    return Bytes(sum(returning))


def _stays_on(book: DeviceAccount, entry: Ticket) -> bool:
    """Host bytes reserved for a model on its way to sleep are not coming back."""
    return entry.state is State.DRAINING and book.device not in entry.home


def _weigh(
    mind: CoreState, book: DeviceAccount, waiting: Ticket, short: Bytes, urgent: Priority
) -> tuple[list[PricedVictim], list[PricedVictim]]:
    """Lawful options, and the cheapest set of them that suffices, or none. In an order that is long
    nobody looks far behind those that would do."""
    options: list[PricedVictim] = []
    missing, spare_count = int(short), EXACT_COUNT
    spare = quotas.ReserveSlack(mind, book, waiting.client.tenant)
    for option in victims_no_more_urgent(mind, book, urgent):
        if missing <= 0 and (spare_count == 0 or option.rank != options[-1].rank):
            break
        entry = book.entries[option.ticket]
        if find_obstacle(mind, entry, waiting, urgent) is not None:
            continue
        if worth := spare.take(entry, option.freed_bytes):
            spare_count -= missing <= 0
            missing -= worth
            is_all = worth == option.freed_bytes
            options.append(option if is_all else replace(option, freed_bytes=worth))
    return options, choose(options, short) if missing <= 0 else []


def _remember(
    mind: CoreState,
    book: DeviceAccount,
    waiting: Ticket,
    short: Bytes,
    options: list[PricedVictim],
    chosen: list[PricedVictim],
) -> None:
    """What was weighed, for whoever asks why (SPEC K3)."""
    mind.choices.add(
        EvictionRecord(
            mind.now,
            waiting.ticket,
            waiting.model,
            book.device,
            short,
            mind.settings.evict,
            tuple(options),
            tuple(book.entries[option.ticket].model for option in options),
            frozenset(option.ticket for option in chosen),
        )
    )


def _victims_as_far_as_possible(mind: CoreState, book: DeviceAccount, short: Bytes) -> Victims:
    """As many as help, even if not all is found: the memory is already taken."""
    chosen: Victims = []
    missing = int(short)
    ranked = ranked_victims(mind, book)
    for entry, option in sorted(ranked, key=lambda pair: not _took_more(pair[0], book.device)):
        if missing > 0 and may_leave(mind, entry) and not entry.allow_oversize:
            chosen.append(entry)
            missing -= option.freed_bytes
    return chosen


def _took_more(entry: Ticket, device: DeviceId) -> bool:
    return entry.measured.get(device, 0) > entry.granted.get(device, 0)


# -- asking ---------------------------------------------------------------------------------------


def revoke(mind: CoreState, entry: Ticket, reason: Reason, waiting: Ticket | None) -> None:
    """A resident is asked, a sleeper has nothing in flight and is taken."""
    size = charged(entry)
    for_whom = waiting.ticket if waiting else None
    mind.tell("eviction", entry, size=size, reason=reason.value, waiting=for_whom)
    entry.revoked_at = mind.now
    if entry.state is State.ASLEEP:
        kill_and_notify(mind, entry, reason)
        return
    sleeps = reason in (Reason.SWAP, Reason.FIT) or floor_of(mind, entry) is Floor.HOST
    granted = grant_with_host_copy(mind, entry) if sleeps else None
    entry.leaving, entry.to = reason, Tier.ASLEEP if granted else Tier.GONE
    entry.unloading_since = entry.slept_at = None
    notice = entry.lease.notice if entry.lease else mind.settings.terms.barrier
    entry.barrier_until = after(mind.now, notice)
    mind.move(entry, State.DRAINING, granted)
    mind.watch(entry, after(entry.barrier_until, mind.settings.terms.answer))
    send_revoke(mind, entry)


def send_revoke(mind: CoreState, entry: Ticket) -> None:
    reason = entry.leaving or Reason.SWAP
    mind.say(Revoke(entry.ticket, entry.holder, reason, entry.to, entry.barrier_until))


# -- their answers --------------------------------------------------------------------------------


def victim_declined(mind: CoreState, entry: Ticket, kind: str, inflight: int) -> None:
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


def on_draining_timer(mind: CoreState, entry: Ticket) -> None:
    """The time rules of DRAINING."""
    terms = mind.settings.terms
    if entry.slept_at is not None:
        _start_doubt(mind, entry, after(entry.slept_at, terms.reclaim_alarm))
        return
    answer_by = after(entry.barrier_until, terms.answer)
    if entry.unloading_since is not None:
        unload_by = after(entry.unloading_since, terms.unload)
        if mind.now >= unload_by:  # holds bytes with nothing in flight
            mind.tell("unload_overdue", entry, took=since(entry.since, mind.now))
            kill_and_notify(mind, entry, entry.leaving or Reason.SWAP)
            return
        mind.watch(entry, unload_by)
    elif mind.now >= answer_by and entry.lease:  # it was given notice, and is not asked again
        mind.tell("lease_overdue", entry, size=charged(entry), took=since(entry.since, mind.now))
        kill_and_notify(mind, entry, entry.leaving or Reason.SWAP)
        return
    elif mind.now >= answer_by and mind.is_silent(entry.holder):  # neither answers nor beats
        mind.tell("revoke_unanswered", entry, took=since(entry.since, mind.now))
        kill_and_notify(mind, entry, entry.leaving or Reason.SWAP)
        return
    mind.watch(entry, answer_by if mind.now < answer_by else after(mind.now, terms.answer))
