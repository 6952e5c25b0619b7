"""Keeps models and batch work to their hours (C13).

Outside its hours a model is not loaded, and leaves once it is idle (residency/idle.py). A request
for it is refused, with the time until the hours begin, because that is more than a client waits; a
request whose deadline is later waits, because its client has said so. Batch work outside its hours
waits in the queue: a *held* ticket is not tried, holds up no other, and its wait counts from when
it is free to go.
"""

from arbiter.core import events as ev
from arbiter.core.decisions import EventKind
from arbiter.core.records.request_queue import QueueEntry
from arbiter.core.records.ticket import Ticket
from arbiter.core.residency import floors
from arbiter.core.state import CoreState, reject_queued
from arbiter.core.tickets.pins import cap_pins
from arbiter.core.types import ModelName, Priority
from arbiter.units import Instant, since


def on_read(state: CoreState, event: ev.HoursRead) -> None:
    """Takes what the clock on the wall says of hours, and has those that opened or closed
    followed."""
    closed_before = closed(state)
    for reading in state.hours_readings.read(event.readings, state.now):
        state.log(EventKind.HOURS, hours=reading.hours, is_open=reading.is_open, took=reading.left)
    follow(state)
    load_opened(state, closed_before)


def follow(state: CoreState) -> None:
    """Has all that depends on hours agree with them: pins, what leaves, and what is queued."""
    if state.registry.hours:
        for ticket in state.ledger.tickets():
            if not ticket.lease and ticket.model_name in state.registry.hours:
                state.ledger.pin(ticket, state.is_pinned(ticket.model_name))
                state.set_timer(ticket, state.now)
        cap_pins(state, *state.nodes)
    for ticket_id in state.queue.tickets():
        waiter, queued = state.ledger.find(ticket_id), state.queue.find(ticket_id)
        if waiter is not None and queued is not None:
            _follow_queued(state, waiter, queued)
    state.mark_dirty(*state.nodes)


def load_opened(state: CoreState, closed_before: set[ModelName]) -> None:
    """Loads what is pinned, or has the device floor, and is no longer outside its hours."""
    for name in sorted(closed_before - closed(state)):
        if floors.is_known(state, name) and state.is_pinned(name):
            floors.load(state, name)


def closed(state: CoreState) -> set[ModelName]:
    """Returns the models that are outside their hours."""
    return {name for name in state.registry.hours if state.opens_at(name) is not None}


def _follow_queued(state: CoreState, ticket: Ticket, queued: QueueEntry) -> None:
    remaining = None if queued.deadline is None else since(state.now, queued.deadline)
    error = None if ticket.lease else floors.outside_hours(state, ticket.model_name, remaining)
    if error is not None:
        reject_queued(state, ticket, error)
    else:
        hold(state, ticket, queued)


# -- one ticket -----------------------------------------------------------------------------------


def hold(state: CoreState, ticket: Ticket, queued: QueueEntry) -> None:
    """Holds a queued ticket outside its hours, or lets it go."""
    is_held = held_until(state, ticket, queued) is not None
    if queued.is_held and not is_held:
        state.set_timer(ticket, state.now)  # it ages from now on
        state.mark_dirty(ticket.node)
    state.queue.hold(queued, is_held=is_held, now=state.now)


def held_until(state: CoreState, ticket: Ticket, queued: QueueEntry) -> Instant | None:
    """Returns when a queued ticket may go by its hours; None when it may now. A lease knows its own
    hour, and a prefetch is of the lowest priority but no batch work."""
    if ticket.lease:
        return None
    opens = [state.opens_at(ticket.model_name)]
    if queued.request.priority is Priority.BATCH and not ticket.is_prefetch:
        opens.append(state.hours_readings.opens_at(state.batch_hours_of(ticket.model_name)))
    return max((at for at in opens if at is not None), default=None)
