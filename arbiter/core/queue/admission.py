"""Decides whether a request may join the queue (A2, A3, A21, C7), and until when it may wait."""

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import EventKind
from arbiter.core.eviction import pressure
from arbiter.core.queue import copy_grants, freeing, hours, wait_estimate
from arbiter.core.queue.grants import age, grant_of
from arbiter.core.queue.placement_memo import foresee_need
from arbiter.core.records.request_queue import QueueEntry
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.residency import floors, prefetch
from arbiter.core.state import CoreState, Holder, reject_queued
from arbiter.core.tickets import leases, quotas
from arbiter.core.tickets.failed_swaps import note_retried
from arbiter.core.tickets.loads import note_gave_up
from arbiter.core.tickets.reclaim import quarantined_bytes
from arbiter.core.types import ModelName
from arbiter.errors import (
    NEVER_JOINED,
    ArbiterClosing,
    DeadlineUnmet,
    HolderQuarantined,
    ModelCoolingDown,
    QueueFull,
    RequestCancelled,
    RequestError,
    StaleEpoch,
    TicketClosed,
    TicketNotQueued,
    UnknownCapability,
    UnknownModel,
    UnknownTicket,
)
from arbiter.units import TicketId, after, in_seconds, since

# -- asking ---------------------------------------------------------------------------------------


def on_requested(state: CoreState, event: ev.Requested) -> None:
    """Answers a request, or queues its ticket. The ticket id is an idempotency key: asking again
    repeats the answer. Raises TicketClosed, to this asker alone, for a ticket that another holder
    has."""
    if ticket := state.ledger.find(event.ticket):
        if ticket.holder != event.holder:
            state.stale_count += 1
            raise TicketClosed(event.ticket)
        _repeat_request(state, ticket, event)
        return
    event = freeing.as_attainable(state, event)
    error = state.answers.get(event.ticket) or _refusal(state, event)
    if error is not None:
        if isinstance(error, StaleEpoch) and error.sent == NEVER_JOINED:
            state.answer_error(event.ticket, error)  # it joins, and asks again under this ticket
        else:
            _refuse(state, event, error)
        return
    ticket = _new_ticket(state, state.holders[event.holder], event)
    if event.lease and event.lease.on_host:
        copy_grants.grant(state, ticket)
        return
    load = wait_estimate.sure_load_span(state, ticket)
    if event.deadline is not None and load > event.deadline:
        _refuse(state, event, wait_estimate.too_late(ticket, 0.0, load))
        return
    ticket.note_prefetch(prefetch.takes_free_room(state, ticket.model_name))
    state.ledger.open(ticket)
    state.note_active(ticket.capability)
    _enqueue(state, ticket, event)
    if event.attempt > 1:
        note_retried(state, (event.holder, event.model))


def _refuse(state: CoreState, event: ev.Requested, error: RequestError) -> None:
    """Refuses a request before its ticket is queued. The other tickets of its gang would wait for
    it in vain, so their nodes are looked at."""
    state.answer_error_finally(event.ticket, error)
    state.note_refused(event.holder, event.model_name, error.retry_after_s)
    if event.gang:
        state.mark_dirty(*state.queue.nodes)


def _repeat_request(state: CoreState, ticket: Ticket, event: ev.Requested) -> None:
    """Answers a request under a ticket that is on the books. A ticket that has its grant gets it
    again, an asleep ticket joins the queue to be woken, a queued ticket may become more urgent."""
    ticket.note_prefetch(ticket.is_prefetch and ticket.model_name in state.registry.optional)
    if ticket.state in (State.LOADING, State.RESIDENT):
        state.decide(grant_of(ticket))
    elif ticket.state in (State.ASLEEP, State.DRAINING):
        quotas.take_over(state, ticket, event.client)
        if error := _wake_refusal(state, ticket, event):
            state.answer_error(ticket.id, error)
        elif ticket.id not in state.queue:
            _enqueue(state, ticket, event)
    elif ticket.state is State.RECLAIMING:
        state.answer_error_finally(ticket.id, TicketClosed(ticket.id))
    else:
        state.stale_count += 1  # the ticket is in the queue already
    if ticket.id in state.queue:
        _raise_priority(state, ticket, event)


def _raise_priority(state: CoreState, ticket: Ticket, event: ev.Requested) -> None:
    """Gives a queued ticket the more urgent priority and the later deadline of a request that joins
    it."""
    if event.priority < ticket.priority:
        ticket.set_priority(event.priority)
        state.queue.raise_priority(ticket.id, event.priority)
    until = None if event.deadline is None else after(state.now, event.deadline)
    state.queue.extend_deadline(ticket.id, until)
    queued = state.queue.find(ticket.id)
    assert queued is not None
    hours.hold(state, ticket, queued)


def on_raised(state: CoreState, event: ev.PriorityRaised) -> None:
    """Lets a queued ticket ask with a more urgent priority; a less urgent one changes nothing.
    Raises UnknownTicket, TicketNotQueued."""
    ticket, queued = _find_queued(state, event.ticket)
    if event.priority >= ticket.priority:
        return
    ticket.set_priority(event.priority)
    state.queue.raise_priority(ticket.id, event.priority)
    hours.hold(state, ticket, queued)
    state.mark_dirty(ticket.node)
    state.log(EventKind.TICKET_RAISED, ticket, priority=event.priority.name.lower())


def on_cancel_asked(state: CoreState, event: ev.CancelAsked) -> None:
    """Refuses a queued ticket; all requests that wait under it are answered. Raises UnknownTicket,
    TicketNotQueued."""
    ticket, _ = _find_queued(state, event.ticket)
    note_gave_up(state, ticket)
    reject_queued(state, ticket, RequestCancelled(event.ticket))


def _find_queued(state: CoreState, ticket_id: TicketId) -> tuple[Ticket, QueueEntry]:
    """Returns a queued ticket and its entry. Raises UnknownTicket, TicketNotQueued."""
    ticket, queued = state.ledger.find(ticket_id), state.queue.find(ticket_id)
    if ticket is None:
        raise UnknownTicket(ticket_id)
    if queued is None:
        raise TicketNotQueued(ticket_id, ticket.state.value)
    return ticket, queued


def reject_removed_models(state: CoreState) -> None:
    """Refuses queued tickets for models that are no longer in the table."""
    for ticket_id in state.queue.tickets():
        ticket = state.ledger.find(ticket_id)
        assert ticket is not None
        if ticket.lease:
            continue
        try:
            state.registry.find(ticket.model_name)
        except (UnknownCapability, UnknownModel) as unknown:
            reject_queued(state, ticket, unknown)


def refuse_all(state: CoreState) -> None:
    """Refuses every queued ticket, because the arbiter closes."""
    for ticket_id in state.queue.tickets():
        ticket = state.ledger.find(ticket_id)
        assert ticket is not None
        reject_queued(state, ticket, ArbiterClosing())


def _wake_refusal(state: CoreState, ticket: Ticket, event: ev.Requested) -> RequestError | None:
    """Returns the error for a request to wake an asleep ticket; None when it may join the queue."""
    if state.closing_by is not None:
        return ArbiterClosing()
    if held_bytes := quarantined_bytes(state, ticket.holder):
        return HolderQuarantined(ticket.holder, held_bytes)
    closed = floors.refusal(state, ticket.model_name, event.deadline)
    return closed or quotas.cooling_down(state, event.client.tenant)


def _refusal(state: CoreState, event: ev.Requested) -> RequestError | None:
    """Returns the error for a request that may not join the queue; None when it may."""
    if state.closing_by is not None:
        return ArbiterClosing()
    if event.lease:
        return _lease_refusal(state, event, event.lease)
    name = event.model_name
    try:
        state.registry.find(name)
    except (UnknownCapability, UnknownModel) as unknown:
        return unknown
    if error := floors.refusal(state, name, event.deadline):
        return error
    if event.holder not in state.holders:
        return StaleEpoch(NEVER_JOINED, state.epoch)
    if held_bytes := quarantined_bytes(state, event.holder):
        return HolderQuarantined(event.holder, held_bytes)
    role = state.registry.specs[event.capability].role
    pressed = pressure.refusal(state, event.holder, role)
    # Asked in any case, because it notes whether the tenant cools down
    quota = _over_quota(state, event, event.client.tenant)
    return pressed or quota or _cooling_down(state, event, name) or _queue_full(state, name)


def _lease_refusal(
    state: CoreState, event: ev.Requested, terms: types.LeaseConditions
) -> RequestError | None:
    """Returns the error for a lease that may not join the queue; None when it may."""
    pressed = pressure.refusal(state, event.holder, types.LEASE)
    unlawful = leases.refusal(state, event, terms)
    quota = None if terms.frees else _over_quota(state, event, terms.tenant)
    return pressed or unlawful or quota or _queue_full(state, event.model_name)


def _over_quota(state: CoreState, event: ev.Requested, tenant: str) -> RequestError | None:
    """Returns the error for a request beyond its tenant's quota. A lease makes no room among the
    tenant's own tickets, which are seldom to be interrupted."""
    need = event.need.device_bytes
    if error := quotas.refusal(state, event.holder, tenant, need, event.split):
        return error
    if event.lease and quotas.over_limit(state, tenant, need):
        return quotas.over_limit_error(state, tenant, need)
    return None


def _cooling_down(
    state: CoreState, event: ev.Requested, name: ModelName
) -> ModelCoolingDown | None:
    """Returns the error for a model whose last load failed and that still cools down; None for the
    second attempt of that load, which is made at once."""
    failure = state.failures.get(name)
    if failure is None or state.now >= failure.until or event.attempt > 1:
        return None
    remaining_s = in_seconds(since(state.now, failure.until))
    return ModelCoolingDown(event.model, failure.cause, remaining_s)


def _queue_full(state: CoreState, name: ModelName) -> QueueFull | None:
    """Returns the error for a request that finds the queue full, for its model or altogether."""
    per_model = state.settings.queue_per_model_count
    total = state.settings.queue_total_count
    if (count := state.queue.count(name)) >= per_model:
        return QueueFull(name.model, count, per_model, retry_after_s(state, name))
    if (count := len(state.queue)) >= total:
        return QueueFull("the arbiter", count, total, retry_after_s(state, name))
    return None


def retry_after_s(state: CoreState, name: ModelName) -> float:
    """Returns in how many seconds to ask again: about one load of the model, at least 1; a hint,
    not a promise."""
    return max(1.0, in_seconds(state.estimates.slowest_load(name)))


def _need_on(state: CoreState, holder: Holder, event: ev.Requested) -> types.Need:
    """Returns the need of a request. Where no person configured it and the node has a GPU, the
    context that an engine holds on a GPU is part of it."""
    node = state.nodes.get(holder.node)
    kinds = {spec.kind for spec in node.devices.values()} if node else set()
    is_estimated = not event.need_is_explicit
    on_gpu = is_estimated and types.DeviceKind.GPU in kinds
    return event.need.on_gpu() if on_gpu else event.need


def _new_ticket(state: CoreState, holder: Holder, event: ev.Requested) -> Ticket:
    """Makes the ticket of a request, which is on no book yet."""
    if event.lease:
        return leases.new_ticket(state, holder, event, event.lease)
    name = event.model_name
    spec = state.registry.find(name)
    role = state.registry.specs[event.capability].role
    return Ticket(
        event.ticket,
        event.holder,
        holder.node,
        event.capability,
        event.model,
        event.settings_key,
        _need_on(state, holder, event),
        event.need_is_explicit,
        event.attempt,
        opened=state.now,
        since=state.now,
        role=role,
        role_rank=state.policies.roles[role].rank,
        pinned=state.is_pinned(name),
        keep_warm=spec.keep_warm,
        allow_oversize=spec.allow_oversize,
        dispatch_lock=spec.dispatch_lock,
        shared_scratch_bytes=spec.shared_scratch_bytes,
        gang=event.gang,
        split=event.split,
        client=event.client,
    )


def _enqueue(state: CoreState, ticket: Ticket, event: ev.Requested) -> None:
    """Puts a new or an asleep ticket into the queue of its node. It takes a turn of the tenant that
    asks, also where an asleep ticket stays on the account of another, whose limits then hold."""
    deadline = None if event.deadline is None else after(state.now, event.deadline)
    ticket.set_priority(types.Priority.BATCH if ticket.is_prefetch else event.priority)
    tenant = ticket.client.tenant if ticket.lease else event.client.tenant
    work_bytes = ticket.need.device_bytes / quotas.share_of(state, tenant)
    if ticket.is_prefetch:  # no client asked for it, so it costs no tenant a turn
        work_bytes = 0.0
    queued = state.queue.add(
        ticket.id,
        ticket.model_name,
        ticket.node,
        state.now,
        deadline,
        ticket.priority,
        holder=ticket.holder,
        is_of_gang=bool(ticket.gang),
        is_first=ticket.frees,
        is_asleep=ticket.state is not State.QUEUED,
        quota_group=quotas.quota_group(state, ticket.client.tenant),
        virtual_start_bytes=state.accounts.virtual_start_of(tenant, work_bytes),
        tenant=tenant,
        work_bytes=work_bytes,
    )
    state.ledger.touch(ticket)
    hours.hold(state, ticket, queued)
    foresee_need(state, ticket)
    state.queued_this_event.append(ticket.id)
    if not (ticket.is_prefetch or ticket.lease):
        state.usage.note_wanted(ticket.model_name, state.now)
    age(state, ticket)
    if deadline is not None:
        state.set_timer(ticket, deadline)
    priority = ticket.priority.name.lower()
    state.log(
        EventKind.TICKET_QUEUED,
        ticket,
        position=len(state.queue),
        attempt=ticket.attempt,
        priority=priority,
    )


def reject_expired(state: CoreState, ticket: Ticket) -> None:
    """Runs the time rule of the queue: refuses what was not granted by its deadline."""
    queued = state.queue.find(ticket.id)
    if queued is None or queued.deadline is None:
        return
    if state.now < queued.deadline:
        state.set_timer(ticket, queued.deadline)
        return
    note_gave_up(state, ticket)
    waited = in_seconds(since(queued.request.asked_at, state.now))
    again = retry_after_s(state, ticket.model_name)
    reject_queued(state, ticket, DeadlineUnmet(ticket.id, waited, again))
