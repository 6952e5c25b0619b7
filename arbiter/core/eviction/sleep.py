"""Takes a model for asleep only as measured (D1): its holder says that it sleeps, and a reading
confirms that once the bytes on its devices have fallen.
"""

from arbiter.core.decisions import EventKind, Reason, RequestReading, Tier
from arbiter.core.records.ticket import Sizes, State, Ticket
from arbiter.core.state import CoreState
from arbiter.core.tickets import inexact
from arbiter.core.tickets.budget import fraction_of
from arbiter.core.tickets.reclaim import kill_and_notify
from arbiter.core.types import Floor
from arbiter.units import (
    Bytes,
    Instant,
    after,
    host_device,
    since,
)


def grant_with_host_copy(state: CoreState, ticket: Ticket) -> Sizes | None:
    """Returns what a ticket is granted and the host reservation that it needs to sleep, in bytes by
    device; None when the model cannot sleep or host RAM has no room for it."""
    copy = ticket.need.host_bytes
    if copy == 0 or not state.estimates.can_sleep(ticket.model_key):
        return None
    host = state.ledger.books.get(host_device(ticket.node))
    if host is None:
        return None
    host_reservation = Bytes(copy + ticket.ram_bytes)  # the process keeps its RAM while it sleeps
    already = ticket.charge(host.device)  # the process, and a copy kept since the last sleep
    if host_reservation - already > host.free_bytes:
        return None
    return {**ticket.granted, host.device: host_reservation}


def on_slept(state: CoreState, ticket: Ticket) -> None:
    """Notes the holder's word that a ticket sleeps; a reading must agree (D1). Kills the engine
    when no host RAM is reserved for it."""
    if ticket.revocation is None or ticket.revocation.to is not Tier.ASLEEP:
        # No host RAM is reserved for its weights.
        kill_and_notify(state, ticket, ticket.leaving_reason)
        return
    if ticket.claimed_sleep is None:
        ticket.claim_sleep(state.now, inexact.measured_at_home(state, ticket))
        state.decide(RequestReading(ticket.node))
        state.set_timer(ticket, after(state.now, state.settings.timeouts.reclaim_overdue))


def confirm_sleep(state: CoreState, ticket: Ticket) -> None:
    """Moves DRAINING -> ASLEEP once a reading has seen the device bytes fall. Ends the ticket when
    they fall no more before that."""
    claimed = ticket.claimed_sleep
    if ticket.state is not State.DRAINING or claimed is None:
        return
    held = inexact.measured_at_home(state, ticket)
    fallen = claimed.from_bytes - held
    if fallen < fraction_of(ticket.granted_home_bytes, state.settings.slept_fraction):
        ticket.note_held_since_sleep(state.now, held)
        stands_for = since(claimed.fell_at or state.now, state.now)
        # Where only a total is known, another engine may have taken what this one gave.
        if stands_for >= state.settings.timeouts.sleep_without_fall and not inexact.is_at_home(
            state, ticket
        ):
            _end_failed_sleep(state, ticket, ticket.leaving_reason)
        return
    reason = ticket.leaving_reason
    took = since(ticket.since, state.now)
    host_reservation = {d: size for d, size in ticket.granted.items() if d not in ticket.home}
    state.move(ticket, State.ASLEEP, granted=host_reservation)
    if ticket.revoked_at is not None:
        state.estimates.note_turnover(ticket.capability, since(ticket.revoked_at, state.now))
        ticket.forget_revoked()  # this leave is over; an end after the next wake is no part of it
    ticket.end_revocation()
    ticket.note_inflight(0)
    ticket.try_unload(0)  # it has left its devices
    ticket.settle_when_idle(ticket.settles and state.floor_of(ticket.model_name) is not Floor.HOST)
    size = Bytes(fallen)
    state.log(
        EventKind.MODEL_UNLOAD, ticket, size=size, took=took, reason=reason.value, to="asleep"
    )
    state.set_timer(ticket, state.now)


def end_if_never_slept(state: CoreState, ticket: Ticket) -> None:
    """Ends a ticket that counts as asleep although its bytes never fell. Its holder rejoined with
    it, so perhaps no reading of this epoch saw it fall asleep. An asleep ticket may grow a little;
    a ticket that holds more than about half of what it was granted does not sleep."""
    asleep_most = (
        ticket.granted_home_bytes
        - fraction_of(ticket.granted_home_bytes, state.settings.slept_fraction) // 2
    )
    if inexact.is_at_home(state, ticket):
        return  # what it holds there is inferred
    if ticket.state is State.ASLEEP and ticket.measured_home_bytes > asleep_most:
        _end_failed_sleep(state, ticket, Reason.FAILED)


def await_confirmation(state: CoreState, ticket: Ticket, confirm_by: Instant) -> None:
    """Waits for the reading that confirms a sleep, and ends the ticket when none does in time."""
    if state.now < confirm_by:
        state.set_timer(ticket, confirm_by)
        return
    _end_failed_sleep(state, ticket, ticket.leaving_reason)


def _end_failed_sleep(state: CoreState, ticket: Ticket, reason: Reason) -> None:
    """Kills an engine whose sleep did not give its bytes back, and lets the model sleep no more in
    this epoch."""
    least_fraction = state.settings.slept_fraction
    state.log(
        EventKind.NOT_ASLEEP,
        ticket,
        size=ticket.measured_home_bytes,
        wanted_fraction=least_fraction,
    )
    state.estimates.did_not_sleep(ticket.model_key)
    kill_and_notify(state, ticket, reason)
