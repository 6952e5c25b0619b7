"""Estimates when a ticket that waits will serve (A21): what stands before it, and its own load.

The estimate is for people and for deadlines; no grant depends on it. The wait has three parts:
until the bytes it lacks may lawfully be asked for, the time such bytes take to come back, and the
loads of tickets before it that need the same bytes.
"""

from dataclasses import dataclass
from itertools import islice

from arbiter.core.decisions import EventKind, Queued
from arbiter.core.eviction.eviction import returning_bytes, waits_for_cheaper_until
from arbiter.core.eviction.protection import (
    collated_until,
    collation_bound,
    min_residency_ends,
)
from arbiter.core.eviction.ranking import (
    effective_priority,
    priority_fades_at,
    ranked_victims,
    victims_no_more_urgent,
)
from arbiter.core.queue import hours, placement
from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.request_queue import QueueEntry
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.state import CoreState, reject_queued
from arbiter.core.tickets import quotas
from arbiter.core.tickets.lendable_devices import compute_books, unpinned_bytes
from arbiter.errors import DeadlineUnmet
from arbiter.units import Bytes, Instant, Span, after, in_seconds, since

SAMPLED_COUNT = 8  # of those before it: what they need and their loads take, on average
LOOKED_AT_COUNT = 32  # of tickets that may leave, the cheapest first; a device seldom holds more


def estimate_new(state: CoreState) -> None:
    """Tells the holders of tickets that joined the queue in this step and were not granted at once
    how long they wait, and refuses tickets for which that is too long."""
    joined = state.queued_this_event
    state.queued_this_event = []
    for ticket_id in joined:
        ticket = state.ledger.find(ticket_id)
        queued = state.queue.find(ticket_id)
        if ticket is None or queued is None:
            continue
        predicted = estimated_wait(state, ticket, queued)
        if predicted is None:
            continue
        predicted_at = after(state.now, predicted)
        queued.expect(predicted_at)
        state.log(EventKind.TICKET_WAITS, ticket, took=predicted)
        if predicted:
            state.decide(Queued(ticket_id, ticket.holder, predicted))
        doubtful = load_span(state, ticket) - sure_load_span(state, ticket)
        if queued.deadline is not None and predicted_at - doubtful > queued.deadline:
            reject_queued(state, ticket, too_late(ticket, 0.0, predicted))


def too_late(ticket: Ticket, waited_s: float, predicted: Span) -> DeadlineUnmet:
    """Returns the error for a ticket that would serve only after its deadline."""
    again_s = max(1.0, in_seconds(predicted))
    return DeadlineUnmet(ticket.id, waited_s, again_s, in_seconds(predicted))


def load_span(state: CoreState, ticket: Ticket) -> Span:
    """Returns how long a ticket's wake or load takes; 0 when nothing is known."""
    key = ticket.model_key
    woken = state.estimates.wake_time(key) if ticket.state is not State.QUEUED else Span(0)
    load = state.estimates.load_time(key, ticket.need.weights_bytes)
    return woken or state.estimates.slowed_load_time(key, load, state.now)


def sure_load_span(state: CoreState, ticket: Ticket) -> Span:
    """Returns the part of `load_span` for which a deadline may be refused: none of it where the
    model's loads are too long ago."""
    is_sure = state.estimates.may_refuse(ticket.model_key, state.now)
    return load_span(state, ticket) if is_sure or ticket.state is not State.QUEUED else Span(0)


def estimated_wait(state: CoreState, ticket: Ticket, queued: QueueEntry) -> Span | None:
    """Returns until a ticket serves; None where nothing can be said: no node, nothing read yet, or
    a lease that may not be interrupted holds the bytes, and seldom for the whole of its term."""
    books = _possible_books(state, ticket, queued)
    if not books:
        return None
    ahead = _ahead(state, ticket, queued, books[0])
    room_at = _room_on_any_at(state, ticket, queued, books, ahead)
    if room_at is None:
        return None
    turnover = state.estimates.turnover(ticket.capability)
    rounds = _rounds_before(state, queued, books, ahead)
    wait = max(
        since(state.now, room_at) + rounds * (_round(state, ahead) + turnover),
        _until_those_ahead_serve(state, ahead, turnover) if rounds else Span(0),
        _until_those_ahead_leave(state, ticket, ahead, turnover),
        _until_its_hours(state, ticket, queued),
    )
    return Span(wait + load_span(state, ticket))


def _possible_books(state: CoreState, ticket: Ticket, queued: QueueEntry) -> list[DeviceAccount]:
    """Returns the devices on which a queued ticket may be granted; of an asleep ticket those where
    its process lives."""
    node = state.nodes.get(ticket.node)
    if node is None or not state.is_settled:
        return []
    books = compute_books(state, node)
    if ticket.state is State.ASLEEP:
        return [book for book in books if book.device in ticket.home]
    most = quotas.at_most(state, ticket.client.tenant, books)
    return [book for book in books if queued.need_bytes <= most[book.device]]


# -- those before it -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Ahead:
    """Describes the tickets that stand before one in the queue."""

    tickets_count: int
    sample: list[QueueEntry]  # the first SAMPLED_COUNT of them, which stand for all
    needs: list[Bytes]  # the bytes that each of the sample lacks
    tickets: list[Ticket]  # of the sample


def _ahead(state: CoreState, ticket: Ticket, queued: QueueEntry, book: DeviceAccount) -> _Ahead:
    """Returns the queued tickets before this one. Tickets held outside their hours are left out
    (C13), unless this ticket is held itself: then all of them may be let go at once."""
    count = state.queue.ahead_count(queued)
    if queued.is_held or not state.queue.stats(ticket.node).held_count:
        sample = state.queue.first(ticket.node, min(count, SAMPLED_COUNT))
    else:
        free = [entry for entry in state.queue.first(ticket.node, count) if not entry.is_held]
        count, sample = len(free), free[:SAMPLED_COUNT]
    needs = [_lacking(state, entry, book) for entry in sample]
    tickets = [state.ledger.find(entry.request.ticket) for entry in sample]
    return _Ahead(count, sample, needs, [other for other in tickets if other is not None])


def _rounds_before(
    state: CoreState, queued: QueueEntry, books: list[DeviceAccount], ahead: _Ahead
) -> int:
    """Returns how many times all budgets of its devices must be lent anew before it is the ticket's
    turn: what it and the tickets before it lack, in whole sums of these budgets."""
    needed_bytes = int(_lacking(state, queued, books[0]))
    if ahead.sample:
        needed_bytes += sum(ahead.needs) * ahead.tickets_count // len(ahead.sample)
    return needed_bytes // max(1, sum(book.budget_bytes for book in books))


def _round(state: CoreState, ahead: _Ahead) -> Span:
    """Returns how long one of the tickets before it loads and stays resident, on average."""
    loads = [load_span(state, other) for other in ahead.tickets]
    load = sum(loads) // len(loads) if loads else 0
    return Span(load + max(load, state.settings.min_residency))


def _until_those_ahead_serve(state: CoreState, ahead: _Ahead, turnover: Span) -> Span:
    """Returns how long a ticket waits because the tickets before it serve first, in its place."""
    served_at = max((entry.predicted_at or state.now for entry in ahead.sample), default=state.now)
    return Span(since(state.now, served_at) + turnover)


def _until_those_ahead_leave(
    state: CoreState, ticket: Ticket, ahead: _Ahead, turnover: Span
) -> Span:
    """Returns how long a ticket waits because models before it will be resident, and go on with
    their own requests while they trade places with its model (C13)."""
    bounds = (collation_bound(state, other, ticket) for other in ahead.tickets)
    leaves_at = max(bounds, default=state.now)
    return Span(since(state.now, leaves_at) + turnover if leaves_at > state.now else 0)


def _until_its_hours(state: CoreState, ticket: Ticket, queued: QueueEntry) -> Span:
    """Returns how long a ticket is held until its hours begin; 0 when it is not held."""
    opens_at = hours.held_until(state, ticket, queued)
    return Span(0) if opens_at is None else since(state.now, opens_at)


# -- room for it -----------------------------------------------------------------------------------


def _room_on_any_at(
    state: CoreState,
    ticket: Ticket,
    queued: QueueEntry,
    books: list[DeviceAccount],
    ahead: _Ahead,
) -> Instant | None:
    """Returns when the first of a ticket's devices has room for it, with the tickets before it
    spread evenly over all of them. An asleep ticket needs room on all of its devices, so of these
    the last counts. None: not known."""
    rooms = [
        _room_at(state, book, ticket, queued, ahead.needs[number :: len(books)])
        for number, book in enumerate(books)
    ]
    known = [at for at in rooms if at is not None]
    if ticket.state is State.ASLEEP:
        return max(known) if len(known) == len(rooms) else None
    return min(known, default=None)


def _lacking(state: CoreState, queued: QueueEntry, book: DeviceAccount) -> Bytes:
    """Returns the bytes that a queued ticket lacks on a device to be awake again, or to be loaded
    there."""
    ticket = state.ledger.find(queued.request.ticket)
    if ticket is None:
        return queued.need_bytes
    if ticket.state is State.ASLEEP:
        return Bytes(max(0, ticket.home.get(book.device, 0) - ticket.charge(book.device)))
    return queued.need_bytes or placement.estimated_bytes(state, ticket, unpinned_bytes(book))


def _room_at(
    state: CoreState, book: DeviceAccount, ticket: Ticket, queued: QueueEntry, ahead: list[Bytes]
) -> Instant | None:
    """Returns when a device may have room for a ticket: when enough of the models there may have
    left, those first that may lawfully leave the soonest. `ahead`: the bytes that each ticket
    before it needs; what comes back goes first to those for which it suffices. None where there is
    no room before a lease ends that may not be interrupted."""
    need = _lacking(state, queued, book)
    room = _Room(need, ahead)
    free, returning = _usable(state, book, ticket)
    if room.suffices_with(free):
        return state.now
    leaves_at = state.now
    if returning:
        drains = [_drain(state, t) for t in book.leaving.values()]
        turnovers = [state.estimates.turnover(t.capability) for t in book.leaving.values()]
        leaves_at = after(leaves_at, Span(max(drains) + max(turnovers)))
        if room.suffices_with(returning):
            return leaves_at
    cheapest = islice(ranked_victims(state, book), LOOKED_AT_COUNT)
    staying = (t for t, _ in cheapest if t is not ticket and t.id not in book.leaving)
    others = [t for t in staying if not t.pinned]
    leased = [t for t in others if t.lease and not t.lease.terms.preemptible]
    gone = (
        (_gone_at(state, t, queued), t.charge(book.device), t) for t in others if t not in leased
    )
    spare = quotas.ReserveSlack(state, book, ticket.client.tenant)
    leaving = [(at, spare.take(t, size)) for at, size, t in sorted(gone, key=lambda x: x[:2])]
    short = Bytes(need - free - returning)
    if leased and short > sum(freed for _, freed in leaving):
        return None
    for other_at, freed in leaving:
        leaves_at = max(leaves_at, other_at)
        if room.suffices_with(freed):
            break
    return max(leaves_at, _cheaper_gone_at(state, book, ticket, short, queued))


def _usable(state: CoreState, book: DeviceAccount, ticket: Ticket) -> tuple[Bytes, Bytes]:
    """Returns what of a device is free for a ticket, and how much more will be once those asked to
    leave have left: both without what is kept for other tenants."""
    reserves, tenant = quotas.reserves(state), ticket.client.tenant
    free = max(0, book.free_bytes)
    now = max(0, free - quotas.reserved_for_others(reserves, book, tenant))
    later = (
        free
        + returning_bytes(book)
        - quotas.reserved_for_others(reserves, book, tenant, has_left=True)
    )
    return Bytes(now), Bytes(max(0, later - now))


def _cheaper_gone_at(
    state: CoreState, book: DeviceAccount, ticket: Ticket, short: Bytes, queued: QueueEntry
) -> Instant:
    """Returns when the bytes of cheaper victims may be back, if the ticket waits for these in place
    of dearer ones that may leave sooner (C4); now where it does not wait."""
    if short <= 0:
        return state.now
    priority = queued.request.priority
    victims = victims_no_more_urgent(state, book, priority)
    leave_at = waits_for_cheaper_until(state, book, ticket, short, priority, victims)
    if leave_at is None:
        return state.now
    return after(leave_at, state.estimates.turnover(ticket.capability))


class _Room:
    """Counts the bytes that come back to a device: first for the tickets ahead, the rest for one
    ticket."""

    def __init__(self, need: Bytes, ahead: list[Bytes]) -> None:
        self._need = need
        self._ahead = ahead
        self._free = 0

    def suffices_with(self, more: Bytes) -> bool:
        """Adds `more` free bytes, and says whether there is now room for the ticket."""
        self._free += more
        left = []
        for need in self._ahead:
            if need <= self._free:
                self._free -= need
            else:
                left.append(need)
        self._ahead = left
        return self._free >= self._need


def _gone_at(state: CoreState, ticket: Ticket, queued: QueueEntry) -> Instant:
    """Returns when the bytes of a ticket that may leave may be back."""
    span = _drain(state, ticket) + state.estimates.turnover(ticket.capability)
    return after(_lawful_at(state, ticket, queued), Span(span))


def _drain(state: CoreState, ticket: Ticket) -> Span:
    """Returns how long a ticket that is asked to leave, or was, goes on with what is in flight: as
    long as its requests usually run, and no longer than the barrier."""
    runs = state.estimates.run_times(ticket.model_name) if ticket.inflight else None
    if runs is None:
        return Span(0)
    drained = since(ticket.since, state.now) if ticket.state is State.DRAINING else Span(0)
    return Span(max(0, min(runs.usual, state.settings.timeouts.barrier) - drained))


def _lawful_at(state: CoreState, ticket: Ticket, queued: QueueEntry) -> Instant:
    """Returns when a ticket may lawfully be asked to leave: a load in flight ends first, a more
    urgent priority fades first."""
    if ticket.state is State.LOADING:
        predicted = ticket.last_load.predicted
        load = state.estimates.slowed_load_time(ticket.model_key, predicted, state.now)
        loaded_at = max(state.now, after(ticket.since, load))
        stays_until = after(loaded_at, state.settings.min_residency)
        return max(stays_until, _collated_at(state, ticket, queued))
    asker = queued.request.priority
    # A growth ends with its grant, long before the latest moment.
    lawful_at = max(state.now, ticket.declined_until)
    victim_priority = effective_priority(state, ticket)
    if victim_priority < asker:
        fades_at = priority_fades_at(state, ticket) or after(state.now, state.settings.carry_most)
        return max(lawful_at, fades_at)
    if victim_priority == asker:
        collated_at = _collated_at(state, ticket, queued)
        return max(lawful_at, min_residency_ends(state, ticket), collated_at)
    return lawful_at


def _collated_at(state: CoreState, ticket: Ticket, queued: QueueEntry) -> Instant:
    """Returns when a model with which the asker trades places may leave at the latest (C13): while
    it has requests, once the asker has waited as long as it must. A model that still loads will
    have some."""
    asker = state.ledger.find(queued.request.ticket)
    if asker is None:
        return state.now
    if ticket.state is State.RESIDENT and collated_until(state, ticket, asker) <= state.now:
        return state.now
    return collation_bound(state, ticket, asker)
