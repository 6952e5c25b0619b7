"""Grants a queued ticket: charges its bytes and tells its holder (A3, A8). Ages a ticket, which no
later ticket then bypasses (C6).

In the modules of this folder `entry` is the ticket (`Ticket`), `queued` its place in the queue
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
from arbiter.core.tickets.device_limits import (
    cap_pins,
    is_to_be_pinned,
)
from arbiter.core.types import DeviceBytes
from arbiter.units import Span, after, since


def grant(
    state: CoreState, pass_: GrantPass, entry: Ticket, queued: QueueEntry, home: Sizes
) -> Outcome:
    state.queue.drop(entry.ticket)
    state.trades.note_granted((entry.holder, entry.model))
    state.accounts.served(queued.request.virtual_start_bytes)
    count_bypasses(state, pass_, queued.request.sequence, home)
    charge_and_grant(state, entry, home, since(queued.request.asked_at, state.now))
    return Outcome.GRANTED


def charge_and_grant(state: CoreState, entry: Ticket, home: Sizes, waited: Span = Span(0)) -> None:
    """Moves a ticket to LOADING. What is granted already (the copy in host RAM of an asleep ticket)
    stays charged. `waited`: in the queue."""
    key = entry.model_key
    if entry.wakes_count:
        predicted = state.estimates.wake_time(key)
    else:
        predicted = state.estimates.load_time(key, entry.need.weights_bytes)
    load_by = after(state.now, state.settings.timeouts.load)
    entry.begin_load(load_by, predicted)
    state.move(entry, State.LOADING, granted={**entry.granted, **home}, home=home)
    state.set_timer(entry, load_by)
    if is_to_be_pinned(state, entry):
        cap_pins(state, entry.node)
    state.decide(grant_of(entry))
    state.log(EventKind.TICKET_GRANTED, entry, size=entry.home_bytes, took=waited)
    if entry.need_is_explicit and entry.home_bytes > entry.need.device_bytes:
        declared_bytes = entry.need.device_bytes
        state.log(
            EventKind.EXPLICIT_TOO_LOW, entry, size=entry.home_bytes, explicit_bytes=declared_bytes
        )
    if entry.lease:
        leases.begin(state, entry)


def grant_of(entry: Ticket) -> Grant:
    """Returns the grant of a ticket that has one, as it was or is repeated."""
    devices = tuple(DeviceBytes(d, size) for d, size in sorted(entry.home.items()))
    load = entry.last_load
    return Grant(entry.ticket, devices, load.load_by, load.predicted)


def age(state: CoreState, entry: Ticket) -> None:
    """Runs the time rule of bypassing: after so long a ticket is aged, and at once where the
    settings allow no bypass."""
    queued = state.queue.find(entry.ticket)
    if queued is None or queued.is_aged or queued.is_held:
        return
    ages_at = after(queued.ages_from or queued.request.asked_at, state.settings.timeouts.bypass)
    if state.now >= ages_at or _is_never_bypassed(state, entry):
        state.queue.age(queued)
    else:
        state.set_timer(entry, ages_at)


def _is_never_bypassed(state: CoreState, entry: Ticket) -> bool:
    """Says whether no later ticket may be granted first. A gang takes its place with its last
    member: until then the others cannot be granted."""
    is_whole = not entry.gang or gangs.members(state, entry) is not None
    return not state.settings.bypass_count and is_whole
