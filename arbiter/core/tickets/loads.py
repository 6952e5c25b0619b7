"""Ends loads: the model serves, the load breaks, or no request wants it any more (A8, A12)."""

from arbiter.core import events as ev
from arbiter.core.decisions import EventKind, LoadModel, Reason
from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.state import AskedLoad, CoreState, EvictedFor, EvictedForKey, Failure
from arbiter.core.tickets.budget import share
from arbiter.core.tickets.reclaim import charged, kill_and_notify, reclaim
from arbiter.core.types import ModelName
from arbiter.errors import TRIED_AGAIN, LoadFailed, TicketClosed
from arbiter.units import Bytes, HolderId, Span, after, since


def on_loaded(state: CoreState, entry: Ticket, took: Span, *, verified: bool = True) -> None:
    """Moves LOADING -> RESIDENT, after a load or a wake. The copy in host RAM stays charged for as
    long as it is measured. A wake that was not verified was a load as well, so its seconds teach
    nothing; its engine may end without having served, so the next heartbeat counts the use."""
    state.move(entry, State.RESIDENT, granted=dict(entry.home))
    entry.end_load(took, state.now)
    if verified or entry.is_prefetch:
        _first_use(state, entry)
    else:
        entry.note_inflight(1)
    state.note_loaded(entry)
    if entry.wakes_count == 0:
        state.estimates.loaded(entry.model_key, took, entry.need.weights_bytes, state.now)
        if state.settings.compact_every_loads_count:
            state.compactions.loads_count.update(list(entry.home))
    elif verified:
        state.estimates.woke(entry.model_key, took)
    else:
        state.log(EventKind.WAKE_UNVERIFIED, entry, took=took)
    state.failures.pop(entry.model_name, None)
    state.asked_loads.pop(entry.model_name, None)
    state.evicted_for.pop((entry.holder, entry.model), None)
    if len(entry.home) == 1:
        state.last_home[entry.node, entry.model_name] = next(iter(entry.home))
    predicted = entry.last_load.predicted
    kind = EventKind.MODEL_WAKE if entry.wakes_count else EventKind.MODEL_LOAD
    state.log(kind, entry, size=charged(entry), took=took, predicted_ns=predicted)


def _first_use(state: CoreState, entry: Ticket) -> None:
    """Counts grant and first use as one step: the model is in use until its holder says otherwise.
    A prefetched model has no use until its holder reports one."""
    if entry.is_prefetch:
        state.prefetched.pop(entry.model_name, None)
        if not state.compactions.is_loading(entry.model_name):  # else it leads to nothing new
            state.prefetched_this_event.append((entry.model_name, entry.node))
        entry.note_inflight(0)
        return
    entry.begin_first_use()
    state.note_uses(entry, 1)


def on_load_failed(state: CoreState, entry: Ticket, cause: str, out_of_memory: bool) -> None:
    """Moves LOADING -> RECLAIMING, and learns from the failure."""
    reclaim(state, entry, Reason.FAILED)
    learn_failure(state, entry, cause, out_of_memory)


def learn_failure(state: CoreState, entry: Ticket, cause: str, out_of_memory: bool) -> None:
    """Learns from a failed load. A first failure for memory may be tried again at once with a
    corrected estimate, and a first death without a word as it was, because the engine may have been
    killed from outside; so may a first load whose files were replaced meanwhile. Any other failure
    cools the model down and refuses every ticket that waits for it."""
    state.log(EventKind.LOAD_FAILED, entry, cause=cause, out_of_memory=out_of_memory)
    if out_of_memory:
        held = Bytes(max(entry.home_bytes, entry.at_home_bytes))
        state.estimates.ran_out(entry.model_key, held)
        if entry.attempt == 1:
            state.failures.pop(entry.model_name, None)
    if entry.attempt == 1 and (out_of_memory or cause in TRIED_AGAIN):
        _restore_later(state, (entry.holder, entry.model))
        return
    _cool_down(state, entry, cause)
    _give_up(state, entry, LoadFailed(entry.model, cause, out_of_memory))


def _give_up(state: CoreState, entry: Ticket, error: LoadFailed) -> None:
    state.asked_loads.pop(entry.model_name, None)
    refuse_waiters(state, entry, error)
    reload_evicted(state, (entry.holder, entry.model))


def note_cause(state: CoreState, event: ev.LoadBroke) -> None:
    """Takes the holder's account of a load whose engine was seen to end before the holder could say
    why."""
    entry = state.broken_loads.pop(event.ticket, None)
    if entry is None:
        return
    if event.out_of_memory:
        state.estimates.ran_out(entry.model_key, entry.home_bytes)
    failure = state.failures.get(entry.model_name)
    if failure and event.out_of_memory and entry.attempt == 1:
        del state.failures[entry.model_name]
    elif failure:
        failure.cause = event.cause
    elif not event.out_of_memory and event.cause not in TRIED_AGAIN:
        _cool_down(state, entry, event.cause)
        _give_up(state, entry, LoadFailed(entry.model, event.cause, False))


def refuse_waiters(state: CoreState, failed: Ticket, error: LoadFailed) -> None:
    """Refuses every queued ticket for the model whose load failed."""
    for ticket in state.queue.of_model(failed.model_name):
        waiting = state.ledger.find(ticket)
        assert waiting is not None
        if waiting.state is State.QUEUED:
            state.answer_error_finally(ticket, error)
            state.close(waiting)


def _cool_down(state: CoreState, entry: Ticket, cause: str) -> None:
    timeouts = state.settings.timeouts
    old = state.failures.get(entry.model_name)
    times = old.times_count + 1 if old else 1
    # The exponent is bounded so that the number is: 2^20 first terms are beyond any cap.
    pause = Span(min(timeouts.cooldown_first << min(times - 1, 20), timeouts.cooldown_most))
    failure = Failure(cause, times, after(state.now, pause))
    state.failures[entry.model_name] = failure
    state.timers.set(("floors", ""), failure.until)
    state.log(EventKind.COOL_DOWN, entry, took=pause, cause=cause, times=times)


# -- what made room for a load that failed comes back --------------------------------------------


def note_evicted_for(state: CoreState, asker: Ticket, victim: Ticket) -> None:
    """Notes that a victim made room for a load. A process outside Serve that was asked for its
    lease has no model to bring back. What left for `arbiter free` returns after it, if it was
    awake."""
    if victim.lease:
        return
    if asker.frees:
        if victim.state is State.RESIDENT:
            state.freed_for.setdefault(asker.ticket, {})[victim.model_name] = None
        return
    made_room = state.evicted_for.setdefault((asker.holder, asker.model), EvictedFor())
    made_room.models[(victim.holder, victim.model)] = victim.ticket


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
    for (holder, model), ticket in switch.models.items() if switch else ():
        entry = state.ledger.find(ticket)
        known = state.holders.get(holder)
        if known and (entry is None or entry.state is not State.RESIDENT):
            state.asked_loads[ModelName(known.capability, model)] = AskedLoad(holder, state.now)
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
    entry = state.live(event.ticket, *states, by=event.holder)
    if entry is None:
        if state.ledger.find(event.ticket) is None and event.ticket not in state.answers:
            # The withdrawal arrived before its request.
            state.keep_answer(event.ticket, TicketClosed(event.ticket))
            state.mark_dirty(*state.queue.nodes)  # its gang may wait for it
        return
    if entry.state is State.QUEUED:
        state.log(EventKind.TICKET_CLOSED, entry, reason=Reason.WITHDRAWN.value)
        note_gave_up(state, entry)
        state.close(entry)
        state.evicted_for.pop((entry.holder, entry.model), None)
    elif entry.state is not State.LOADING:
        note_gave_up(state, entry)
        state.unqueue(entry)  # it sleeps on
        state.evicted_for.pop((entry.holder, entry.model), None)
    elif not _is_nearly_done(state, entry):
        kill_and_notify(state, entry, Reason.WITHDRAWN)
        state.evicted_for.pop((entry.holder, entry.model), None)


def note_gave_up(state: CoreState, entry: Ticket) -> None:
    """Remembers since when a request had waited for a model with which its own trades places, as
    long as that may keep it waiting (C13)."""
    queued = state.queue.find(entry.ticket)
    if queued is None or not state.trades.askers_of(entry.model_name, state.now):
        return
    waiter = (entry.holder, entry.model)
    began = state.trades.waits_since(waiter, queued.request.asked_at)
    state.trades.note_gave_up(waiter, began, after(state.now, state.settings.collate_most))


def let_sleep(state: CoreState, entry: Ticket) -> None:
    """Moves LOADING -> ASLEEP: the caller that asked for the wake had gone before the grant
    arrived, and the holder never began (A8)."""
    host_reservation = {d: size for d, size in entry.granted.items() if d not in entry.home}
    state.move(entry, State.ASLEEP, granted=host_reservation)
    entry.note_inflight(0)
    state.evicted_for.pop((entry.holder, entry.model), None)
    state.log(EventKind.WAKE_GIVEN_UP, entry)
    state.set_timer(entry, state.now)


def prefetches_that_make_room(state: CoreState, book: DeviceAccount, short: Bytes) -> list[Ticket]:
    """Returns the prefetches that still load on a device, if together they hold `short` bytes;
    else none."""
    prefetches = [e for e in book.loading.values() if e.is_prefetch]
    returning = sum(e.charge(book.device) for e in prefetches)
    return prefetches if short <= returning else []


def _is_nearly_done(state: CoreState, entry: Ticket) -> bool:
    """Says whether a load is nearly done. A wake always is: it only copies memory."""
    if entry.wakes_count:
        return True
    predicted = entry.last_load.predicted
    remaining = predicted - since(entry.since, state.now)
    return predicted > 0 and remaining <= share(Bytes(predicted), state.settings.finish_fraction)
