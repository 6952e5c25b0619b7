"""Asleep only as measured: a holder's word is believed once the bytes have fallen (D1)."""

from arbiter.core.decisions import Reason, RequestReading, Tier
from arbiter.core.eviction.eligibility import floor_of
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
    """What it is granted plus host RAM to sleep in; None when it cannot or there is no room."""
    host = state.ledger.books.get(host_device(entry.node))
    copy = entry.need.host_bytes
    if host is None or copy == 0 or not state.estimates.can_sleep(state.key_of(entry)):
        return None
    host_reservation = Bytes(copy + entry.ram_bytes)  # the process keeps its RAM while it sleeps
    already = entry.charge(host.device)  # the process, and a copy kept since the last sleep
    if host_reservation - already > host.free_bytes:
        return None
    return {**entry.granted, host.device: host_reservation}


def on_slept(state: CoreState, entry: Ticket) -> None:
    """Its holder says so; a reading must agree (D1)."""
    if entry.to is not Tier.ASLEEP:
        kill_and_notify(
            state, entry, entry.leaving or Reason.FAILED
        )  # nobody reserved host RAM for it
        return
    if entry.slept_at is None:
        entry.slept_at = state.now
        held = max(entry.slept_from_bytes, inexact.held_at_home(state, entry))
        entry.slept_from_bytes = Bytes(max(entry.home_bytes, held))
        state.decide(RequestReading(entry.node))
        state.set_timer(entry, after(state.now, state.settings.timeouts.reclaim_alarm))


def confirm_sleep(state: CoreState, entry: Ticket) -> None:
    """A reading has come: DRAINING -> ASLEEP once the device bytes are seen to have fallen."""
    if entry.state is not State.DRAINING or entry.slept_at is None:
        return
    fallen = entry.slept_from_bytes - inexact.held_at_home(state, entry)
    if fallen < share(entry.home_bytes, state.settings.slept_fraction):
        return
    reason = entry.leaving or Reason.SWAP
    took = since(entry.since, state.now)
    host_reservation = {d: size for d, size in entry.granted.items() if d not in entry.home}
    state.move(entry, State.ASLEEP, granted=host_reservation)
    if entry.revoked_at is not None:
        state.estimates.left(entry.capability, since(entry.revoked_at, state.now))
    entry.leaving, entry.inflight = None, 0
    entry.settles = entry.settles and floor_of(state, entry) is not Floor.HOST
    size = Bytes(fallen)
    state.log("model_unload", entry, size=size, took=took, reason=reason.value, to="asleep")
    state.set_timer(entry, state.now)


def doubt_asleep(state: CoreState, entry: Ticket) -> None:
    """A reading has come of a sleeper that perhaps nobody saw fall asleep: its holder rejoined
    with it. A sleeper may grow a little; one that never gave back half of its share is none."""
    believed = entry.home_bytes - share(entry.home_bytes, state.settings.slept_fraction) // 2
    if inexact.is_at_home(state, entry):
        return  # the share is inferred
    if entry.state is State.ASLEEP and entry.at_home_bytes > believed:
        _end_failed_sleep(state, entry, Reason.FAILED)


def _start_doubt(state: CoreState, entry: Ticket, believe_by: Instant) -> None:
    if state.now < believe_by:
        state.set_timer(entry, believe_by)
        return
    _end_failed_sleep(state, entry, entry.leaving or Reason.SWAP)


def _end_failed_sleep(state: CoreState, entry: Ticket, reason: Reason) -> None:
    wanted = state.settings.slept_fraction
    state.log("not_asleep", entry, size=entry.at_home_bytes, wanted_fraction=wanted)
    state.estimates.did_not_sleep(state.key_of(entry))
    kill_and_notify(state, entry, reason)
