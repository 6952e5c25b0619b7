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


def on_idle(state: CoreState, entry: Ticket) -> None:
    """Lets an idle model leave after its keep-warm time (C8), at shutdown, or because its floor was
    lowered. A model in use gets its timer when a heartbeat says that it is idle."""
    if entry.inflight > 0 or entry.ticket in state.queue:
        return
    if state.closing_by is not None:
        eviction.revoke(state, entry, Reason.SHUTDOWN, None)
        return
    if not entry.lease and state.opens_at(entry.model_name) is not None:
        _leave_outside_hours(state, entry)
        return
    floors.stop_settling_at_floor(state, entry)
    if entry.settles:
        floors.settle(state, entry)
        return
    if entry.state is State.ASLEEP and state.floor_of(entry.model_name) is Floor.HOST:
        return
    goes_at = state.policies.keep_warm(IdleModel(entry.last_used, entry.keep_warm, entry.pinned))
    if goes_at is None:
        return
    goes_at = max(goes_at, entry.declined_until)
    if state.now >= goes_at:
        eviction.revoke(state, entry, Reason.IDLE, None)
    else:
        state.set_timer(entry, goes_at)


def _leave_outside_hours(state: CoreState, entry: Ticket) -> None:
    """Revokes an idle ticket, awake or asleep, outside the hours of its model (C13). A holder that
    is busy after all declines, and is asked again once it is no longer left alone."""
    if state.now < entry.declined_until:
        state.set_timer(entry, entry.declined_until)
    else:
        eviction.revoke(state, entry, Reason.HOURS, None)


def on_unload_asked(state: CoreState, ticket: TicketId) -> None:
    """Unloads a model by hand; a load goes on, and its model leaves once it is idle. A model that
    was in use when its holder last told of it may be idle by now: heartbeats decide."""
    entry = state.live(ticket, State.LOADING, State.RESIDENT, State.ASLEEP)
    if entry is None:
        return
    state.asked_loads.pop(entry.model_name, None)
    if entry.state is State.LOADING:
        entry.settle_when_idle(True)
    elif entry.inflight > 0 and not entry.lease:
        entry.try_unload(UNLOAD_TRIES_COUNT)
    else:
        _unload(state, entry)


def on_heartbeat(state: CoreState, entry: Ticket) -> None:
    """Decides on an unload by hand that found a resident in use."""
    if entry.inflight > 0 and entry.unload_tries_count > 1:
        entry.try_unload(entry.unload_tries_count - 1)
    elif entry.unload_tries_count:
        _unload(state, entry)


def _unload(state: CoreState, entry: Ticket) -> None:
    """Unloads by hand what is idle. A model in use stays, and the event log says so."""
    entry.try_unload(0)
    if entry.inflight > 0 or entry.ticket in state.queue:
        state.log(EventKind.UNLOAD_REFUSED, entry, inflight=entry.inflight)
    else:
        eviction.revoke(state, entry, Reason.MANUAL, None)
