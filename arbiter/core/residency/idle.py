"""Lets idle models leave: after their keep-warm time (C8), outside their hours (C13), at shutdown,
down to a lowered floor, or by hand.
"""

from arbiter.core.decisions import EventKind, Reason
from arbiter.core.eviction import eviction
from arbiter.core.records.ticket import State, Ticket
from arbiter.core.residency import floors
from arbiter.core.state import CoreState
from arbiter.core.types import Floor
from arbiter.core.view import IdleModel
from arbiter.units import TicketId

# Heartbeats that decide on an unload; the first may have been under way when that was asked.
UNLOAD_TRIES_COUNT = 2


def on_idle(state: CoreState, ticket: Ticket) -> None:
    """Lets an idle model leave after its keep-warm time (C8), at shutdown, or because its floor was
    lowered. A model in use gets its timer when a heartbeat says that it is idle."""
    if ticket.inflight > 0 or ticket.id in state.queue:
        return
    if state.closing_by is not None:
        eviction.revoke(state, ticket, Reason.SHUTDOWN, None)
        return
    if not ticket.lease and state.opens_at(ticket.model_name) is not None:
        _leave_outside_hours(state, ticket)
        return
    floors.stop_settling_at_floor(state, ticket)
    if ticket.settles:
        floors.settle(state, ticket)
        return
    if ticket.state is State.ASLEEP and state.floor_of(ticket.model_name) is Floor.HOST:
        return
    goes_at = state.policies.keep_warm(IdleModel(ticket.last_used, ticket.keep_warm, ticket.pinned))
    if goes_at is None:
        return
    goes_at = max(goes_at, ticket.declined_until)
    if state.now >= goes_at:
        eviction.revoke(state, ticket, Reason.IDLE, None)
    else:
        state.set_timer(ticket, goes_at)


def _leave_outside_hours(state: CoreState, ticket: Ticket) -> None:
    """Revokes an idle ticket, awake or asleep, outside the hours of its model (C13). A holder that
    is busy after all declines, and is asked again once it is no longer left alone."""
    if state.now < ticket.declined_until:
        state.set_timer(ticket, ticket.declined_until)
    else:
        eviction.revoke(state, ticket, Reason.HOURS, None)


def on_unload_asked(state: CoreState, ticket_id: TicketId) -> None:
    """Unloads a model by hand; a load goes on, and its model leaves once it is idle. A model that
    was in use when its holder last told of it may be idle by now: heartbeats decide."""
    ticket = state.find_or_count_stale(ticket_id, State.LOADING, State.RESIDENT, State.ASLEEP)
    if ticket is None:
        return
    state.asked_loads.pop(ticket.model_name, None)
    state.awaiting_holder.pop(ticket.model_name, None)
    if ticket.state is State.LOADING:
        ticket.settle_when_idle(True)
    elif ticket.inflight > 0 and not ticket.lease:
        ticket.try_unload(UNLOAD_TRIES_COUNT)
    else:
        _unload(state, ticket)


def on_heartbeat(state: CoreState, ticket: Ticket) -> None:
    """Decides on an unload by hand that found a resident in use."""
    if ticket.inflight > 0 and ticket.unload_tries_count > 1:
        ticket.try_unload(ticket.unload_tries_count - 1)
    elif ticket.unload_tries_count:
        _unload(state, ticket)


def _unload(state: CoreState, ticket: Ticket) -> None:
    """Unloads by hand what is idle. A model in use stays, and the event log says so."""
    ticket.try_unload(0)
    if ticket.inflight > 0 or ticket.id in state.queue:
        state.log(EventKind.UNLOAD_REFUSED, ticket, inflight=ticket.inflight)
    else:
        eviction.revoke(state, ticket, Reason.MANUAL, None)
