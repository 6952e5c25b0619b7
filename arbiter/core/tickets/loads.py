"""How a load ends: it serves, it breaks, or nobody wants it any more (A8, A12)."""

from arbiter.core import events as ev
from arbiter.core.decisions import LoadModel, Reason
from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.state import CoreState, EvictedFor, EvictedForKey, Failure, model_label
from arbiter.core.tickets.budget import share
from arbiter.core.tickets.reclaim import charged, kill_and_notify, reclaim
from arbiter.errors import ENGINE_DIED, LoadFailed, TicketClosed
from arbiter.units import Bytes, HolderId, Span, after, since


def on_loaded(state: CoreState, entry: Ticket, took: Span, *, verified: bool = True) -> None:
    """LOADING -> RESIDENT, after a load or a wake. The copy in host RAM stays charged for as long
    as it is measured. A wake that was not verified was a load as well, so its seconds teach
    nothing."""
    state.move(entry, State.RESIDENT, granted=dict(entry.home))
    entry.resident_since = entry.last_used = state.now
    entry.load_took = took
    _first_use(state, entry)
    entry.readings_count = 0
    if entry.wakes_count == 0:
        state.estimates.loaded(state.key_of(entry), took, entry.need.weights_bytes)
    elif verified:
        state.estimates.woke(state.key_of(entry), took)
    else:
        state.log("wake_unverified", entry, took=took)
    state.failures.pop((entry.capability, entry.model), None)
    state.evicted_for.pop((entry.holder, entry.model), None)
    if len(entry.home) == 1:
        state.last_home[entry.node, entry.capability, entry.model] = next(iter(entry.home))
    kind = "model_wake" if entry.wakes_count else "model_load"
    state.log(kind, entry, size=charged(entry), took=took, predicted_ns=entry.predicted)


def _first_use(state: CoreState, entry: Ticket) -> None:
    """Grant and first use are one step: the model is in use until its holder says otherwise. A
    prefetched model has no use until its holder reports one."""
    if entry.is_prefetch:
        state.prefetched.pop((entry.capability, entry.model), None)
        entry.inflight = 0
        return
    entry.inflight = 1
    entry.uses_count += 1
    state.note_uses(entry, 1)


def on_load_failed(state: CoreState, entry: Ticket, cause: str, out_of_memory: bool) -> None:
    """LOADING -> RECLAIMING, with what it teaches."""
    reclaim(state, entry, Reason.FAILED)
    learn_failure(state, entry, cause, out_of_memory)


def learn_failure(state: CoreState, entry: Ticket, cause: str, out_of_memory: bool) -> None:
    """A first failure for memory may be tried again at once with a corrected estimate, and a first
    death without a word as it was: somebody may have killed it. Any other cools the model down and
    answers everybody who waits for it."""
    state.log("load_failed", entry, cause=cause, out_of_memory=out_of_memory)
    if out_of_memory:
        held = Bytes(max(entry.home_bytes, entry.at_home_bytes))
        state.estimates.ran_out(state.key_of(entry), held)
        if entry.attempt == 1:
            state.failures.pop((entry.capability, entry.model), None)
    if entry.attempt == 1 and (out_of_memory or cause == ENGINE_DIED):
        _restore_later(state, (entry.holder, entry.model))
        return
    _cool_down(state, entry, cause)
    _give_up(state, entry, LoadFailed(entry.model, cause, out_of_memory))


def _give_up(state: CoreState, entry: Ticket, error: LoadFailed) -> None:
    refuse_waiters(state, entry, error)
    reload_evicted(state, (entry.holder, entry.model))


def note_cause(state: CoreState, event: ev.LoadBroke) -> None:
    """The engine's end was seen before its holder could say why; now it says."""
    entry = state.broken_loads.pop(event.ticket, None)
    if entry is None:
        return
    if event.out_of_memory:
        state.estimates.ran_out(state.key_of(entry), entry.home_bytes)
    failure = state.failures.get((entry.capability, entry.model))
    if failure and event.out_of_memory and entry.attempt == 1:
        del state.failures[(entry.capability, entry.model)]
    elif failure:
        failure.cause = event.cause
    elif not event.out_of_memory and event.cause != ENGINE_DIED:  # it was not killed from outside
        _cool_down(state, entry, event.cause)
        _give_up(state, entry, LoadFailed(entry.model, event.cause, False))


def refuse_waiters(state: CoreState, failed: Ticket, error: LoadFailed) -> None:
    for ticket in state.queue.of_model(model_label(failed.capability, failed.model)):
        waiting = state.ledger.find(ticket)
        assert waiting is not None
        if waiting.state is State.QUEUED:
            state.answer_error_finally(ticket, error)
            state.close(waiting)


def _cool_down(state: CoreState, entry: Ticket, cause: str) -> None:
    terms = state.settings.timeouts
    old = state.failures.get((entry.capability, entry.model))
    times = old.times_count + 1 if old else 1
    # The exponent is bounded so that the number is: 2^20 first terms are beyond any cap.
    pause = Span(min(terms.cooldown_first << min(times - 1, 20), terms.cooldown_most))
    failure = Failure(cause, times, after(state.now, pause))
    state.failures[(entry.capability, entry.model)] = failure
    state.timers.set(("floors", ""), failure.until)
    state.log("cool_down", entry, took=pause, cause=cause, times=times)


# -- what made room for a load that failed comes back --------------------------------------------


def note_evicted_for(state: CoreState, waiting: Ticket, victim: Ticket) -> None:
    """A process outside Serve that was asked for its lease has no model to bring back."""
    if victim.lease:
        return
    made_room = state.evicted_for.setdefault((waiting.holder, waiting.model), EvictedFor())
    made_room.models[(victim.holder, victim.model)] = victim.ticket


def retried(state: CoreState, key: EvictedForKey) -> None:
    if switch := state.evicted_for.get(key):
        switch.restore_at = None


def _restore_later(state: CoreState, key: EvictedForKey) -> None:
    if switch := state.evicted_for.get(key):
        switch.restore_at = after(state.now, state.settings.timeouts.retry)
        state.timers.set(("restore", ""), switch.restore_at)


def on_restore_timer(state: CoreState) -> None:
    for key, switch in list(state.evicted_for.items()):
        if switch.restore_at is None:
            continue
        if state.now >= switch.restore_at:
            reload_evicted(state, key)
        else:
            state.timers.set(("restore", ""), switch.restore_at)


def reload_evicted(state: CoreState, key: EvictedForKey) -> None:
    switch = state.evicted_for.pop(key, None)
    for (holder, model), ticket in switch.models.items() if switch else ():
        entry = state.ledger.find(ticket)
        if holder in state.holders and (entry is None or entry.state is not State.RESIDENT):
            state.decide(LoadModel(holder, model))


def forget_evicted_for(state: CoreState, holder: HolderId) -> None:
    """It is gone, and what it displaced has no load to wait for."""
    for key in [key for key in state.evicted_for if key[0] == holder]:
        del state.evicted_for[key]


# -- a load nobody waits for ----------------------------------------------------------------------


def on_withdrawn(state: CoreState, event: ev.Withdrawn) -> None:
    states = State.QUEUED, State.ASLEEP, State.LOADING, State.DRAINING
    entry = state.live(event.ticket, *states, by=event.holder)
    if entry is None:
        if state.ledger.find(event.ticket) is None and event.ticket not in state.answers:
            state.remember(event.ticket, TicketClosed(event.ticket))  # it overtook its request
            state.ledger.changed.update(state.queue.nodes)  # its gang may wait for it
        return
    if entry.state is State.QUEUED:
        state.log("ticket_closed", entry, reason=Reason.WITHDRAWN.value)
        state.close(entry)
        state.evicted_for.pop((entry.holder, entry.model), None)
    elif entry.state is not State.LOADING:
        state.unqueue(entry)  # it sleeps on
        state.evicted_for.pop((entry.holder, entry.model), None)
    elif not _is_nearly_done(state, entry):
        kill_and_notify(state, entry, Reason.WITHDRAWN)
        state.evicted_for.pop((entry.holder, entry.model), None)


def let_sleep(state: CoreState, entry: Ticket) -> None:
    """LOADING -> ASLEEP: who asked for the wake had gone before the grant arrived, and its holder
    never began (A8)."""
    host_reservation = {d: size for d, size in entry.granted.items() if d not in entry.home}
    state.move(entry, State.ASLEEP, granted=host_reservation)
    entry.inflight = 0
    state.evicted_for.pop((entry.holder, entry.model), None)
    state.log("wake_given_up", entry)
    state.set_timer(entry, state.now)


def prefetches_that_make_room(state: CoreState, book: DeviceAccount, short: int) -> list[Ticket]:
    """Those that were begun as prefetches there, where they are enough."""
    prefetches = [e for e in book.loading.values() if e.is_prefetch]
    returning = sum(e.charge(book.device) for e in prefetches)
    return prefetches if short <= returning else []


def _is_nearly_done(state: CoreState, entry: Ticket) -> bool:
    """A wake always is: it only copies memory."""
    if entry.wakes_count:
        return True
    left = entry.predicted - since(entry.since, state.now)
    return entry.predicted > 0 and left <= share(
        Bytes(entry.predicted), state.settings.finish_fraction
    )
