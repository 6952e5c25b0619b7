"""Makes one pass over a node's queue: which tickets are tried, in order, and when to stop (C6)."""

from itertools import islice

from arbiter.core.eviction import watermarks
from arbiter.core.eviction.protection import min_residency_ends, pause_ends, trade_bound
from arbiter.core.eviction.ranking import priority_fades_at
from arbiter.core.queue import placement
from arbiter.core.queue.new_loads import place
from arbiter.core.queue.outcome import PassEnd
from arbiter.core.queue.pass_state import GrantPass
from arbiter.core.queue.placement_memo import PlacementMemo
from arbiter.core.queue.several_devices import place_gang
from arbiter.core.queue.wakes import return_to_service, wake
from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.request_queue import QueueEntry
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.records.timers import NEVER
from arbiter.core.residency import growth
from arbiter.core.state import CoreState, Node, reject_queued
from arbiter.core.tickets import quotas
from arbiter.core.tickets.lendable_devices import compute_books, is_readable, watch_claims
from arbiter.errors import GpusLost
from arbiter.units import SECOND, Bytes, Instant, NodeId, Span, after

SCANNED_COUNT = 32  # tickets on a device, looked through for the next moment at 1 us each


def run(state: CoreState) -> None:
    """Grants what can be granted on each dirty node, then enforces its watermarks."""
    if not state.is_settled or state.closing_by is not None:
        return
    quotas.requeue_relieved_tenants(state)
    for name in state.take_dirty_nodes():
        node = state.nodes.get(name)
        if node is not None:  # else its agent has not introduced itself yet
            # Each further walk follows a grant, so the tickets in the queue bound their number.
            while not state.queue.is_empty(name):
                if _run_node(state, node) is PassEnd.DONE:
                    break
            watermarks.enforce(state, node)


def _run_node(state: CoreState, node: Node) -> PassEnd:
    """Walks once through the queue of a node."""
    watch_claims(state, node)
    pass_ = _new_pass(state, node)
    for queued in state.queue.walk(node.node):
        pass_.memo.walk_past(queued)
        if not (queued.is_held or pass_.memo.can_skip(queued, state.estimates.version)):
            _try_queued(state, pass_, queued)
        if pass_.order_changed:
            return PassEnd.ORDER_CHANGED
        if pass_.memo.can_stop(state, queued):
            break
    else:
        state.queue.recompute_least_need(node.node)
    if pass_.has_waiting:
        _set_next_pass(state, pass_)
    return PassEnd.DONE


def _new_pass(state: CoreState, node: Node) -> GrantPass:
    """Begins a pass over a node's queue, with what is free, promised and reserved there now."""
    books = compute_books(state, node)
    reserves = quotas.reserves(state)
    most = placement.most_unpinned_bytes(books)
    return GrantPass(
        node,
        {b.device: b for b in books if is_readable(state, node, b.device, state.now)},
        most,
        Bytes(most - sum(reserves.values())),
        reserves,
        PlacementMemo(state.queue.stats(node.node)),
        growth.promised(state, node.node),
    )


def _try_queued(state: CoreState, pass_: GrantPass, queued: QueueEntry) -> None:
    """Does what can be done for a queued ticket now. A DRAINING ticket is passed over: its drain
    ends asleep (then `wake`) or resident (then `return_to_service`)."""
    ticket = state.ledger.find(queued.request.ticket)
    if ticket is None or ticket.id not in state.queue:
        return  # rejected or granted with its gang
    if state.is_silent(ticket.holder):  # it keeps its place; a grant would only lie there
        return
    match ticket.state:
        case State.QUEUED:
            _try_load(state, pass_, ticket, queued)
        case State.ASLEEP:
            wake(state, pass_, ticket, queued)
        case State.RESIDENT:
            return_to_service(state, ticket)


def _try_load(state: CoreState, pass_: GrantPass, ticket: Ticket, queued: QueueEntry) -> None:
    """Does what can be done for a queued ticket whose model must load."""
    if pass_.node.has_lost_gpus and not ticket.is_prefetch:
        reject_queued(state, ticket, GpusLost(ticket.node))
    elif pass_.books and pass_.reserved_devices.issuperset(pass_.books):
        pass_.defer(queued, ())
    elif ticket.gang:
        place_gang(state, pass_, ticket, queued)
    else:
        place(state, pass_, ticket, queued)


# -- later ----------------------------------------------------------------------------------------


def _set_next_pass(state: CoreState, pass_: GrantPass) -> None:
    """Sets the timer of the node's next pass, because minimum residency, refusals and urgency end
    by themselves. On a device with more than SCANNED_COUNT tickets one of these surely ends within
    a second, so they are not looked through. Ends behind the time that is set already are left
    out."""
    subject = ("queue", pass_.node.node)
    soonest = state.timers.at(subject)
    for book in pass_.books.values():
        if len(book.tickets) > SCANNED_COUNT:
            soonest = min(soonest, after(state.now, Span(SECOND)))
        else:
            soonest = min(soonest, _stays_end(state, book, soonest))
    if state.trades:
        residents = _residents(pass_)
        soonest = min(soonest, _pauses_end(state, residents, soonest))
        soonest = min(soonest, _collations_end(state, pass_.node.node, residents, soonest))
    if soonest < NEVER:
        state.timers.set(subject, soonest)


def _stays_end(state: CoreState, book: DeviceAccount, soonest: Instant) -> Instant:
    """Returns the first instant at which a ticket of a device may leave that may not now; `soonest`
    where that is not before `soonest`."""
    now = state.now
    least = state.settings.min_residency
    for ticket in book.tickets.values():
        load = ticket.load if ticket.state is State.RESIDENT else None
        is_sooner = load and after(load.resident_since, least) < soonest
        stays_until = min_residency_ends(state, ticket) if is_sooner else now
        fades_at = priority_fades_at(state, ticket) or now
        for at in (ticket.declined_until, fades_at, stays_until):
            if now < at < soonest:
                soonest = at
    return soonest


def _residents(pass_: GrantPass) -> list[Ticket]:
    """Returns the resident tickets of a pass, of each device the first SCANNED_COUNT."""
    return [
        ticket
        for book in pass_.books.values()
        for ticket in islice(book.tickets.values(), SCANNED_COUNT)
        if ticket.state is State.RESIDENT
    ]


def _pauses_end(state: CoreState, residents: list[Ticket], soonest: Instant) -> Instant:
    """Returns the first instant at which an idle model counts as having no more requests of its own
    (C13); `soonest` where that is not before `soonest`."""
    least = state.settings.collate_pause
    for ticket in residents:
        if not ticket.inflight and after(ticket.last_used, least) < soonest:
            at = pause_ends(state, ticket)
            if state.now < at < soonest:
                soonest = at
    return soonest


def _collations_end(
    state: CoreState, node: NodeId, residents: list[Ticket], soonest: Instant
) -> Instant:
    """Returns the first instant at which one of the first tickets of the queue has waited as long
    as it must for models that trade places with its own (C13); `soonest` where that is not before
    `soonest`."""
    now = state.now
    most = state.settings.collate_most
    have_given_up = state.trades.have_given_up
    models = {ticket.model_name for ticket in residents}
    for queued in state.queue.first(node, SCANNED_COUNT):
        asked_at = queued.request.asked_at
        if have_given_up:
            asked_at = state.trades.waits_since((queued.holder, queued.model.model), asked_at)
        ends_at = after(asked_at, most)  # sooner only by a deadline
        if (ends_at >= soonest and queued.deadline is None) or ends_at <= now:
            continue
        askers = state.trades.askers_among(queued.model, models, now)
        asker = state.ledger.find(queued.request.ticket) if askers else None
        if asker is not None:
            traded = {ticket.capability for ticket in residents if ticket.model_name in askers}
            bounds = [trade_bound(state, capability, asker) for capability in traded]
            soonest = min((at for at in bounds if now < at < soonest), default=soonest)
    return soonest
