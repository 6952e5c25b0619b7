"""How a load ends: it serves, it breaks, or nobody wants it any more (SPEC A8, A12)."""

from arbiter.core import events as ev
from arbiter.core.decisions import LoadModel, Reason
from arbiter.core.records.ledger import DeviceAccount
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.state import CoreState, EvictedFor, EvictedForKey, Failure, model_label
from arbiter.core.tickets.budget import share
from arbiter.core.tickets.companions import end_with_primary
from arbiter.core.tickets.reclaim import charged, kill_and_notify, reclaim
from arbiter.errors import ENGINE_DIED, LoadFailed, TicketClosed
from arbiter.units import Bytes, HolderId, Span, after, since


def on_loaded(mind: CoreState, entry: Ticket, took: Span, *, verified: bool = True) -> None:
    """LOADING -> RESIDENT, after a load or a wake. The copy in host RAM stays charged for as long
    as it is measured. A wake that was not verified was a load as well, so its seconds teach
    nothing."""
    mind.move(entry, State.RESIDENT, granted=dict(entry.home))
    entry.resident_since = entry.last_used = mind.now
    entry.load_took = took
    _first_use(mind, entry)
    entry.readings_count = 0
    if entry.wakes_count == 0:
        mind.estimates.loaded(mind.key_of(entry), took, entry.need.weights_bytes)
    elif verified:
        mind.estimates.woke(mind.key_of(entry), took)
    else:
        mind.tell("wake_unverified", entry, took=took)
    mind.failures.pop((entry.capability, entry.model), None)
    mind.displaced.pop((entry.holder, entry.model), None)
    if len(entry.home) == 1:
        mind.last_home[entry.node, entry.capability, entry.model] = next(iter(entry.home))
    kind = "model_wake" if entry.wakes_count else "model_load"
    mind.tell(kind, entry, size=charged(entry), took=took, predicted_ns=entry.predicted)


def _first_use(mind: CoreState, entry: Ticket) -> None:
    """Grant and first use are one step: in use until its holder says otherwise. A guess is used by
    nobody until its holder says so."""
    if entry.is_guess:
        mind.guesses.pop((entry.capability, entry.model), None)
        entry.inflight = 0
        return
    entry.inflight = 1
    entry.uses_count += 1
    mind.note_uses(entry, 1)


def on_load_failed(mind: CoreState, entry: Ticket, cause: str, out_of_memory: bool) -> None:
    """LOADING -> RECLAIMING, with what it teaches."""
    reclaim(mind, entry, Reason.FAILED)
    learn_failure(mind, entry, cause, out_of_memory)


def learn_failure(mind: CoreState, entry: Ticket, cause: str, out_of_memory: bool) -> None:
    """A first failure for memory may be tried again at once with a corrected estimate, and a first
    death without a word as it was: somebody may have killed it. Any other cools the model down and
    answers everybody who waits for it."""
    mind.tell("load_failed", entry, cause=cause, out_of_memory=out_of_memory)
    if out_of_memory:
        held = Bytes(max(entry.home_bytes, entry.at_home_bytes))
        mind.estimates.ran_out(mind.key_of(entry), held)
        if entry.attempt == 1:
            mind.failures.pop((entry.capability, entry.model), None)
    if entry.attempt == 1 and (out_of_memory or cause == ENGINE_DIED):
        _restore_later(mind, (entry.holder, entry.model))
        return
    _cool_down(mind, entry, cause)
    _give_up(mind, entry, LoadFailed(entry.model, cause, out_of_memory))


def _give_up(mind: CoreState, entry: Ticket, error: LoadFailed) -> None:
    refuse_waiters(mind, entry, error)
    reload_evicted(mind, (entry.holder, entry.model))


def note_cause(mind: CoreState, event: ev.LoadBroke) -> None:
    """The engine's end was seen before its holder could say why; now it says."""
    entry = mind.broken_loads.pop(event.ticket, None)
    if entry is None:
        return
    if event.out_of_memory:
        mind.estimates.ran_out(mind.key_of(entry), entry.home_bytes)
    failure = mind.failures.get((entry.capability, entry.model))
    if failure and event.out_of_memory and entry.attempt == 1:
        del mind.failures[(entry.capability, entry.model)]
    elif failure:
        failure.cause = event.cause
    elif not event.out_of_memory and event.cause != ENGINE_DIED:  # it was not killed from outside
        _cool_down(mind, entry, event.cause)
        _give_up(mind, entry, LoadFailed(entry.model, event.cause, False))


def refuse_waiters(mind: CoreState, failed: Ticket, error: LoadFailed) -> None:
    for ticket in mind.line.of_model(model_label(failed.capability, failed.model)):
        waiting = mind.ledger.find(ticket)
        assert waiting is not None
        if waiting.state is State.QUEUED:
            mind.refuse(ticket, error)
            mind.close(waiting)


def _cool_down(mind: CoreState, entry: Ticket, cause: str) -> None:
    terms = mind.settings.terms
    old = mind.failures.get((entry.capability, entry.model))
    times = old.times_count + 1 if old else 1
    # The exponent is bounded so that the number is: 2^20 first terms are beyond any cap.
    pause = Span(min(terms.cooldown_first << min(times - 1, 20), terms.cooldown_most))
    failure = Failure(cause, times, after(mind.now, pause))
    mind.failures[(entry.capability, entry.model)] = failure
    mind.alarms.set(("floors", ""), failure.until)
    mind.tell("cool_down", entry, took=pause, cause=cause, times=times)


# -- what made room for a load that failed comes back --------------------------------------------


def note_evicted_for(mind: CoreState, waiting: Ticket, victim: Ticket) -> None:
    """A process outside Serve that was asked for its lease has no model to bring back."""
    if victim.lease:
        return
    made_room = mind.displaced.setdefault((waiting.holder, waiting.model), EvictedFor())
    made_room.models[(victim.holder, victim.model)] = victim.ticket


def retried(mind: CoreState, key: EvictedForKey) -> None:
    if switch := mind.displaced.get(key):
        switch.restore_at = None


def _restore_later(mind: CoreState, key: EvictedForKey) -> None:
    if switch := mind.displaced.get(key):
        switch.restore_at = after(mind.now, mind.settings.terms.retry)
        mind.alarms.set(("restore", ""), switch.restore_at)


def on_restore_timer(mind: CoreState) -> None:
    for key, switch in list(mind.displaced.items()):
        if switch.restore_at is None:
            continue
        if mind.now >= switch.restore_at:
            reload_evicted(mind, key)
        else:
            mind.alarms.set(("restore", ""), switch.restore_at)


def reload_evicted(mind: CoreState, key: EvictedForKey) -> None:
    switch = mind.displaced.pop(key, None)
    for (holder, model), ticket in switch.models.items() if switch else ():
        entry = mind.ledger.find(ticket)
        if holder in mind.holders and (entry is None or entry.state is not State.RESIDENT):
            mind.say(LoadModel(holder, model))


def forget_evicted_for(mind: CoreState, holder: HolderId) -> None:
    """It is gone, and what it displaced has no load to wait for."""
    for key in [key for key in mind.displaced if key[0] == holder]:
        del mind.displaced[key]


# -- a load nobody waits for ----------------------------------------------------------------------


def on_withdrawn(mind: CoreState, event: ev.Withdrawn) -> None:
    states = State.QUEUED, State.ASLEEP, State.LOADING, State.DRAINING
    entry = mind.live(event.ticket, *states, by=event.holder)
    if entry is None:
        if mind.ledger.find(event.ticket) is None and event.ticket not in mind.answers:
            mind.remember(event.ticket, TicketClosed(event.ticket))  # it overtook its request
            mind.ledger.changed.update(mind.line.nodes)  # its gang may wait for it
        return
    if entry.state is State.QUEUED:
        mind.tell("ticket_closed", entry, reason=Reason.WITHDRAWN.value)
        mind.close(entry)
        mind.displaced.pop((entry.holder, entry.model), None)
    elif entry.lives_in:
        mind.stale_count += 1  # what becomes of the load is said of its host
    elif entry.state is not State.LOADING:
        mind.unqueue(entry)  # it sleeps on
        mind.displaced.pop((entry.holder, entry.model), None)
    elif not _is_nearly_done(mind, entry):
        kill_and_notify(mind, entry, Reason.WITHDRAWN)
        mind.displaced.pop((entry.holder, entry.model), None)


def let_sleep(mind: CoreState, entry: Ticket) -> None:
    """LOADING -> ASLEEP: who asked for the wake had gone before the grant arrived, and its holder
    never began (SPEC A8)."""
    bed = {d: size for d, size in entry.granted.items() if d not in entry.home}
    mind.move(entry, State.ASLEEP, granted=bed)
    entry.inflight = 0
    mind.displaced.pop((entry.holder, entry.model), None)
    mind.tell("wake_given_up", entry)
    mind.watch(entry, mind.now)


def prefetches_that_make_room(mind: CoreState, book: DeviceAccount, short: int) -> list[Ticket]:
    """Those that were begun for a guess there, where they are enough."""
    guesses = [e for e in book.loading.values() if e.is_guess]
    guessed = sum(end_with_primary(mind, guess, book.device) for guess in guesses)
    return guesses if short <= guessed else []


def _is_nearly_done(mind: CoreState, entry: Ticket) -> bool:
    """A wake always is: it only copies memory."""
    if entry.wakes_count:
        return True
    left = entry.predicted - since(entry.since, mind.now)
    return entry.predicted > 0 and left <= share(
        Bytes(entry.predicted), mind.settings.finish_fraction
    )
