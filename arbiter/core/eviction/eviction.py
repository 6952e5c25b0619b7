"""Chooses victims, revokes them, and handles their replies (A6, A9, B4, C3).

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
from arbiter.core.tickets import inexact, process_ram, quotas
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
    state: CoreState, waiting: Ticket, device: DeviceId, short: int, urgent: Priority
) -> bool:
    """Asks for `short` bytes beyond what is on its way; `urgent`: how urgent it is to `waiting`.
    All or nothing: nobody leaves for a ticket that still would not fit."""
    book = state.ledger.books[device]
    if prefetches := prefetches_that_make_room(state, book, short):  # as loads that were abandoned
        for prefetched in prefetches:
            kill_and_notify(state, prefetched, Reason.WITHDRAWN)
        return True
    options, chosen = _weigh(state, book, waiting, Bytes(short), urgent)
    if chosen:
        _remember(state, book, waiting, Bytes(short), options, chosen)
    victims = [book.entries[option.ticket] for option in chosen]
    for victim in victims:
        note_evicted_for(state, waiting, victim)
        revoke(state, victim, Reason.SWAP, waiting)
    return bool(victims)


def evict_own(state: CoreState, waiting: Ticket, short: Bytes, urgent: Priority) -> bool:
    """Of its own tenant only, on whatever device, the cheapest that free `short` (C10)."""
    own = {e.ticket: e for e in quotas.tickets_of(state, waiting.client.tenant)}
    books = {d for e in own.values() for d in e.home if d in state.ledger.books}
    options: dict[TicketId, PricedVictim] = {}
    for device in sorted(books):
        for entry, option in ranked_victims(state, state.ledger.books[device]):
            if entry.ticket in own and may_swap(state, entry, waiting, urgent):
                freed = quotas.device_bytes(state, entry)
                options[entry.ticket] = replace(option, freed_bytes=freed)
    chosen = choose(options.values(), short)
    for option in chosen:
        note_evicted_for(state, waiting, own[option.ticket])
        revoke(state, own[option.ticket], Reason.SWAP, waiting)
    return bool(chosen)


def victims_for(
    state: CoreState, waiting: Ticket, device: DeviceId, short: int, urgent: Priority
) -> Victims:
    """Who would leave; nobody where all who may be asked would not do."""
    book = state.ledger.books[device]
    if prefetches := prefetches_that_make_room(state, book, short):
        return prefetches
    _, chosen = _weigh(state, book, waiting, Bytes(short), urgent)
    return [book.entries[option.ticket] for option in chosen]


def evict_overcommitted(state: CoreState) -> None:
    """Overcommitted devices: idle models leave until the rest fits. The one that took more than it
    was granted goes first; what is in use stays, and is asked again when it falls idle."""
    for node in state.changed():
        for book in state.ledger.overcommitted(node):
            short = Bytes(-book.free_bytes - returning_bytes(book))
            if short > 0:
                state.timers.set(("queue", node), after(state.now, Span(SECOND)))
                for victim in _victims_as_far_as_possible(state, book, short):
                    revoke(state, victim, Reason.FIT, None)


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
    state: CoreState, book: DeviceAccount, waiting: Ticket, short: Bytes, urgent: Priority
) -> tuple[list[PricedVictim], list[PricedVictim]]:
    """Lawful options, and the cheapest set of them that suffices, or none. In an order that is long
    nobody looks far behind those that would do."""
    options: list[PricedVictim] = []
    missing, spare_count = int(short), EXACT_COUNT
    spare = quotas.ReserveSlack(state, book, waiting.client.tenant)
    for option in victims_no_more_urgent(state, book, urgent):
        if missing <= 0 and (spare_count == 0 or option.rank != options[-1].rank):
            break
        entry = book.entries[option.ticket]
        if find_obstacle(state, entry, waiting, urgent) is not None:
            continue
        if usable_bytes := spare.take(entry, option.freed_bytes):
            spare_count -= missing <= 0
            missing -= usable_bytes
            is_all = usable_bytes == option.freed_bytes
            options.append(option if is_all else replace(option, freed_bytes=usable_bytes))
    return options, choose(options, short) if missing <= 0 else []


def _remember(
    state: CoreState,
    book: DeviceAccount,
    waiting: Ticket,
    short: Bytes,
    options: list[PricedVictim],
    chosen: list[PricedVictim],
) -> None:
    """What was weighed, for whoever asks why (K3)."""
    state.evictions.add(
        EvictionRecord(
            state.now,
            waiting.ticket,
            waiting.model,
            book.device,
            short,
            state.settings.evict,
            tuple(options),
            tuple(book.entries[option.ticket].model for option in options),
            frozenset(option.ticket for option in chosen),
        )
    )


def _victims_as_far_as_possible(state: CoreState, book: DeviceAccount, short: Bytes) -> Victims:
    """As many as help, even if not all is found: the memory is already taken."""
    chosen: Victims = []
    missing = int(short)
    ranked = ranked_victims(state, book)
    for entry, option in sorted(ranked, key=lambda pair: not _took_more(pair[0], book.device)):
        if process_ram.is_all_it_holds(book, entry):
            continue
        if missing > 0 and may_leave(state, entry) and not entry.allow_oversize:
            chosen.append(entry)
            missing -= option.freed_bytes
    return chosen


def _took_more(entry: Ticket, device: DeviceId) -> bool:
    return entry.measured.get(device, 0) > entry.granted.get(device, 0)


# -- asking ---------------------------------------------------------------------------------------


def revoke(state: CoreState, entry: Ticket, reason: Reason, waiting: Ticket | None) -> None:
    """A resident is asked, a sleeper has nothing in flight and is taken."""
    size = charged(entry)
    for_whom = waiting.ticket if waiting else None
    state.log("eviction", entry, size=size, reason=reason.value, waiting=for_whom)
    entry.revoked_at = state.now
    if entry.state is State.ASLEEP:
        kill_and_notify(state, entry, reason)
        return
    sleeps = reason in (Reason.SWAP, Reason.FIT) or floor_of(state, entry) is Floor.HOST
    granted = grant_with_host_copy(state, entry) if sleeps else None
    entry.leaving, entry.to = reason, Tier.ASLEEP if granted else Tier.GONE
    entry.unloading_since = entry.slept_at = None
    is_inexact = inexact.is_at_home(state, entry)
    entry.slept_from_bytes = inexact.held_at_home(state, entry) if is_inexact else Bytes(0)
    notice = entry.lease.notice if entry.lease else state.settings.timeouts.barrier
    entry.barrier_until = after(state.now, notice)
    state.move(entry, State.DRAINING, granted)
    state.set_timer(entry, after(entry.barrier_until, state.settings.timeouts.answer))
    send_revoke(state, entry)


def send_revoke(state: CoreState, entry: Ticket) -> None:
    reason = entry.leaving or Reason.SWAP
    state.decide(Revoke(entry.ticket, entry.holder, reason, entry.to, entry.barrier_until))


# -- their answers --------------------------------------------------------------------------------


def victim_declined(state: CoreState, entry: Ticket, kind: str, inflight: int) -> None:
    """DRAINING -> RESIDENT: work in flight outlived the barrier, or arrived before a revoke that
    only takes the idle. It is not asked again at once; the waiter keeps its place."""
    reason = entry.leaving or Reason.SWAP
    entry.inflight, entry.last_used = inflight, state.now
    entry.declined_until = after(state.now, state.settings.timeouts.refusal)
    took = since(entry.since, state.now)
    state.move(entry, State.RESIDENT, granted=dict(entry.home))
    entry.leaving = entry.revoked_at = None
    state.set_timer(entry, entry.declined_until)
    state.log(kind, entry, took=took, reason=reason.value, inflight=inflight)


def on_draining_timer(state: CoreState, entry: Ticket) -> None:
    """The time rules of DRAINING."""
    terms = state.settings.timeouts
    if entry.slept_at is not None:
        _start_doubt(state, entry, after(entry.slept_at, terms.reclaim_alarm))
        return
    answer_by = after(entry.barrier_until, terms.answer)
    if entry.unloading_since is not None:
        unload_by = after(entry.unloading_since, terms.unload)
        if state.now >= unload_by:  # holds bytes with nothing in flight
            state.log("unload_overdue", entry, took=since(entry.since, state.now))
            kill_and_notify(state, entry, entry.leaving or Reason.SWAP)
            return
        state.set_timer(entry, unload_by)
    elif state.now >= answer_by and entry.lease:  # it was given notice, and is not asked again
        state.log("lease_overdue", entry, size=charged(entry), took=since(entry.since, state.now))
        kill_and_notify(state, entry, entry.leaving or Reason.SWAP)
        return
    elif state.now >= answer_by and state.is_silent(entry.holder):  # neither answers nor beats
        state.log("revoke_unanswered", entry, took=since(entry.since, state.now))
        kill_and_notify(state, entry, entry.leaving or Reason.SWAP)
        return
    state.set_timer(entry, answer_by if state.now < answer_by else after(state.now, terms.answer))
