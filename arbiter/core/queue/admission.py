"""Asking for a ticket (SPEC A2, A3, A21, C7): who may, who may not, and until when."""

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


def on_requested(mind: CoreState, event: ev.Requested) -> None:
    """The ticket id is an idempotency key: asking again repeats the answer. Raises TicketClosed,
    to this asker alone, for a ticket that another holder has: to it, there is none."""
    if entry := mind.ledger.find(event.ticket):
        if entry.holder != event.holder:
            mind.stale_count += 1
            raise TicketClosed(event.ticket)
        _repeat_request(mind, entry, event)
        return
    error = mind.answers.get(event.ticket) or _why_not(mind, event)
    if error is not None:
        mind.refuse(event.ticket, error)
        return
    entry = _new_entry(mind, mind.holders[event.holder], event)
    load = wait_estimate.load_span(mind, entry)
    if event.deadline is not None and load > event.deadline:
        mind.refuse(event.ticket, wait_estimate.too_late(entry, 0.0, load))
        return
    entry.is_guess = prefetch.is_awaited(mind, (entry.capability, entry.model))
    mind.ledger.open(entry)
    if entry.pinned:
        mind.pin(entry, True)  # who lives in its process may have asked before it
    mind.note_active(entry.capability)
    _enqueue(mind, entry, event)
    if event.attempt > 1:
        retried(mind, (event.holder, event.model))


def _repeat_request(mind: CoreState, entry: Ticket, event: ev.Requested) -> None:
    entry.is_guess = False
    if entry.state in (State.LOADING, State.RESIDENT):
        mind.say(grant_of(entry))
    elif entry.state in (State.ASLEEP, State.DRAINING):
        quotas.take_over(mind, entry, event.client)
        if error := _why_no_wake(mind, entry):
            mind.say_no(entry.ticket, error)
        elif entry.ticket not in mind.line:
            _enqueue(mind, entry, event)
    elif entry.state is State.RECLAIMING:
        mind.refuse(entry.ticket, TicketClosed(entry.ticket))
    else:
        mind.stale_count += 1  # it waits already
    if entry.ticket in mind.line:
        _raise_priority(mind, entry, event)


def _raise_priority(mind: CoreState, entry: Ticket, event: ev.Requested) -> None:
    if event.priority < entry.priority:
        entry.priority = event.priority
        mind.line.hurry(entry.ticket, event.priority)
    until = None if event.deadline is None else after(mind.now, event.deadline)
    mind.line.wait_longer(entry.ticket, until)


def reject_removed_models(mind: CoreState) -> None:
    """The table has changed: who waits for a model that is no longer in it is refused."""
    for ticket in mind.line.tickets():
        entry = mind.ledger.find(ticket)
        assert entry is not None
        if entry.lease:
            continue
        try:
            mind.registry.find(entry.capability, entry.model)
        except (UnknownCapability, UnknownModel) as unknown:
            reject_queued(mind, entry, unknown)


def refuse_all(mind: CoreState) -> None:
    for ticket in mind.line.tickets():
        entry = mind.ledger.find(ticket)
        assert entry is not None
        reject_queued(mind, entry, ArbiterClosing())


def _why_no_wake(mind: CoreState, entry: Ticket) -> RequestError | None:
    if mind.closing_by is not None:
        return ArbiterClosing()
    if kept := kept_bytes(mind, entry.holder):
        return HolderQuarantined(entry.holder, kept)
    return floors.refusal(mind, entry.capability, entry.model)


def _why_not(mind: CoreState, event: ev.Requested) -> RequestError | None:
    if mind.closing_by is not None:
        return ArbiterClosing()
    if event.lease:
        short = pressure.refusal_under_pressure(mind, event.holder, leases.LEASE)
        unlawful = leases.why_not(mind, event, event.lease)
        return (
            short
            or unlawful
            or _over_quota(mind, event, event.lease.tenant)
            or _queue_full(mind, event)
        )
    try:
        mind.registry.find(event.capability, event.model)
    except (UnknownCapability, UnknownModel) as unknown:
        return unknown
    if error := None if event.lives_in else floors.refusal(mind, event.capability, event.model):
        return error
    if event.holder not in mind.holders:
        return StaleEpoch(NEVER_JOINED, mind.epoch)
    if kept := kept_bytes(mind, event.holder):
        return HolderQuarantined(event.holder, kept)
    role = mind.registry.specs[event.capability].role
    short = pressure.refusal_under_pressure(mind, event.holder, role)
    quota = _over_quota(mind, event, event.client.tenant)
    return short or quota or _cooling_down(mind, event) or _queue_full(mind, event)


def _over_quota(mind: CoreState, event: ev.Requested, tenant: str) -> RequestError | None:
    """A lease is not made room for among the tenant's own: they are seldom to be interrupted."""
    need = event.need.device_bytes
    if error := quotas.refusal(mind, event.holder, tenant, need, event.split):
        return error
    if event.lease and quotas.over_limit(mind, tenant, need):
        return quotas.too_much(mind, tenant, need)
    return None


def _cooling_down(mind: CoreState, event: ev.Requested) -> ModelCoolingDown | None:
    failure = mind.failures.get((event.capability, event.model))
    if failure is None or mind.now >= failure.until or event.attempt > 1:
        return None
    left = in_seconds(since(mind.now, failure.until))
    return ModelCoolingDown(event.model, failure.cause, left)


def _queue_full(mind: CoreState, event: ev.Requested) -> QueueFull | None:
    per_model, total = mind.settings.queue_per_model_count, mind.settings.queue_total_count
    label = model_label(event.capability, event.model)
    if mind.line.count(label) >= per_model:
        again = retry_after_s(mind, event.capability, event.model)
        return QueueFull(event.model, mind.line.count(label), per_model, again)
    if len(mind.line) >= total:
        again = retry_after_s(mind, event.capability, event.model)
        return QueueFull("the arbiter", len(mind.line), total, again)
    return None


def retry_after_s(mind: CoreState, capability: str, model: str) -> float:
    """About one load of it, at least a second: a hint, not a promise."""
    return max(1.0, in_seconds(mind.estimates.slowest_load(capability, model)))


def _new_entry(mind: CoreState, holder: Holder, event: ev.Requested) -> Ticket:
    if event.lease:
        return leases.new_entry(mind, holder, event, event.lease)
    spec = mind.registry.find(event.capability, event.model)
    role = mind.registry.specs[event.capability].role
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
        opened=mind.now,
        since=mind.now,
        role=role,
        role_rank=mind.policies.roles[role].rank,
        pinned=_is_pinned(mind, event, spec),
        keep_warm=spec.keep_warm,
        allow_oversize=spec.allow_oversize,
        dispatch_lock=spec.dispatch_lock,
        shared_scratch_bytes=spec.shared_scratch_bytes,
        gang=event.gang,
        split=event.split,
        client=event.client,
        lives_in=event.lives_in,
    )


def _is_pinned(mind: CoreState, event: ev.Requested, spec: types.ModelSpec) -> bool:
    """As its host, where it lives in the process of another."""
    if event.lives_in:
        host = mind.ledger.find(event.lives_in)
        return host is not None and host.pinned
    floor = mind.floors.get((event.capability, event.model))
    return spec.pinned or floor is types.Floor.DEVICE


def _enqueue(mind: CoreState, entry: Ticket, event: ev.Requested) -> None:
    deadline = None if event.deadline is None else after(mind.now, event.deadline)
    label = model_label(entry.capability, entry.model)
    entry.priority = types.Priority.BATCH if entry.is_guess else event.priority
    tenant, need = entry.client.tenant, entry.need.device_bytes
    mind.line.add(
        entry.ticket,
        label,
        entry.node,
        mind.now,
        deadline,
        entry.priority,
        holder=entry.holder,
        is_of_gang=bool(entry.gang),
        is_asleep=entry.state is not State.QUEUED,
        standing=quotas.quota_group(mind, tenant),
        turn_bytes=mind.accounts.turn_of(tenant, need, quotas.share_of(mind, tenant)),
    )
    mind.ledger.touch(entry)
    foresee_need(mind, entry)
    mind.fresh.append(entry.ticket)
    age(mind, entry)
    if deadline is not None:
        mind.watch(entry, deadline)
    priority = entry.priority.name.lower()
    waiting = len(mind.line)
    mind.tell("ticket_queued", entry, position=waiting, attempt=entry.attempt, priority=priority)


def reject_expired(mind: CoreState, entry: Ticket) -> None:
    """The time rule of the line: refuse what was not granted by its deadline."""
    waiting = mind.line.find(entry.ticket)
    if waiting is None or waiting.deadline is None:
        return
    if mind.now < waiting.deadline:
        mind.watch(entry, waiting.deadline)
        return
    waited = in_seconds(since(waiting.waiter.asked, mind.now))
    again = retry_after_s(mind, entry.capability, entry.model)
    reject_queued(mind, entry, DeadlineUnmet(entry.ticket, waited, again))
