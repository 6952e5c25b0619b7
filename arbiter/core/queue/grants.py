"""Grants a queued ticket: charges its bytes and tells its holder (A3, A8). Ages a ticket, which no
later ticket then bypasses (C6).

In the modules of this folder `ticket` is a `Ticket`, `queued` its place in the queue
(`QueueEntry`).
"""

from arbiter.core.decisions import EventKind, Grant
from arbiter.core.queue import gangs
from arbiter.core.queue.outcome import Outcome
from arbiter.core.queue.pass_state import GrantPass, count_bypasses
from arbiter.core.records.request_queue import QueueEntry
from arbiter.core.records.ticket import Sizes, State, Ticket
from arbiter.core.state import CoreState
from arbiter.core.tickets import leases
from arbiter.core.tickets.pins import cap_pins, is_to_be_pinned
from arbiter.core.types import DeviceBytes
from arbiter.units import Span, after, since


def grant(
    state: CoreState, pass_: GrantPass, ticket: Ticket, queued: QueueEntry, home: Sizes
) -> Outcome:
    """Takes a ticket out of the queue and grants it these bytes, by device. Counts a bypass for the
    tickets that asked before it."""
    state.queue.drop(ticket.id)
    state.trades.note_granted((ticket.holder, ticket.model))
    state.accounts.served(queued.request.virtual_start_bytes)
    count_bypasses(state, pass_, queued.request.sequence, home)
    charge_and_grant(state, ticket, home, since(queued.request.asked_at, state.now))
    return Outcome.GRANTED


def charge_and_grant(state: CoreState, ticket: Ticket, home: Sizes, waited: Span = Span(0)) -> None:
    """Moves a ticket to LOADING. What is granted already (the copy in host RAM of an asleep ticket)
    stays charged. `waited`: in the queue."""
    key = ticket.model_key
    if ticket.wakes_count:
        predicted = state.estimates.wake_time(key)
    else:
        predicted = state.estimates.load_time(key, ticket.need.weights_bytes)
    load_by = after(state.now, state.settings.timeouts.load)
    ticket.begin_load(load_by, predicted)
    state.move(ticket, State.LOADING, granted={**ticket.granted, **home}, home=home)
    state.set_timer(ticket, load_by)
    if is_to_be_pinned(state, ticket):
        cap_pins(state, ticket.node)
    state.decide(grant_of(ticket))
    state.log(EventKind.TICKET_GRANTED, ticket, size=ticket.granted_home_bytes, took=waited)
    if ticket.need_is_explicit and ticket.granted_home_bytes > ticket.need.device_bytes:
        declared_bytes = ticket.need.device_bytes
        state.log(
            EventKind.EXPLICIT_TOO_LOW,
            ticket,
            size=ticket.granted_home_bytes,
            explicit_bytes=declared_bytes,
        )
    if ticket.lease:
        leases.begin(state, ticket)


def grant_of(ticket: Ticket) -> Grant:
    """Returns the grant of a ticket that has one, as it was or is repeated."""
    devices = tuple(DeviceBytes(d, size) for d, size in sorted(ticket.home.items()))
    load = ticket.last_load
    return Grant(ticket.id, devices, load.load_by, load.predicted)


def age(state: CoreState, ticket: Ticket) -> None:
    """Runs the time rule of bypassing: after so long a ticket is aged, and at once where the
    settings allow no bypass."""
    queued = state.queue.find(ticket.id)
    if queued is None or queued.is_aged or queued.is_held:
        return
    ages_at = after(queued.ages_from or queued.request.asked_at, state.settings.timeouts.bypass)
    if state.now >= ages_at or _is_never_bypassed(state, ticket):
        state.queue.age(queued)
    else:
        state.set_timer(ticket, ages_at)


def _is_never_bypassed(state: CoreState, ticket: Ticket) -> bool:
    """Says whether no later ticket may be granted first. A gang takes its place with its last
    member: until then the others cannot be granted."""
    is_whole = not ticket.gang or gangs.members(state, ticket) is not None
    return not state.settings.bypass_count and is_whole
