"""Believes that a model is asleep only as measured: a holder's word counts once the bytes have
fallen (D1).
"""

from arbiter.core.decisions import EventKind, Reason, RequestReading, Tier
from arbiter.core.records.ticket import Sizes, State, Ticket
from arbiter.core.state import CoreState
from arbiter.core.tickets import inexact
from arbiter.core.tickets.budget import share
from arbiter.core.tickets.reclaim import kill_and_notify
from arbiter.core.types import Floor
from arbiter.units import (
    Bytes,
    Instant,
    after,
    host_device,
    since,
)


def grant_with_host_copy(state: CoreState, entry: Ticket) -> Sizes | None:
    """Returns what a ticket is granted plus its host reservation to sleep in; None when it cannot
    sleep or host RAM has no room."""
    copy = entry.need.host_bytes
    if copy == 0 or not state.estimates.can_sleep(entry.model_key):
        return None
    host = state.ledger.books.get(host_device(entry.node))
    if host is None:
        return None
    host_reservation = Bytes(copy + entry.ram_bytes)  # the process keeps its RAM while it sleeps
    already = entry.charge(host.device)  # the process, and a copy kept since the last sleep
    if host_reservation - already > host.free_bytes:
        return None
    return {**entry.granted, host.device: host_reservation}


def on_slept(state: CoreState, entry: Ticket) -> None:
    """Notes the holder's word that a ticket sleeps; a reading must agree (D1). Kills the engine
    when no host RAM is reserved for it."""
    if entry.revocation is None or entry.revocation.to is not Tier.ASLEEP:
        # No host RAM is reserved for its weights.
        kill_and_notify(state, entry, entry.leaving_reason)
        return
    if entry.claimed_sleep is None:
        entry.claim_sleep(state.now, inexact.held_at_home(state, entry))
        state.decide(RequestReading(entry.node))
        state.set_timer(entry, after(state.now, state.settings.timeouts.reclaim_overdue))


def confirm_sleep(state: CoreState, entry: Ticket) -> None:
    """Moves DRAINING -> ASLEEP once a reading has seen the device bytes fall. Ends the ticket when
    they fall no more before that."""
    claimed = entry.claimed_sleep
    if entry.state is not State.DRAINING or claimed is None:
        return
    held = inexact.held_at_home(state, entry)
    fallen = claimed.from_bytes - held
    if fallen < share(entry.home_bytes, state.settings.slept_fraction):
        entry.note_held_since_sleep(state.now, held)
        stands_for = since(claimed.fell_at or state.now, state.now)
        # Where only a total is known, another engine may have taken what this one gave.
        if stands_for >= state.settings.timeouts.sleep_without_fall and not inexact.is_at_home(
            state, entry
        ):
            _end_failed_sleep(state, entry, entry.leaving_reason)
        return
    reason = entry.leaving_reason
    took = since(entry.since, state.now)
    host_reservation = {d: size for d, size in entry.granted.items() if d not in entry.home}
    state.move(entry, State.ASLEEP, granted=host_reservation)
    if entry.revoked_at is not None:
        state.estimates.note_turnover(entry.capability, since(entry.revoked_at, state.now))
        entry.forget_revoked()  # this leave is over; an end after the next wake is no part of it
    entry.end_revocation()
    entry.note_inflight(0)
    entry.try_unload(0)  # it has left its devices
    entry.settle_when_idle(entry.settles and state.floor_of(entry.model_name) is not Floor.HOST)
    size = Bytes(fallen)
    state.log(EventKind.MODEL_UNLOAD, entry, size=size, took=took, reason=reason.value, to="asleep")
    state.set_timer(entry, state.now)


def doubt_asleep(state: CoreState, entry: Ticket) -> None:
    """Ends an asleep ticket whose bytes never fell: its holder rejoined with it, so perhaps no
    reading saw it fall asleep. An asleep ticket may grow a little; a ticket that still holds more
    than about half of its share does not sleep."""
    believed = entry.home_bytes - share(entry.home_bytes, state.settings.slept_fraction) // 2
    if inexact.is_at_home(state, entry):
        return  # the share is inferred
    if entry.state is State.ASLEEP and entry.at_home_bytes > believed:
        _end_failed_sleep(state, entry, Reason.FAILED)


def await_confirmation(state: CoreState, entry: Ticket, believe_by: Instant) -> None:
    """Waits for the reading that confirms a sleep, and ends the ticket when none does in time."""
    if state.now < believe_by:
        state.set_timer(entry, believe_by)
        return
    _end_failed_sleep(state, entry, entry.leaving_reason)


def _end_failed_sleep(state: CoreState, entry: Ticket, reason: Reason) -> None:
    least_fraction = state.settings.slept_fraction
    state.log(EventKind.NOT_ASLEEP, entry, size=entry.at_home_bytes, wanted_fraction=least_fraction)
    state.estimates.did_not_sleep(entry.model_key)
    kill_and_notify(state, entry, reason)
