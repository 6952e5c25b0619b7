"""What holders say of themselves: they join, beat, and are lost (SPEC A18, A19).

Heartbeats are level-triggered: each repeats every ticket, so whatever message was lost before it
is made good by it. What a holder no longer mentions, it has let go of.
"""

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import LogEvent, Reason, Tier
from arbiter.core.eviction.eviction import send_revoke, victim_declined
from arbiter.core.eviction.sleep import on_slept
from arbiter.core.records.ticket import Sizes, State, Ticket
from arbiter.core.residency import growth
from arbiter.core.residency.readings import claim_unclaimed
from arbiter.core.state import CoreState, Holder, model_label
from arbiter.core.tickets import leases, quotas
from arbiter.core.tickets.loads import forget_evicted_for, let_sleep, on_loaded
from arbiter.core.tickets.reclaim import charged, kill_and_notify, notify_holder, reclaim
from arbiter.errors import StaleEpoch, UnknownCapability, UnknownModel
from arbiter.units import HolderId, Instant, Span, TicketId, after, host_device, since

HOLDING = (State.LOADING, State.RESIDENT, State.DRAINING, State.ASLEEP)
STATE_OF = {
    types.Phase.LOADING: State.LOADING,
    types.Phase.RESIDENT: State.RESIDENT,
    types.Phase.DRAINING: State.DRAINING,
    types.Phase.UNLOADING: State.DRAINING,
    types.Phase.ASLEEP: State.ASLEEP,
}


def on_joined(mind: CoreState, event: ev.Joined) -> None:
    """Its tickets are put back on the books as they are, even where they do not fit: the memory
    is taken already."""
    if event.holder not in mind.holders:
        mind.tell("holder_joined", holder=event.holder, node=event.node, tickets=len(event.tickets))
    mind.ledger.changed.add(event.node)
    mind.holders[event.holder] = Holder(event.holder, event.node, event.capability, mind.now)
    mind.awaited.discard(event.holder)
    mind.note_active(event.capability)
    for held in sorted(event.tickets, key=lambda h: h.lives_in is not None):  # hosts first
        if mind.ledger.find(held.ticket) is None and held.ticket not in mind.answers:
            _rebuild(mind, event, held)
    _compare(mind, event.holder, event.tickets)
    _ask_again(mind, event)


def _ask_again(mind: CoreState, event: ev.Joined) -> None:
    """Orders may have been lost with its old connection; what it drains already it ignores."""
    serving = {held.ticket for held in event.tickets if held.phase is types.Phase.RESIDENT}
    for entry in mind.ledger.held_by(event.holder):
        if entry.state is not State.DRAINING or entry.ticket not in serving:
            continue
        if mind.now < entry.barrier_until:  # else its answer is awaited for a moment yet
            send_revoke(mind, entry)


def on_renewed(mind: CoreState, event: ev.Renewed) -> None:
    holder = mind.holders.get(event.holder)
    if holder is None:
        mind.stale_count += 1  # the shell has it rejoin
        return
    if since(holder.heard, mind.now) >= mind.settings.terms.silent:
        mind.ledger.changed.add(holder.node)
    holder.heard = mind.now
    if event.runs or event.runs_dropped_count:
        _tell_runs(mind, holder, event)
    for usage in event.usage:
        mind.accounts.used(usage, mind.now)
    if event.tickets:
        mind.note_active(holder.capability)
    _compare(mind, event.holder, event.tickets)


def _tell_runs(mind: CoreState, holder: Holder, event: ev.Renewed) -> None:
    about = {"holder": holder.holder, "capability": holder.capability}
    for run in event.runs:
        what = {**about, "model": run.model, "outcome": run.outcome, "request_id": run.request}
        mind.say(LogEvent("capability_run", {**what}, run.ticket, took=run.took))
    if event.runs_dropped_count:
        mind.say(LogEvent("runs_dropped", {**about, "dropped": event.runs_dropped_count}))


def on_lost(mind: CoreState, holder: HolderId) -> None:
    """Dead, or silent for so long that it counts as dead."""
    mind.awaited.discard(holder)
    if mind.holders.pop(holder, None):
        mind.tell("holder_lost", holder=holder)
    forget_evicted_for(mind, holder)
    for entry in mind.ledger.held_by(holder):
        if entry.state is State.QUEUED:
            mind.refuse(entry.ticket, StaleEpoch(mind.epoch, mind.epoch))
            mind.close(entry)
        elif entry.state is not State.RECLAIMING:
            reclaim(mind, entry, Reason.LOST)


def on_timer(mind: CoreState, holder: HolderId) -> None:
    """The time rule of heartbeats."""
    known = mind.holders.get(holder)
    if known is None:
        return
    lost_at = after(known.heard, leases.silence_limit(mind, known))
    if mind.now >= lost_at:
        on_lost(mind, holder)
    else:
        mind.alarms.set(("holder", holder), lost_at)


# -- comparing its account with ours --------------------------------------------------------------


def _compare(mind: CoreState, holder: HolderId, tickets: tuple[ev.HeldTicket, ...]) -> None:
    on_timer(mind, holder)
    mine = mind.ledger.holding(holder)
    for held in tickets:
        entry = mine.get(held.ticket)
        if entry is None or not _is_nothing_new(entry, held):
            _apply(mind, holder, held)
    listed = {held.ticket for held in tickets}
    for entry in [e for ticket, e in mine.items() if ticket not in listed]:
        if entry.state in HOLDING and _is_confirmed(mind, entry):
            reclaim(mind, entry, Reason.LOST)


def _is_nothing_new(entry: Ticket, held: ev.HeldTicket) -> bool:
    """Idle as before and not used since: most of most heartbeats."""
    return (
        held.inflight == 0 == entry.inflight
        and held.uses_count == entry.uses_count
        and held.priority is entry.priority
        and held.phase is types.Phase.RESIDENT
        and entry.state is State.RESIDENT
        and not entry.is_guess
        and (entry.shrinks_from is None or not _is_about_size(entry, held))
    )


def _is_about_size(entry: Ticket, held: ev.HeldTicket) -> bool:
    return entry.less_since is not None or growth.is_less(entry, held.devices)


def _is_confirmed(mind: CoreState, entry: Ticket) -> bool:
    """A heartbeat that was under way when the state changed says nothing about it."""
    return since(entry.since, mind.now) >= mind.settings.terms.unconfirmed


def _apply(mind: CoreState, holder: HolderId, held: ev.HeldTicket) -> None:
    entry = mind.ledger.find(held.ticket)
    if entry is None or entry.holder != holder or entry.state is State.RECLAIMING:
        _end_unnamed(mind, holder, held.ticket)
        return
    if entry.lease or entry.lives_in:
        return  # it holds or it does not; what else there is to know the agent says, or its host
    match entry.state:
        case State.LOADING:
            _apply_loading(mind, entry, held)
        case State.RESIDENT:
            _apply_resident(mind, entry, held)
        case State.DRAINING:
            _apply_draining(mind, entry, held)


def _end_unnamed(mind: CoreState, holder: HolderId, ticket: TicketId) -> None:
    """It holds on to what is not its own any more: it missed the news."""
    mind.stale_count += 1
    notify_holder(mind, ticket, holder, Reason.LOST)


def _apply_loading(mind: CoreState, entry: Ticket, held: ev.HeldTicket) -> None:
    entry.is_guess = entry.is_guess and held.inflight == 0  # who waits for it counts as in flight
    is_wake = entry.wakes_count > 0  # then an old heartbeat may still say resident
    if held.phase is types.Phase.RESIDENT and (not is_wake or _is_confirmed(mind, entry)):
        on_loaded(mind, entry, since(entry.since, mind.now))
        use(mind, entry, held)
    elif is_wake and held.phase is types.Phase.ASLEEP and _is_confirmed(mind, entry):
        let_sleep(mind, entry)


def _apply_resident(mind: CoreState, entry: Ticket, held: ev.HeldTicket) -> None:
    if held.phase is types.Phase.RESIDENT:
        use(mind, entry, held)
        growth.on_heartbeat(mind, entry, held.devices)
    elif held.phase is types.Phase.ASLEEP and _is_confirmed(mind, entry):
        kill_and_notify(
            mind, entry, Reason.FAILED
        )  # asleep unasked, so without host RAM on the books


def _apply_draining(mind: CoreState, entry: Ticket, held: ev.HeldTicket) -> None:
    entry.inflight = held.inflight
    barrier_is_over = mind.now >= after(entry.barrier_until, mind.settings.terms.answer)
    is_unloading = held.phase is types.Phase.UNLOADING or (
        held.phase is types.Phase.DRAINING and held.inflight == 0
    )
    if held.phase is types.Phase.ASLEEP:
        on_slept(mind, entry)
    elif is_unloading:
        if entry.unloading_since is None:
            entry.unloading_since = mind.now
    elif barrier_is_over:
        victim_declined(mind, entry, "barrier_dropped", held.inflight)
        use(mind, entry, held)


def use(mind: CoreState, entry: Ticket, held: ev.HeldTicket) -> None:
    """Its holder's last word on use: a hint for ranking and the start of keep-warm."""
    entry.is_guess = entry.is_guess and held.inflight == 0 and held.uses_count == 0
    priority = types.Priority.BATCH if entry.is_guess else held.priority
    if (entry.inflight == 0, entry.priority) != (held.inflight == 0, priority):
        mind.ledger.changed.add(entry.node)  # it may be a victim now
    entry.inflight, entry.priority = held.inflight, priority
    entry.last_used = Instant(max(entry.last_used, mind.now - held.idle))
    if held.uses_count > entry.uses_count:
        more, entry.uses_count = held.uses_count - entry.uses_count, held.uses_count
        mind.note_uses(entry, more)
        quotas.take_over(mind, entry, held.client)
    mind.ledger.touch(entry)
    if held.inflight == 0:
        mind.watch(entry, mind.now)


# -- after a restart ------------------------------------------------------------------------------


def _rebuild(mind: CoreState, event: ev.Joined, held: ev.HeldTicket) -> None:
    state = STATE_OF[held.phase]
    home: Sizes = {d.device: d.size_bytes for d in held.devices}
    entry = Ticket(
        held.ticket,
        event.holder,
        event.node,
        event.capability,
        held.model,
        settings_key=held.settings_key,
        need=held.need,
        need_is_explicit=False,
        attempt=1,
        opened=mind.now,
        since=mind.now,
        state=state,
        home=home,
        granted=_granted_in(event, held, state, home),
        inflight=held.inflight,
        last_used=Instant(mind.now - held.idle),
        priority=held.priority,
        uses_count=held.uses_count,
        client=held.client,
        lives_in=held.lives_in,
        load_by=after(mind.now, mind.settings.terms.load),
        resident_since=mind.now,
        shrinks_from=mind.now,
    )
    if state is State.DRAINING:
        entry.leaving, entry.to = Reason.SWAP, _tier_of(held)
        entry.barrier_until = after(mind.now, mind.settings.terms.barrier)
    if held.lease:
        leases.bind(mind, entry, held.lease)
    apply_configuration(mind, entry)
    if host := mind.host_of(entry):
        host.gang = (*(host.gang or (host.ticket,)), entry.ticket)
        entry.pinned = host.pinned
    mind.ledger.open(entry)
    if state is State.LOADING:
        mind.line.loading(entry.node, model_label(entry.capability, entry.model), 1)
    claim_unclaimed(mind, entry)
    mind.watch(entry, mind.now)
    mind.tell("ticket_rejoined", entry, size=charged(entry), phase=held.phase.value)


def _tier_of(held: ev.HeldTicket) -> Tier:
    """The revoke of an earlier epoch may have asked it to sleep, so a bed is kept for it."""
    return Tier.ASLEEP if held.need.host_bytes else Tier.GONE


def _granted_in(event: ev.Joined, held: ev.HeldTicket, state: State, home: Sizes) -> Sizes:
    bed_bytes = held.need.host_bytes
    bed: Sizes = {host_device(event.node): bed_bytes} if bed_bytes else {}
    if state is State.ASLEEP:
        return bed
    return {**home, **bed} if state is State.DRAINING else home


def apply_configuration(mind: CoreState, entry: Ticket) -> None:
    """What the configuration says of its model now. One that was removed goes once idle."""
    if entry.lease:
        return
    try:
        spec = mind.registry.find(entry.capability, entry.model)
    except (UnknownCapability, UnknownModel):
        if mind.registry.is_set:
            mind.pin(entry, False)
            entry.keep_warm = Span(0)
        return
    role = mind.registry.specs[entry.capability].role
    floor = mind.floors.get((entry.capability, entry.model))
    entry.role, entry.role_rank = role, mind.policies.roles[role].rank
    mind.ledger.touch(entry)
    entry.allow_oversize, entry.keep_warm = spec.allow_oversize, spec.keep_warm
    if entry.lives_in is None:  # else it is pinned as its host is
        mind.pin(entry, spec.pinned or floor is types.Floor.DEVICE)
    mind.ledger.share_scratch(entry, spec.dispatch_lock, spec.shared_scratch_bytes)
