"""Ends loads: the model serves, the load breaks, or no request wants it any more (A8, A12)."""

from arbiter.core import events as ev
from arbiter.core.decisions import EventKind, LoadModel, Reason
from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.state import AskedLoad, CoreState, EvictedFor, EvictedForKey, Failure
from arbiter.core.tickets.budget import fraction_of
from arbiter.core.tickets.reclaim import charged, kill_and_notify, reclaim
from arbiter.core.types import ModelName
from arbiter.errors import TRIED_AGAIN, LoadFailed, TicketClosed
from arbiter.units import Bytes, HolderId, Span, after, since


def on_loaded(state: CoreState, ticket: Ticket, took: Span, *, verified: bool = True) -> None:
    """Moves LOADING -> RESIDENT, after a load or a wake. The copy in host RAM stays charged for as
    long as it is measured. A wake that was not verified was a load as well, so its seconds teach
    nothing; its engine may end without having served, so the next heartbeat counts the use."""
    state.move(ticket, State.RESIDENT, granted=dict(ticket.home))
    ticket.end_load(took, state.now)
    if verified or ticket.is_prefetch:
        _first_use(state, ticket)
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


def _first_use(state: CoreState, ticket: Ticket) -> None:
    """Counts grant and first use as one step: the model is in use until its holder says otherwise.
    A prefetched model has no use until its holder reports one."""
    if ticket.is_prefetch:
        state.prefetched.pop(ticket.model_name, None)
        if not state.compactions.is_loading(ticket.model_name):  # else it leads to nothing new
            state.prefetched_this_event.append((ticket.model_name, ticket.node))
        ticket.note_inflight(0)
        return
    ticket.begin_first_use()
    state.note_uses(ticket, 1)


def on_load_failed(state: CoreState, ticket: Ticket, cause: str, out_of_memory: bool) -> None:
    """Moves LOADING -> RECLAIMING, and learns from the failure."""
    reclaim(state, ticket, Reason.FAILED)
    learn_failure(state, ticket, cause, out_of_memory)


def learn_failure(state: CoreState, ticket: Ticket, cause: str, out_of_memory: bool) -> None:
    """Learns from a failed load. A first failure for memory may be tried again at once with a
    corrected estimate, and a first death without a word as it was, because the engine may have been
    killed from outside; so may a first load whose files were replaced meanwhile. Any other failure
    cools the model down and refuses every ticket that waits for it."""
    state.log(EventKind.LOAD_FAILED, ticket, cause=cause, out_of_memory=out_of_memory)
    if out_of_memory:
        held = Bytes(max(ticket.home_bytes, ticket.at_home_bytes))
        state.estimates.ran_out(ticket.model_key, held)
        if ticket.attempt == 1:
            state.failures.pop(ticket.model_name, None)
    if ticket.attempt == 1 and (out_of_memory or cause in TRIED_AGAIN):
        _restore_later(state, (ticket.holder, ticket.model))
        return
    _cool_down(state, ticket, cause)
    _give_up(state, ticket, LoadFailed(ticket.model, cause, out_of_memory))


def _give_up(state: CoreState, ticket: Ticket, error: LoadFailed) -> None:
    state.asked_loads.pop(ticket.model_name, None)
    refuse_waiters(state, ticket, error)
    reload_evicted(state, (ticket.holder, ticket.model))


def note_cause(state: CoreState, event: ev.LoadBroke) -> None:
    """Takes the holder's account of a load whose engine was seen to end before the holder could say
    why."""
    ticket = state.broken_loads.pop(event.ticket, None)
    if ticket is None:
        return
    if event.out_of_memory:
        state.estimates.ran_out(ticket.model_key, ticket.home_bytes)
    failure = state.failures.get(ticket.model_name)
    if failure and event.out_of_memory and ticket.attempt == 1:
        del state.failures[ticket.model_name]
    elif failure:
        failure.cause = event.cause
    elif not event.out_of_memory and event.cause not in TRIED_AGAIN:
        _cool_down(state, ticket, event.cause)
        _give_up(state, ticket, LoadFailed(ticket.model, event.cause, False))


def refuse_waiters(state: CoreState, failed: Ticket, error: LoadFailed) -> None:
    """Refuses every queued ticket for the model whose load failed."""
    for ticket_id in state.queue.of_model(failed.model_name):
        waiting = state.ledger.find(ticket_id)
        assert waiting is not None
        if waiting.state is State.QUEUED:
            state.answer_error_finally(ticket_id, error)
            state.close(waiting)


def _cool_down(state: CoreState, ticket: Ticket, cause: str) -> None:
    timeouts = state.settings.timeouts
    old = state.failures.get(ticket.model_name)
    times = old.times_count + 1 if old else 1
    # The exponent is bounded so that the number is: 2^20 first terms are beyond any cap.
    pause = Span(min(timeouts.cooldown_first << min(times - 1, 20), timeouts.cooldown_most))
    failure = Failure(cause, times, after(state.now, pause))
    state.failures[ticket.model_name] = failure
    state.timers.set(("floors", ""), failure.until)
    state.log(EventKind.COOL_DOWN, ticket, took=pause, cause=cause, times=times)


# -- what made room for a load that failed comes back --------------------------------------------


def note_evicted_for(state: CoreState, asker: Ticket, victim: Ticket) -> None:
    """Notes that a victim made room for a load. A process outside Serve that was asked for its
    lease has no model to bring back. What left for `arbiter free` returns after it, if it was
    awake."""
    if victim.lease:
        return
    if asker.frees:
        if victim.state is State.RESIDENT:
            state.freed_for.setdefault(asker.id, {})[victim.model_name] = None
        return
    made_room = state.evicted_for.setdefault((asker.holder, asker.model), EvictedFor())
    made_room.models[(victim.holder, victim.model)] = victim.id


def retried(state: CoreState, key: EvictedForKey) -> None:
    """Notes that a failed load is tried again, so what made room for it stays away."""
    if switch := state.evicted_for.get(key):
        switch.restore_at = None


def _restore_later(state: CoreState, key: EvictedForKey) -> None:
    if switch := state.evicted_for.get(key):
        switch.restore_at = after(state.now, state.settings.timeouts.retry)
        state.timers.set(("restore", ""), switch.restore_at)


def on_restore_timer(state: CoreState) -> None:
    """Brings back what made room for loads that failed and were not tried again in time."""
    for key, switch in list(state.evicted_for.items()):
        if switch.restore_at is None:
            continue
        if state.now >= switch.restore_at:
            reload_evicted(state, key)
        else:
            state.timers.set(("restore", ""), switch.restore_at)


def reload_evicted(state: CoreState, key: EvictedForKey) -> None:
    """Has holders load again what made room for a load that failed."""
    switch = state.evicted_for.pop(key, None)
    for (holder, model), ticket_id in switch.models.items() if switch else ():
        ticket = state.ledger.find(ticket_id)
        known = state.holders.get(holder)
        if known and (ticket is None or ticket.state is not State.RESIDENT):
            load = AskedLoad(holder, state.now, first_asked_at=state.now)
            state.asked_loads[ModelName(known.capability, model)] = load
            state.decide(LoadModel(holder, model))


def forget_evicted_for(state: CoreState, holder: HolderId) -> None:
    """Forgets what made room for a holder that is gone: there is no load left to wait for."""
    for key in [key for key in state.evicted_for if key[0] == holder]:
        del state.evicted_for[key]


# -- a load without a request ---------------------------------------------------------------------


def on_withdrawn(state: CoreState, event: ev.Withdrawn) -> None:
    """Ends what no caller waits for any more: a queued ticket closes, an asleep ticket sleeps on, a
    load that is not nearly done is killed."""
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
    """Remembers since when a request had waited for a model with which its own trades places, as
    long as that may keep it waiting (C13)."""
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
