"""Chooses victims, revokes them, and handles their replies (A6, A9, B4, C3).

The policy only prices lawful candidates (eligibility.py); the core takes the cheapest set that
suffices (victim_set.py), or none.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from arbiter.core.decisions import EventKind, Reason, Revoke, Tier
from arbiter.core.eviction.eligibility import (
    Obstacle,
    find_obstacle,
    may_leave,
    may_revoke,
)
from arbiter.core.eviction.protection import min_residency_ends
from arbiter.core.eviction.ranking import (
    ranked_victims,
    reload_span,
    victims_no_more_urgent,
)
from arbiter.core.eviction.sleep import await_confirmation, grant_with_host_copy
from arbiter.core.eviction.victim_set import EXACT_COUNT, choose
from arbiter.core.records.eviction_history import EvictionRecord
from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.priced_victim import PricedVictim
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.state import CoreState
from arbiter.core.tickets import inexact, process_ram, quotas
from arbiter.core.tickets.failed_swaps import note_evicted_for
from arbiter.core.tickets.loads import prefetches_that_make_room
from arbiter.core.tickets.reclaim import charged, is_counted_on, kill_and_notify
from arbiter.core.types import Floor, Priority
from arbiter.units import (
    SECOND,
    Bytes,
    DeviceId,
    Instant,
    NodeId,
    Span,
    TicketId,
    after,
    host_device,
    in_seconds,
    since,
)

Victims = list[Ticket]


@dataclass(frozen=True, slots=True)
class DeviceCandidates:
    """Says which tickets an asker can have leave one device."""

    options: list[PricedVictim]  # lawful victims, cheapest first
    victims: list[PricedVictim]  # the cheapest set of them that suffices; empty: none leaves now
    waits_until: Instant | None = None  # the asker waits until cheaper victims may leave then


# -- choosing -------------------------------------------------------------------------------------


def make_room(
    state: CoreState, asker: Ticket, device: DeviceId, short: Bytes, priority: Priority
) -> bool:
    """Revokes victims that free `short` bytes beyond what is on its way, for an asker with this
    `priority`. Returns whether the bytes will come. False: none was revoked, because all lawful
    victims would not suffice, or because the asker waits for cheaper ones (C4). Where the
    prefetches that still load would suffice, they are abandoned, and no victim is chosen."""
    book = state.ledger.books[device]
    if prefetches := prefetches_that_make_room(state, book, short):  # as loads that were abandoned
        for prefetched in prefetches:
            kill_and_notify(state, prefetched, Reason.WITHDRAWN)
        return True
    victims = victims_no_more_urgent(state, book, priority)
    candidates = _candidates_for(state, book, asker, short, priority, victims)
    if candidates.victims:
        record_choice(state, book, asker, short, candidates.options, candidates.victims)
    reason = Reason.FREE if asker.frees else Reason.SWAP
    for option in candidates.victims:
        victim = book.tickets[option.ticket]
        note_evicted_for(state, asker, victim)
        revoke(state, victim, reason, asker)
    return bool(candidates.victims)


def evict_own(state: CoreState, asker: Ticket, short: Bytes, priority: Priority) -> bool:
    """Revokes the cheapest set of tickets of the asker's own tenant, on any devices, that frees
    `short` bytes (C10). Returns whether there was one."""
    own = {t.id: t for t in quotas.tickets_of(state, asker.client.tenant)}
    devices = {d for t in own.values() for d in t.home if d in state.ledger.books}
    options: dict[TicketId, PricedVictim] = {}
    for device in sorted(devices):
        for ticket, option in ranked_victims(state, state.ledger.books[device]):
            if ticket.id in own and may_revoke(state, ticket, asker, priority):
                freed = quotas.device_bytes(state, ticket)
                options[ticket.id] = replace(option, freed_bytes=freed)
    chosen = choose(options.values(), short)
    for option in chosen:
        note_evicted_for(state, asker, own[option.ticket])
        revoke(state, own[option.ticket], Reason.SWAP, asker)
    return bool(chosen)


def victims_for(
    state: CoreState, asker: Ticket, device: DeviceId, short: Bytes, priority: Priority
) -> Victims:
    """Returns the tickets that `make_room` would revoke; empty when they would not suffice."""
    book = state.ledger.books[device]
    if prefetches := prefetches_that_make_room(state, book, short):
        return prefetches
    priced = victims_no_more_urgent(state, book, priority)
    candidates = _candidates_for(state, book, asker, short, priority, priced)
    return [book.tickets[option.ticket] for option in candidates.victims]


def waits_for_cheaper_until(
    state: CoreState,
    book: DeviceAccount,
    asker: Ticket,
    short: Bytes,
    priority: Priority,
    victims: Iterable[PricedVictim],
) -> Instant | None:
    """Returns until when an asker waits for cheaper victims, so that `make_room` revokes none now;
    None: it does not wait. `victims`: the tickets looked at, cheapest first."""
    return _candidates_for(state, book, asker, short, priority, victims).waits_until


def evict_overcommitted(state: CoreState) -> None:
    """Revokes idle models on overcommitted devices until the rest fits. The ticket that took more
    than it was granted leaves first; a ticket in use stays, and is asked again when it falls
    idle."""
    for node in state.dirty_nodes():
        for book in state.ledger.overcommitted(node):
            short = Bytes(-book.free_bytes - returning_bytes(book))
            if short > 0:
                state.timers.set(("queue", node), after(state.now, Span(SECOND)))
                for victim in _victims_as_far_as_possible(state, book, short):
                    revoke(state, victim, Reason.FIT, None)


def returning_bytes(book: DeviceAccount) -> Bytes:
    """Returns the bytes of a device that are on their way back already, because their tickets drain
    or are being reclaimed: nothing must leave for these bytes once more."""
    if not book.leaving:
        return Bytes(0)
    returning = (
        t.charge(book.device) - (t.granted.get(book.device, 0) if _stays_on(book, t) else 0)
        for t in book.leaving.values()
        if is_counted_on(t)
    )
    return Bytes(sum(returning))


def _stays_on(book: DeviceAccount, ticket: Ticket) -> bool:
    """Says whether the bytes of a leaving ticket on this device stay: host RAM that is reserved for
    a model on its way to sleep."""
    return ticket.state is State.DRAINING and book.device not in ticket.home


def _candidates_for(
    state: CoreState,
    book: DeviceAccount,
    asker: Ticket,
    short: Bytes,
    priority: Priority,
    victims: Iterable[PricedVictim],
) -> DeviceCandidates:
    """Finds the lawful options among `victims`, which come cheapest first, and the cheapest set of
    them that frees `short` bytes. In a long order it stops EXACT_COUNT options of one rank behind
    those that suffice."""
    options: list[PricedVictim] = []
    soon: list[PricedVictim] = []  # lawful once their minimum residency is over
    missing = int(short)
    beyond_count = 0  # options behind those that suffice
    slack = quotas.ReserveSlack(state, book, asker.client.tenant)
    for option in victims:
        is_enough = missing <= 0
        if is_enough and (beyond_count == EXACT_COUNT or option.rank != options[-1].rank):
            break
        ticket = book.tickets[option.ticket]
        if obstacle := find_obstacle(state, ticket, asker, priority):
            if obstacle is Obstacle.MIN_RESIDENCY:
                soon.append(option)
            continue
        if usable_bytes := slack.take(ticket, option.freed_bytes):
            beyond_count += 1 if is_enough else 0
            missing -= usable_bytes
            is_all = usable_bytes == option.freed_bytes
            options.append(option if is_all else replace(option, freed_bytes=usable_bytes))
    chosen = choose(options, short) if missing <= 0 else []
    if soon and chosen:
        cheaper = [o for o in (*options, *soon) if o.rank < max(c.rank for c in chosen)]
        until = _worth_waiting_until(state, book, asker, chosen, choose(cheaper, short))
        if until is not None:
            return DeviceCandidates(options, [], until)
    return DeviceCandidates(options, chosen)


def _worth_waiting_until(
    state: CoreState,
    book: DeviceAccount,
    asker: Ticket,
    chosen: list[PricedVictim],
    later: list[PricedVictim],
) -> Instant | None:
    """Returns until when an asker waits for `later`, a set of victims of cheaper ranks whose
    minimum residency ends soon (C4). None: the asker takes `chosen` now, because it would wait
    longer than the dearest of `chosen` takes to load again, counted from when the asker came, or
    would serve only after its deadline."""
    queued = state.queue.find(asker.id)
    if queued is None or not later:
        return None
    until = max(min_residency_ends(state, book.tickets[option.ticket]) for option in later)
    dearest = max(option.rank for option in chosen)
    leaving = [book.tickets[option.ticket] for option in chosen if option.rank == dearest]
    reload = max(
        state.estimates.load_time(ticket.model_key, ticket.need.weights_bytes) for ticket in leaving
    )
    turnover = state.estimates.turnover(asker.capability)
    load = state.estimates.load_time(asker.model_key, asker.need.weights_bytes)
    serves_at = after(until, Span(turnover + load))
    is_in_time = queued.deadline is None or serves_at <= queued.deadline
    return until if is_in_time and until <= after(queued.request.asked_at, reload) else None


def record_choice(
    state: CoreState,
    book: DeviceAccount,
    asker: Ticket,
    short: Bytes,
    options: list[PricedVictim],
    chosen: list[PricedVictim],
    *,
    is_compaction: bool = False,
) -> None:
    """Keeps what was weighed, for explain (K3)."""
    state.evictions.add(
        EvictionRecord(
            state.now,
            asker.id,
            asker.model,
            book.device,
            short,
            state.settings.evict,
            tuple(options),
            tuple(book.tickets[option.ticket].model for option in options),
            frozenset(option.ticket for option in chosen),
            is_compaction,
        )
    )


def _victims_as_far_as_possible(state: CoreState, book: DeviceAccount, short: Bytes) -> Victims:
    """Returns as many victims as help, even if they do not suffice: the memory is already taken."""
    chosen: Victims = []
    missing = int(short)
    ranked = ranked_victims(state, book)
    for ticket, option in sorted(ranked, key=lambda pair: not _took_more(pair[0], book.device)):
        if process_ram.is_all_it_holds(book, ticket):
            continue
        if missing > 0 and may_leave(state, ticket) and not ticket.allow_oversize:
            chosen.append(ticket)
            missing -= option.freed_bytes
    return chosen


def _took_more(ticket: Ticket, device: DeviceId) -> bool:
    """Says whether a ticket was measured to hold more on a device than it was granted there."""
    return ticket.measured.get(device, 0) > ticket.granted.get(device, 0)


# -- asking ---------------------------------------------------------------------------------------


def revoke(state: CoreState, ticket: Ticket, reason: Reason, asker: Ticket | None) -> None:
    """Asks the holder of a resident ticket for its bytes; an asleep ticket has nothing in flight
    and is killed."""
    size = charged(ticket)
    asked_by = asker.id if asker else None
    role = state.policies.roles.get(ticket.role)
    state.log(
        EventKind.EVICTION,
        ticket,
        size=size,
        reason=reason.value,
        waiting=asked_by,
        act=role.act if role else None,
        cost_s=round(
            in_seconds(reload_span(state, ticket)) + (role.evict_cost_s if role else 0), 3
        ),
    )
    ticket.note_revoked(state.now)
    if asker is not None and not asker.lease and reason is Reason.SWAP:
        state.trades.note_revoked(ticket.id, asker.model_name)
    if ticket.state is State.ASLEEP:
        kill_and_notify(state, ticket, reason)
        return
    sleeps = (
        reason in (Reason.SWAP, Reason.FREE, Reason.FIT)
        or state.floor_of(ticket.model_name) is Floor.HOST
    )
    granted = grant_with_host_copy(state, ticket) if sleeps else None
    if sleeps and granted is None and ticket.need.host_bytes:
        release_copies(state, ticket.node, Bytes(ticket.need.host_bytes + ticket.ram_bytes))
    notice = ticket.lease.terms.notice if ticket.lease else state.settings.timeouts.barrier
    barrier_until = after(state.now, notice)
    ticket.begin_revocation(reason, Tier.ASLEEP if granted else Tier.GONE, barrier_until)
    if inexact.is_at_home(state, ticket):
        ticket.note_held_before_sleep(inexact.measured_at_home(state, ticket))
    state.move(ticket, State.DRAINING, granted)
    state.set_timer(ticket, after(barrier_until, state.settings.timeouts.answer))
    send_revoke(state, ticket)


def release_copies(state: CoreState, node: NodeId, need: Bytes) -> None:
    """Revokes shared copies of model files that no engine uses (D4), the cheapest first, until
    `need` bytes of a node's host RAM are free or on their way back. The caller does not wait for
    these bytes; they are there for the next sleep or copy."""
    book = state.ledger.books.get(host_device(node))
    if book is None:
        return
    missing = need - book.free_bytes - returning_bytes(book)
    for ticket, option in list(ranked_victims(state, book)):
        if missing > 0 and ticket.is_host_copy and may_leave(state, ticket):
            missing -= option.freed_bytes
            revoke(state, ticket, Reason.FIT, None)


def send_revoke(state: CoreState, ticket: Ticket) -> None:
    """Sends the holder of a draining ticket its revoke, or repeats it."""
    revocation = ticket.revocation
    reason = ticket.leaving_reason
    assert revocation is not None
    state.decide(Revoke(ticket.id, ticket.holder, reason, revocation.to, revocation.barrier_until))


# -- their answers --------------------------------------------------------------------------------


def victim_declined(state: CoreState, ticket: Ticket, kind: EventKind, inflight: int) -> None:
    """Moves DRAINING -> RESIDENT: work in flight outlived the barrier, or arrived before a revoke
    that only takes idle models. The victim is left alone for a while; the asker keeps its place."""
    reason = ticket.leaving_reason
    ticket.note_busy(inflight, state.now, after(state.now, state.settings.timeouts.refusal))
    took = since(ticket.since, state.now)
    state.move(ticket, State.RESIDENT, granted=dict(ticket.home))
    ticket.end_revocation()
    ticket.forget_revoked()
    state.set_timer(ticket, ticket.declined_until)
    state.log(kind, ticket, took=took, reason=reason.value, inflight=inflight)


def on_draining_timer(state: CoreState, ticket: Ticket) -> None:
    """Runs the time rules of DRAINING: a victim whose holder does not answer, unload or sleep in
    time is killed."""
    timeouts = state.settings.timeouts
    revocation = ticket.revocation
    assert revocation is not None
    if revocation.sleep is not None:
        await_confirmation(state, ticket, after(revocation.sleep.at, timeouts.reclaim_overdue))
        return
    answer_by = after(revocation.barrier_until, timeouts.answer)
    if (overdue := _what_is_overdue(state, ticket, answer_by)) is not None:
        size = charged(ticket) if overdue is EventKind.LEASE_OVERDUE else None
        state.log(overdue, ticket, size=size, took=since(ticket.since, state.now))
        kill_and_notify(state, ticket, ticket.leaving_reason)
        return
    if revocation.unloading_since is not None:
        state.set_timer(ticket, after(revocation.unloading_since, timeouts.unload))
    state.set_timer(
        ticket, answer_by if state.now < answer_by else after(state.now, timeouts.answer)
    )


def _what_is_overdue(state: CoreState, ticket: Ticket, answer_by: Instant) -> EventKind | None:
    """Returns what a draining ticket's holder should have done by now, as the kind of line that the
    event log gets of it; None while it is in time."""
    revocation = ticket.revocation
    assert revocation is not None
    if revocation.unloading_since is not None:  # it holds bytes with nothing in flight
        unload_by = after(revocation.unloading_since, state.settings.timeouts.unload)
        return EventKind.UNLOAD_OVERDUE if state.now >= unload_by else None
    if state.now < answer_by:
        return None
    if ticket.lease:  # it was given notice, and is not asked again
        return EventKind.LEASE_OVERDUE
    if state.is_silent(ticket.holder):  # it neither answers nor sends heartbeats
        return EventKind.REVOKE_UNANSWERED
    return None
