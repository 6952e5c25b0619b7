"""Asking for a ticket (A2, A3, A21, C7): who may, who may not, and until when."""

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.eviction import pressure
from arbiter.core.queue import wait_estimate
from arbiter.core.queue.grants import age, foresee_need, grant_of
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.residency import floors, prefetch
from arbiter.core.state import CoreState, Holder, model_label, reject_queued
from arbiter.core.tickets import leases, quotas
from arbiter.core.tickets.loads import retried
from arbiter.core.tickets.reclaim import kept_bytes
from arbiter.errors import (
    ArbiterClosing,
    DeadlineUnmet,
    HolderQuarantined,
    ModelCoolingDown,
    QueueFull,
    RequestError,
    StaleEpoch,
    TicketClosed,
    UnknownCapability,
    UnknownModel,
)
from arbiter.units import Epoch, after, in_seconds, since

NEVER_JOINED = Epoch(0)


# -- asking ---------------------------------------------------------------------------------------


def on_requested(state: CoreState, event: ev.Requested) -> None:
    """The ticket id is an idempotency key: asking again repeats the answer. Raises TicketClosed,
    to this asker alone, for a ticket that another holder has: to it, there is none."""
    if entry := state.ledger.find(event.ticket):
        if entry.holder != event.holder:
            state.stale_count += 1
            raise TicketClosed(event.ticket)
        _repeat_request(state, entry, event)
        return
    error = state.answers.get(event.ticket) or _why_not(state, event)
    if error is not None:
        state.answer_error_finally(event.ticket, error)
        return
    entry = _new_entry(state, state.holders[event.holder], event)
    load = wait_estimate.load_span(state, entry)
    if event.deadline is not None and load > event.deadline:
        state.answer_error_finally(event.ticket, wait_estimate.too_late(entry, 0.0, load))
        return
    entry.is_prefetch = prefetch.is_awaited(state, (entry.capability, entry.model))
    state.ledger.open(entry)
    state.note_active(entry.capability)
    _enqueue(state, entry, event)
    if event.attempt > 1:
        retried(state, (event.holder, event.model))


def _repeat_request(state: CoreState, entry: Ticket, event: ev.Requested) -> None:
    entry.is_prefetch = False
    if entry.state in (State.LOADING, State.RESIDENT):
        state.decide(grant_of(entry))
    elif entry.state in (State.ASLEEP, State.DRAINING):
        quotas.take_over(state, entry, event.client)
        if error := _why_no_wake(state, entry):
            state.answer_error(entry.ticket, error)
        elif entry.ticket not in state.queue:
            _enqueue(state, entry, event)
    elif entry.state is State.RECLAIMING:
        state.answer_error_finally(entry.ticket, TicketClosed(entry.ticket))
    else:
        state.stale_count += 1  # it waits already
    if entry.ticket in state.queue:
        _raise_priority(state, entry, event)


def _raise_priority(state: CoreState, entry: Ticket, event: ev.Requested) -> None:
    if event.priority < entry.priority:
        entry.priority = event.priority
        state.queue.raise_priority(entry.ticket, event.priority)
    until = None if event.deadline is None else after(state.now, event.deadline)
    state.queue.extend_deadline(entry.ticket, until)


def reject_removed_models(state: CoreState) -> None:
    """The table has changed: who waits for a model that is no longer in it is refused."""
    for ticket in state.queue.tickets():
        entry = state.ledger.find(ticket)
        assert entry is not None
        if entry.lease:
            continue
        try:
            state.registry.find(entry.capability, entry.model)
        except (UnknownCapability, UnknownModel) as unknown:
            reject_queued(state, entry, unknown)


def refuse_all(state: CoreState) -> None:
    for ticket in state.queue.tickets():
        entry = state.ledger.find(ticket)
        assert entry is not None
        reject_queued(state, entry, ArbiterClosing())


def _why_no_wake(state: CoreState, entry: Ticket) -> RequestError | None:
    if state.closing_by is not None:
        return ArbiterClosing()
    if kept := kept_bytes(state, entry.holder):
        return HolderQuarantined(entry.holder, kept)
    return floors.refusal(state, entry.capability, entry.model)


def _why_not(state: CoreState, event: ev.Requested) -> RequestError | None:
    if state.closing_by is not None:
        return ArbiterClosing()
    if event.lease:
        short = pressure.refusal_under_pressure(state, event.holder, leases.LEASE)
        unlawful = leases.why_not(state, event, event.lease)
        return (
            short
            or unlawful
            or _over_quota(state, event, event.lease.tenant)
            or _queue_full(state, event)
        )
    try:
        state.registry.find(event.capability, event.model)
    except (UnknownCapability, UnknownModel) as unknown:
        return unknown
    if error := floors.refusal(state, event.capability, event.model):
        return error
    if event.holder not in state.holders:
        return StaleEpoch(NEVER_JOINED, state.epoch)
    if kept := kept_bytes(state, event.holder):
        return HolderQuarantined(event.holder, kept)
    role = state.registry.specs[event.capability].role
    short = pressure.refusal_under_pressure(state, event.holder, role)
    quota = _over_quota(state, event, event.client.tenant)
    return short or quota or _cooling_down(state, event) or _queue_full(state, event)


def _over_quota(state: CoreState, event: ev.Requested, tenant: str) -> RequestError | None:
    """A lease is not made room for among the tenant's own: they are seldom to be interrupted."""
    need = event.need.device_bytes
    if error := quotas.refusal(state, event.holder, tenant, need, event.split):
        return error
    if event.lease and quotas.over_limit(state, tenant, need):
        return quotas.too_much(state, tenant, need)
    return None


def _cooling_down(state: CoreState, event: ev.Requested) -> ModelCoolingDown | None:
    failure = state.failures.get((event.capability, event.model))
    if failure is None or state.now >= failure.until or event.attempt > 1:
        return None
    left = in_seconds(since(state.now, failure.until))
    return ModelCoolingDown(event.model, failure.cause, left)


def _queue_full(state: CoreState, event: ev.Requested) -> QueueFull | None:
    per_model, total = state.settings.queue_per_model_count, state.settings.queue_total_count
    label = model_label(event.capability, event.model)
    if state.queue.count(label) >= per_model:
        again = retry_after_s(state, event.capability, event.model)
        return QueueFull(event.model, state.queue.count(label), per_model, again)
    if len(state.queue) >= total:
        again = retry_after_s(state, event.capability, event.model)
        return QueueFull("the arbiter", len(state.queue), total, again)
    return None


def retry_after_s(state: CoreState, capability: str, model: str) -> float:
    """About one load of it, at least a second: a hint, not a promise."""
    return max(1.0, in_seconds(state.estimates.slowest_load(capability, model)))


def _new_entry(state: CoreState, holder: Holder, event: ev.Requested) -> Ticket:
    if event.lease:
        return leases.new_entry(state, holder, event, event.lease)
    spec = state.registry.find(event.capability, event.model)
    role = state.registry.specs[event.capability].role
    return Ticket(
        event.ticket,
        event.holder,
        holder.node,
        event.capability,
        event.model,
        event.settings_key,
        event.need,
        event.need_is_explicit,
        event.attempt,
        opened=state.now,
        since=state.now,
        role=role,
        role_rank=state.policies.roles[role].rank,
        pinned=_is_pinned(state, event, spec),
        keep_warm=spec.keep_warm,
        allow_oversize=spec.allow_oversize,
        dispatch_lock=spec.dispatch_lock,
        shared_scratch_bytes=spec.shared_scratch_bytes,
        gang=event.gang,
        split=event.split,
        client=event.client,
    )


def _is_pinned(state: CoreState, event: ev.Requested, spec: types.ModelSpec) -> bool:
    floor = state.floors.get((event.capability, event.model))
    return spec.pinned or floor is types.Floor.DEVICE


def _enqueue(state: CoreState, entry: Ticket, event: ev.Requested) -> None:
    deadline = None if event.deadline is None else after(state.now, event.deadline)
    label = model_label(entry.capability, entry.model)
    entry.priority = types.Priority.BATCH if entry.is_prefetch else event.priority
    tenant, need = entry.client.tenant, entry.need.device_bytes
    state.queue.add(
        entry.ticket,
        label,
        entry.node,
        state.now,
        deadline,
        entry.priority,
        holder=entry.holder,
        is_of_gang=bool(entry.gang),
        is_asleep=entry.state is not State.QUEUED,
        quota_group=quotas.quota_group(state, tenant),
        virtual_start_bytes=state.accounts.turn_of(tenant, need, quotas.share_of(state, tenant)),
    )
    state.ledger.touch(entry)
    foresee_need(state, entry)
    state.fresh.append(entry.ticket)
    age(state, entry)
    if deadline is not None:
        state.set_timer(entry, deadline)
    priority = entry.priority.name.lower()
    waiting = len(state.queue)
    state.log("ticket_queued", entry, position=waiting, attempt=entry.attempt, priority=priority)


def reject_expired(state: CoreState, entry: Ticket) -> None:
    """The time rule of the line: refuse what was not granted by its deadline."""
    waiting = state.queue.find(entry.ticket)
    if waiting is None or waiting.deadline is None:
        return
    if state.now < waiting.deadline:
        state.set_timer(entry, waiting.deadline)
        return
    waited = in_seconds(since(waiting.request.asked, state.now))
    again = retry_after_s(state, entry.capability, entry.model)
    reject_queued(state, entry, DeadlineUnmet(entry.ticket, waited, again))
