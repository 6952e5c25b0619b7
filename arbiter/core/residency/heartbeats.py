"""Handles what holders say of themselves: they join, renew, and are lost (A18, A19).

Heartbeats are level-triggered: each repeats every ticket, so it makes good any message that was
lost before it. A ticket that a heartbeat does not list has been dropped by its holder.
"""

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import EventKind, LogEvent, Reason, Tier
from arbiter.core.eviction.eviction import send_revoke, victim_declined
from arbiter.core.eviction.sleep import on_slept
from arbiter.core.histogram import SECONDS_BOUNDS, Histogram
from arbiter.core.records.ticket import Grown, Load, Sizes, State, Ticket
from arbiter.core.residency import copy_readings, floors, growth, idle, loading_share
from arbiter.core.residency.readings import LEARNED_AFTER, charge_unclaimed
from arbiter.core.state import CoreState, Holder
from arbiter.core.tickets import leases, lessees, quotas
from arbiter.core.tickets.failed_swaps import forget_evicted_for
from arbiter.core.tickets.loads import let_sleep, on_loaded
from arbiter.core.tickets.pins import cap_pins
from arbiter.core.tickets.reclaim import (
    charged,
    kill_and_notify,
    mark_reclaimed,
    notify_holder,
    reclaim,
)
from arbiter.errors import StaleEpoch, UnknownCapability, UnknownModel
from arbiter.units import (
    Bytes,
    HolderId,
    Instant,
    NodeId,
    Span,
    TicketId,
    after,
    host_device,
    seconds,
    since,
)

LENT_MEANWHILE = "its bytes were lent to others before its holder rejoined; ask again"
ANSWERED = "answered"  # the outcome of a request whose client took the whole answer

# A holder that reports a model as idle for less than since its last use keeps it warm. A difference
# of half a heartbeat is none, because two heartbeats are not on their way for equally long.
KEPT_WARM = seconds(0.5)

HOLDING = (State.LOADING, State.RESIDENT, State.DRAINING, State.ASLEEP)
STATE_OF = {
    types.Phase.LOADING: State.LOADING,
    types.Phase.RESIDENT: State.RESIDENT,
    types.Phase.DRAINING: State.DRAINING,
    types.Phase.UNLOADING: State.DRAINING,
    types.Phase.ASLEEP: State.ASLEEP,
}


def on_joined(state: CoreState, event: ev.Joined) -> None:
    """Puts a holder's tickets back on the books as they are, even where they do not fit: the memory
    is taken already."""
    if event.holder not in state.holders:
        state.log(
            EventKind.HOLDER_JOINED,
            holder=event.holder,
            node=event.node,
            tickets=len(event.tickets),
        )
    state.mark_dirty(event.node)
    state.holders[event.holder] = Holder(
        event.holder, event.node, event.capability, state.now, is_driver=event.is_driver
    )
    state.awaited.discard(event.holder)
    state.note_active(event.capability)
    for held in event.tickets:
        if state.ledger.find(held.ticket) is None and held.ticket not in state.answers:
            _rebuild(state, event, held)
    _apply_account(state, event.holder, event.tickets)
    _repeat_revokes(state, event)


def _repeat_revokes(state: CoreState, event: ev.Joined) -> None:
    """Repeats revokes that may have been lost with the old connection; a holder ignores what it
    drains already."""
    serving = {held.ticket for held in event.tickets if held.phase is types.Phase.RESIDENT}
    for ticket in state.ledger.held_by(event.holder):
        if ticket.state is not State.DRAINING or ticket.id not in serving:
            continue
        revocation = ticket.revocation
        if (
            revocation and state.now < revocation.barrier_until
        ):  # else its answer is awaited a moment yet
            send_revoke(state, ticket)


def on_renewed(state: CoreState, event: ev.Renewed) -> None:
    """Takes a heartbeat: what the holder has loaded, uses, and has finished."""
    holder = state.holders.get(event.holder)
    if holder is None:
        state.stale_count += 1  # the shell has it rejoin
        return
    if since(holder.heard_at, state.now) >= state.settings.timeouts.silent:
        state.mark_dirty(holder.node)
    holder.heard_at = state.now
    if event.runs or event.runs_dropped_count:
        _log_runs(state, holder, event)
    for usage in event.usage:
        state.accounts.used(usage, state.now)
    for times in event.request_times:
        key = holder.capability, times.outcome
        state.request_times.setdefault(key, Histogram(SECONDS_BOUNDS)).add(times.took)
    if event.tickets:
        state.note_active(holder.capability)
    _apply_account(state, event.holder, event.tickets)


def _log_runs(state: CoreState, holder: Holder, event: ev.Renewed) -> None:
    """Logs the requests that a heartbeat tells of, and learns how long answered ones ran."""
    about = {"holder": holder.holder, "capability": holder.capability}
    for run in event.runs:
        what = {**about, "model": run.model, "outcome": run.outcome, "request_id": run.request}
        state.decide(LogEvent(EventKind.CAPABILITY_RUN, {**what}, run.ticket, took=run.took))
        ticket = state.ledger.find(run.ticket) if run.ticket and run.ran is not None else None
        if ticket is not None and run.ran is not None and run.outcome == ANSWERED:
            state.estimates.ran(ticket.model_key, run.ran)
    if event.runs_dropped_count:
        state.decide(
            LogEvent(EventKind.RUNS_DROPPED, {**about, "dropped": event.runs_dropped_count})
        )


def on_lost(state: CoreState, holder: HolderId) -> None:
    """Ends the tickets of a holder that is dead, or silent for so long that it counts as dead. On a
    node that is not known they are off the books at once, because the node may be lost, and then no
    agent says that their bytes are back. Where it introduces itself after all, nothing is granted
    there before a reading, in which their engines are unclaimed."""
    state.awaited.discard(holder)
    if state.holders.pop(holder, None):
        state.log(EventKind.HOLDER_LOST, holder=holder)
    forget_evicted_for(state, holder)
    for ticket_id in [t for t, load in state.broken_loads.items() if load.holder == holder]:
        del state.broken_loads[ticket_id]  # no account of its cause will come
    for ticket in state.ledger.held_by(holder):
        if ticket.state is State.QUEUED:
            state.answer_error_finally(ticket.id, StaleEpoch(state.epoch, state.epoch))
            state.close(ticket)
        elif ticket.state is not State.RECLAIMING:
            reclaim(state, ticket, Reason.LOST)
        if ticket.state is State.RECLAIMING and ticket.node not in state.nodes:
            mark_reclaimed(state, ticket)
    floors.on_holder_lost(state, holder)


def on_timer(state: CoreState, holder: HolderId) -> None:
    """Runs the time rule of heartbeats: a silent holder is lost."""
    known = state.holders.get(holder)
    if known is None:
        return
    lost_at = after(known.heard_at, _silence_limit(state, known))
    if state.now >= lost_at:
        on_lost(state, holder)
    else:
        state.timers.set(("holder", holder), lost_at)


def _silence_limit(state: CoreState, holder: Holder) -> Span:
    """Returns after how much silence a holder counts as dead. Ray tells of the death of a replica
    within 2 s, so a replica that is only slow keeps its tickets for long. Ray tells of a driver's
    end too, but not of a driver that hangs; of an outside process's end only its node agent may
    know."""
    timeouts = state.settings.timeouts
    if holder.capability == types.LEASE:
        return timeouts.lease_lapse
    return timeouts.silent if holder.is_driver else timeouts.lost


# -- comparing its account with ours --------------------------------------------------------------


def _apply_account(state: CoreState, holder: HolderId, tickets: tuple[ev.HeldTicket, ...]) -> None:
    """Brings the tickets of a holder up to date with all that it says it holds. A ticket that the
    holder does not list any more is lost."""
    on_timer(state, holder)
    mine = state.ledger.holding(holder)
    for held in tickets:
        ticket = mine.get(held.ticket)
        if ticket is None or not _is_nothing_new(ticket, held, state.now):
            _apply(state, holder, held)
    listed = {held.ticket for held in tickets}
    for ticket in [t for ticket_id, t in mine.items() if ticket_id not in listed]:
        if ticket.state in HOLDING and _is_confirmed(state, ticket):
            reclaim(state, ticket, Reason.LOST)


def _is_nothing_new(ticket: Ticket, held: ev.HeldTicket, now: Instant) -> bool:
    """Says whether a heartbeat says nothing new of a ticket: it is idle as before and was not used
    since, as most tickets are in most heartbeats."""
    return (
        held.inflight == 0 == ticket.inflight
        and since(ticket.last_used, now) - held.idle < KEPT_WARM
        and held.uses_count == ticket.uses_count
        and held.priority is ticket.priority
        and held.phase is types.Phase.RESIDENT
        and ticket.state is State.RESIDENT
        and not ticket.is_prefetch
        and (ticket.grown is None or not _is_about_size(ticket, held))
    )


def _is_about_size(ticket: Ticket, held: ev.HeldTicket) -> bool:
    """Says whether a heartbeat tells of a size below the grant, or ends such a difference."""
    return ticket.less_since is not None or growth.is_less(ticket, held.devices)


def _is_confirmed(state: CoreState, ticket: Ticket) -> bool:
    """Says whether a heartbeat that arrives now was sent after the ticket came into its state. A
    heartbeat that was under way then says nothing about that state."""
    return since(ticket.since, state.now) >= state.settings.timeouts.unconfirmed


def _apply(state: CoreState, holder: HolderId, held: ev.HeldTicket) -> None:
    """Brings one ticket up to date with what its holder says of it."""
    ticket = state.ledger.find(held.ticket)
    if ticket is None or ticket.holder != holder or ticket.state is State.RECLAIMING:
        _end_unnamed(state, holder, held.ticket)
        return
    if ticket.lease:  # it has no phases: it is held or not, and the agent knows its bytes
        copy_readings.note_use(state, ticket, held)
        return
    match ticket.state:
        case State.LOADING:
            _apply_loading(state, ticket, held)
        case State.RESIDENT:
            _apply_resident(state, ticket, held)
        case State.DRAINING:
            _apply_draining(state, ticket, held)


def _end_unnamed(state: CoreState, holder: HolderId, ticket_id: TicketId) -> None:
    """Tells a holder that a ticket it lists has ended or is not its own: the message that said so
    was lost."""
    state.stale_count += 1
    notify_holder(state, ticket_id, holder, Reason.LOST)


def _apply_loading(state: CoreState, ticket: Ticket, held: ev.HeldTicket) -> None:
    # A request that waits for the load counts as in flight.
    """Takes what a heartbeat says of a load: it is over, a request waits for it, or a wake was not
    begun."""
    ticket.note_prefetch(ticket.is_prefetch and held.inflight == 0)
    is_wake = ticket.wakes_count > 0  # then an old heartbeat may still say resident
    if held.phase is types.Phase.RESIDENT and (not is_wake or _is_confirmed(state, ticket)):
        on_loaded(state, ticket, since(ticket.since, state.now), is_used=False)  # it counts uses
        loading_share.watch_loaded(state, ticket)
        note_use(state, ticket, held)
    elif is_wake and held.phase is types.Phase.ASLEEP and _is_confirmed(state, ticket):
        let_sleep(state, ticket)


def _apply_resident(state: CoreState, ticket: Ticket, held: ev.HeldTicket) -> None:
    """Takes what a heartbeat says of a resident: its use and its size."""
    if held.phase is types.Phase.RESIDENT:
        note_use(state, ticket, held)
        growth.on_heartbeat(state, ticket, held.devices)
        idle.on_heartbeat(state, ticket)
    elif held.phase is types.Phase.ASLEEP and _is_confirmed(state, ticket):
        # It fell asleep unasked, so no host RAM is on the books for it.
        kill_and_notify(state, ticket, Reason.FAILED)


def _apply_draining(state: CoreState, ticket: Ticket, held: ev.HeldTicket) -> None:
    """Takes what a heartbeat says of a victim: it sleeps, it unloads, or its barrier has
    dropped."""
    ticket.note_inflight(held.inflight)
    revocation = ticket.revocation
    assert revocation is not None
    barrier_is_over = state.now >= after(revocation.barrier_until, state.settings.timeouts.answer)
    is_unloading = held.phase is types.Phase.UNLOADING or (
        held.phase is types.Phase.DRAINING and held.inflight == 0
    )
    if held.phase is types.Phase.ASLEEP:
        on_slept(state, ticket)
    elif is_unloading:
        ticket.note_unloading(state.now)
    elif barrier_is_over:
        victim_declined(state, ticket, EventKind.BARRIER_DROPPED, held.inflight)
        note_use(state, ticket, held)


def note_use(state: CoreState, ticket: Ticket, held: ev.HeldTicket) -> None:
    """Notes what a holder reports of a ticket's use: requests in flight, priority, last use and
    uses so far. Victims are ranked by it, and keep-warm counts from it."""
    if ticket.is_prefetch:
        ticket.note_prefetch(held.inflight == 0 and held.uses_count == 0)
    priority = types.Priority.BATCH if ticket.is_prefetch else held.priority
    if (ticket.inflight == 0, ticket.priority) != (held.inflight == 0, priority):
        state.mark_dirty(ticket.node)  # it may be a victim now
    ticket.note_use(held.inflight, priority, Instant(state.now - held.idle))
    ticket.note_warm_until(after(state.now, held.stay_warm))
    if held.uses_count > ticket.uses_count:
        state.note_uses(ticket, ticket.note_uses_count(held.uses_count))
        quotas.take_over(state, ticket, held.client)
    state.ledger.touch(ticket)
    if held.inflight == 0:
        state.set_timer(ticket, state.now)


# -- after a restart ------------------------------------------------------------------------------


def _rebuild(state: CoreState, event: ev.Joined, held: ev.HeldTicket) -> None:
    """Puts a ticket of an earlier epoch on the books, and ends a load whose bytes are lent to
    others by now."""
    ticket_state = STATE_OF[held.phase]
    home: Sizes = {d.device: d.size_bytes for d in held.devices}
    is_late = ticket_state is State.LOADING and _is_lent_to_others(
        state, event.node, held.ticket, home
    )
    granted = {} if is_late else _granted_bytes(event, held, ticket_state, home)
    ticket = _ticket_from(state, event, held, home, granted)
    if held.lease:
        leases.bind(state, ticket, held.lease)
        lessees.restore(state, ticket, held.lease_history)
    apply_configuration(state, ticket)
    floors.on_rebuilt(state, ticket)
    state.ledger.open(ticket)
    if ticket.pinned:
        cap_pins(state, ticket.node)
    if ticket_state is State.LOADING:
        state.queue.note_loading(ticket.node, ticket.model_name, 1)
    charge_unclaimed(state, ticket)
    state.set_timer(ticket, state.now)
    state.log(EventKind.TICKET_REJOINED, ticket, size=charged(ticket), phase=held.phase.value)
    if is_late:
        state.log(EventKind.LOAD_FAILED, ticket, cause=LENT_MEANWHILE, out_of_memory=False)
        reclaim(state, ticket, Reason.LOST)  # its agent begins no engine under it any more


def _ticket_from(
    state: CoreState, event: ev.Joined, held: ev.HeldTicket, home: Sizes, granted: Sizes
) -> Ticket:
    """Makes a ticket from what its holder reports as it joins. An earlier epoch has learned from
    each load that is over: learned from once more, it would count twice."""
    is_loading = held.phase is types.Phase.LOADING
    ticket = Ticket(
        held.ticket,
        event.holder,
        event.node,
        event.capability,
        held.model,
        settings_key=held.settings_key,
        need=held.need,
        need_is_explicit=held.need_is_explicit,
        attempt=1,
        opened=state.now,
        since=state.now,
        state=STATE_OF[held.phase],
        home=home,
        granted=granted,
        inflight=held.inflight,
        last_used=Instant(state.now - held.idle),
        warm_until=after(state.now, held.stay_warm),
        priority=held.priority,
        uses_count=held.uses_count,
        wakes_count=int(held.has_slept),
        client=held.client,
        load=Load(
            after(state.now, state.settings.timeouts.load),
            resident_since=state.now,
            readings_count=0 if is_loading else LEARNED_AFTER,
            settled_bytes=None if is_loading else Bytes(0),
        ),
        grown=Grown(Bytes(0), shrinks_from=state.now),  # an earlier epoch may have let it grow
    )
    if ticket.state is State.DRAINING:
        barrier_until = after(state.now, state.settings.timeouts.barrier)
        ticket.begin_revocation(Reason.SWAP, _tier_of(held), barrier_until)
    return ticket


def _is_lent_to_others(state: CoreState, node: NodeId, ticket_id: TicketId, home: Sizes) -> bool:
    """Says whether bytes that an earlier epoch granted to a load are lent to others by now. Where a
    reading finds no engine of the load, it had not begun, so no book kept them for it."""
    node_state = state.nodes.get(node)
    if node_state is None or node_state.heard_at is None or ticket_id in node_state.unclaimed:
        return False
    books = ((state.ledger.books.get(device), size) for device, size in home.items())
    return any(book is not None and book.free_bytes < size for book, size in books)


def _tier_of(held: ev.HeldTicket) -> Tier:
    """Returns where a draining ticket goes. The revoke of an earlier epoch may have asked it to
    sleep, so host RAM is reserved for it."""
    return Tier.ASLEEP if held.need.host_bytes else Tier.GONE


def _granted_bytes(
    event: ev.Joined, held: ev.HeldTicket, ticket_state: State, home: Sizes
) -> Sizes:
    host_bytes = held.need.host_bytes
    host_reservation: Sizes = {host_device(event.node): host_bytes} if host_bytes else {}
    if ticket_state is State.ASLEEP:
        return host_reservation
    return {**home, **host_reservation} if ticket_state is State.DRAINING else home


def apply_configuration(state: CoreState, ticket: Ticket) -> None:
    """Applies what the configuration says of a model now. A model that was removed leaves once it
    is idle."""
    if ticket.lease:
        return
    try:
        spec = state.registry.find(ticket.model_name)
    except (UnknownCapability, UnknownModel):
        if state.registry.is_set:
            state.ledger.pin(ticket, False)
            ticket.expire_at_once()
        return
    role = state.registry.specs[ticket.capability].role
    rank = state.policies.roles[role].rank
    ticket.configure(role, rank, allow_oversize=spec.allow_oversize, keep_warm=spec.keep_warm)
    state.ledger.touch(ticket)
    state.ledger.pin(ticket, state.is_pinned(ticket.model_name))
    state.ledger.share_scratch(ticket, spec.dispatch_lock, spec.shared_scratch_bytes)
