"""Ends loads: the model serves, the load fails, or no caller waits for it any more (A8, A12)."""

from arbiter.core import events as ev
from arbiter.core.decisions import EventKind, Reason
from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.state import CoreState, Failure
from arbiter.core.tickets.budget import fraction_of
from arbiter.core.tickets.failed_swaps import reload_evicted, restore_later
from arbiter.core.tickets.reclaim import charged, kill_and_notify, reclaim
from arbiter.errors import TRIED_AGAIN, LoadFailed, TicketClosed
from arbiter.units import Bytes, Span, after, since


def on_loaded(
    state: CoreState, ticket: Ticket, took: Span, *, verified: bool = True, is_used: bool
) -> None:
    """Moves LOADING -> RESIDENT, after a load or a wake. The copy in host RAM stays charged for as
    long as it is measured. `verified`: False for a wake whose probe differed, so that the engine
    loaded from disk. Nothing is learned from how long that took, and the engine may end without
    having served, so the next heartbeat counts the use. `is_used`: False where no request is known
    to have waited for it; its uses are those that heartbeats tell of. Grant and first use are one
    step all the same: the model is in use until its holder says otherwise (A5)."""
    state.move(ticket, State.RESIDENT, granted=dict(ticket.home))
    ticket.end_load(took, state.now)
    if ticket.is_prefetch:
        _note_prefetched(state, ticket)
    elif verified and is_used:
        ticket.begin_first_use()
        state.note_uses(ticket, 1)
    else:
        ticket.note_inflight(1)
    state.note_loaded(ticket)
    if ticket.wakes_count == 0:
        state.estimates.loaded(ticket.model_key, took, ticket.need.weights_bytes, state.now)
        if state.settings.compact_every_loads_count:
            state.compactions.count_load(ticket.home)
    elif verified:
        state.estimates.woke(ticket.model_key, took)
    else:
        state.log(EventKind.WAKE_UNVERIFIED, ticket, took=took)
    state.failures.pop(ticket.model_name, None)
    state.asked_loads.pop(ticket.model_name, None)
    state.evicted_for.pop((ticket.holder, ticket.model), None)
    if len(ticket.home) == 1:
        state.last_home[ticket.node, ticket.model_name] = next(iter(ticket.home))
    predicted = ticket.last_load.predicted
    kind = EventKind.MODEL_WAKE if ticket.wakes_count else EventKind.MODEL_LOAD
    state.log(kind, ticket, size=charged(ticket), took=took, predicted_ns=predicted)


def _note_prefetched(state: CoreState, ticket: Ticket) -> None:
    """Notes that a prefetch is over. Its model has no use until its holder reports one."""
    state.prefetched.pop(ticket.model_name, None)
    if not state.compactions.is_loading(ticket.model_name):  # else it leads to nothing new
        state.prefetched_this_event.append((ticket.model_name, ticket.node))
    ticket.note_inflight(0)


def on_load_failed(state: CoreState, ticket: Ticket, cause: str, out_of_memory: bool) -> None:
    """Moves LOADING -> RECLAIMING, and learns from the failure."""
    reclaim(state, ticket, Reason.FAILED)
    learn_failure(state, ticket, cause, out_of_memory)


def learn_failure(state: CoreState, ticket: Ticket, cause: str, out_of_memory: bool) -> None:
    """Learns from a failed load. The holder may try once more at once after a first failure for
    memory, with a corrected estimate; after a first engine that died without a word, because it may
    have been killed from outside; and after a first load whose files were replaced meanwhile. Any
    other failure cools the model down and refuses every ticket that waits for it."""
    state.log(EventKind.LOAD_FAILED, ticket, cause=cause, out_of_memory=out_of_memory)
    if out_of_memory:
        held = Bytes(max(ticket.granted_home_bytes, ticket.measured_home_bytes))
        state.estimates.ran_out(ticket.model_key, held)
        if ticket.attempt == 1:
            state.failures.pop(ticket.model_name, None)
    if ticket.attempt == 1 and (out_of_memory or cause in TRIED_AGAIN):
        restore_later(state, (ticket.holder, ticket.model))
        return
    _cool_down(state, ticket, cause)
    _give_up(state, ticket, LoadFailed(ticket.model, cause, out_of_memory))


def _give_up(state: CoreState, ticket: Ticket, error: LoadFailed) -> None:
    """Refuses every ticket that waits for a model that cannot be loaded now, and has what made room
    for it loaded again."""
    state.asked_loads.pop(ticket.model_name, None)
    refuse_waiters(state, ticket, error)
    reload_evicted(state, (ticket.holder, ticket.model))


def note_cause(state: CoreState, event: ev.LoadBroke) -> None:
    """Takes from the holder why a load failed whose engine was seen to end before the holder could
    say so, and corrects what `learn_failure` had concluded."""
    ticket = state.broken_loads.pop(event.ticket, None)
    if ticket is None:
        return
    if event.out_of_memory:
        state.estimates.ran_out(ticket.model_key, ticket.granted_home_bytes)
    failure = state.failures.get(ticket.model_name)
    if failure and event.out_of_memory and ticket.attempt == 1:
        del state.failures[ticket.model_name]
    elif failure:
        failure.cause = event.cause
    elif not event.out_of_memory and event.cause not in TRIED_AGAIN:
        _cool_down(state, ticket, event.cause)
        _give_up(state, ticket, LoadFailed(ticket.model, event.cause, False))


def refuse_waiters(state: CoreState, failed: Ticket, error: LoadFailed) -> None:
    """Refuses every queued ticket for the model whose load failed, and has what makes room for it
    loaded again."""
    for ticket_id in state.queue.of_model(failed.model_name):
        waiting = state.ledger.find(ticket_id)
        assert waiting is not None
        if waiting.state is State.QUEUED:
            reload_evicted(state, (waiting.holder, waiting.model))
            state.answer_error_finally(ticket_id, error)
            state.close(waiting)


def _cool_down(state: CoreState, ticket: Ticket, cause: str) -> None:
    """Lets no request load a model for a while, which doubles with each failure in a row."""
    timeouts = state.settings.timeouts
    old = state.failures.get(ticket.model_name)
    times = old.times_count + 1 if old else 1
    # Twenty doublings are beyond any cap; a bounded exponent keeps the number small.
    pause = Span(min(timeouts.cooldown_first << min(times - 1, 20), timeouts.cooldown_most))
    failure = Failure(cause, times, after(state.now, pause))
    state.failures[ticket.model_name] = failure
    state.timers.set(("floors", ""), failure.until)
    state.log(EventKind.COOL_DOWN, ticket, took=pause, cause=cause, times=times)


# -- a load that no caller waits for any more -----------------------------------------------------


def on_withdrawn(state: CoreState, event: ev.Withdrawn) -> None:
    """Ends the ticket that no caller waits for any more: a queued ticket closes, an asleep ticket
    sleeps on, a load that is not nearly done is killed."""
    states = State.QUEUED, State.ASLEEP, State.LOADING, State.DRAINING
    ticket = state.find_or_count_stale(event.ticket, *states, by=event.holder)
    if ticket is None:
        if state.ledger.find(event.ticket) is None and event.ticket not in state.answers:
            # The withdrawal arrived before its request.
            state.keep_answer(event.ticket, TicketClosed(event.ticket))
            state.mark_dirty(*state.queue.nodes)  # its gang may wait for it
        return
    if ticket.state is State.QUEUED:
        state.log(EventKind.TICKET_CLOSED, ticket, reason=Reason.WITHDRAWN.value)
        note_gave_up(state, ticket)
        state.close(ticket)
        state.evicted_for.pop((ticket.holder, ticket.model), None)
    elif ticket.state is not State.LOADING:
        note_gave_up(state, ticket)
        state.unqueue(ticket)  # it sleeps on
        state.evicted_for.pop((ticket.holder, ticket.model), None)
    elif not _is_nearly_done(state, ticket):
        kill_and_notify(state, ticket, Reason.WITHDRAWN)
        state.evicted_for.pop((ticket.holder, ticket.model), None)


def note_gave_up(state: CoreState, ticket: Ticket) -> None:
    """Notes that a request gives up which waits for the place of a model that trades places with
    its own (C13). If it asks again in time, its wait counts from its first request on."""
    queued = state.queue.find(ticket.id)
    if queued is None or not state.trades.askers_of(ticket.model_name, state.now):
        return
    waiter = (ticket.holder, ticket.model)
    began = state.trades.waits_since(waiter, queued.request.asked_at)
    state.trades.note_gave_up(waiter, began, after(state.now, state.settings.collate_most))


def let_sleep(state: CoreState, ticket: Ticket) -> None:
    """Moves LOADING -> ASLEEP: the caller that asked for the wake had gone before the grant
    arrived, and the holder never began (A8)."""
    host_reservation = {d: size for d, size in ticket.granted.items() if d not in ticket.home}
    state.move(ticket, State.ASLEEP, granted=host_reservation)
    ticket.note_inflight(0)
    state.evicted_for.pop((ticket.holder, ticket.model), None)
    state.log(EventKind.WAKE_GIVEN_UP, ticket)
    state.set_timer(ticket, state.now)


def prefetches_that_make_room(state: CoreState, book: DeviceAccount, short: Bytes) -> list[Ticket]:
    """Returns the prefetches that still load on a device, if together they hold `short` bytes;
    else none."""
    prefetches = [t for t in book.loading.values() if t.is_prefetch]
    returning = sum(t.charge(book.device) for t in prefetches)
    return prefetches if short <= returning else []


def _is_nearly_done(state: CoreState, ticket: Ticket) -> bool:
    """Says whether a load is nearly done. A wake always is: it only copies memory."""
    if ticket.wakes_count:
        return True
    predicted = ticket.last_load.predicted
    remaining = predicted - since(ticket.since, state.now)
    return predicted > 0 and remaining <= fraction_of(
        Bytes(predicted), state.settings.finish_fraction
    )
