"""Gives each event to the rule that handles it, the first of the twelve steps of `Arbiter.handle`:
one function here for each event.
"""

from collections.abc import Callable
from functools import singledispatch

from arbiter.core import events as ev
from arbiter.core import timeouts, types
from arbiter.core.decisions import EventKind, Reason
from arbiter.core.eviction import compaction, eviction, pressure, sleep
from arbiter.core.queue import admission, hours
from arbiter.core.records.registry import Registry
from arbiter.core.records.ticket import State
from arbiter.core.residency import (
    floors,
    growth,
    heartbeats,
    idle,
    loading_share,
    prewarm,
    readings,
    slabs,
)
from arbiter.core.state import CoreState
from arbiter.core.tickets import loads, pins, reclaim


@singledispatch
def apply(event: ev.Event, _: CoreState) -> None:
    """Has the rule of an event handle it. Raises what the rule raises."""
    raise TypeError(f"unknown event {event!r}")


@apply.register
def _(event: ev.CapabilitiesSet, state: CoreState) -> None:
    _change_registry(state, lambda registry: registry.replace(event.capabilities))


@apply.register
def _(event: ev.CapabilityRegistered, state: CoreState) -> None:
    _change_registry(state, lambda registry: registry.register(event.capability))


@apply.register
def _(event: ev.CapabilityUnregistered, state: CoreState) -> None:
    _change_registry(state, lambda registry: registry.unregister(event.capability))


def _change_registry(state: CoreState, change: Callable[[Registry], None]) -> None:
    """Changes which capabilities and models there are, and what depends on it. Raises what
    `change` raises, having changed nothing."""
    before = tuple(state.registry.specs.values())
    floors_before = state.all_floors()
    closed_before = hours.closed(state)
    change(state.registry)
    _follow_registry(state, before)
    floors.on_table(state, floors_before)
    hours.load_opened(state, closed_before)


def _follow_registry(state: CoreState, before: tuple[types.CapabilitySpec, ...]) -> None:
    """Brings up to date all that depends on which capabilities and models there are: floors, queued
    tickets, configuration of tickets, hours, budgets, pins. `before`: the capabilities before the
    change."""
    floors.note_removed(state, before)
    admission.reject_removed_models(state)
    for ticket in state.ledger.tickets():  # also queued ones, which are granted as they stand
        heartbeats.apply_configuration(state, ticket)
        state.set_timer(ticket, state.now)
    hours.follow(state)
    readings.recompute_budgets(state)
    pins.cap_pins(state, *state.nodes)
    state.mark_dirty(*state.nodes)
    pins.log_pinned_overcommit(state, state.ledger.books)


@apply.register
def _(event: ev.NodeSeen, state: CoreState) -> None:
    readings.on_node_seen(state, event)
    pins.log_pinned_overcommit(state, [spec.device for spec in event.devices])
    pins.cap_pins(state, event.node)


@apply.register
def _(event: ev.NodeLost, state: CoreState) -> None:
    readings.on_node_lost(state, event)
    for holder in [h for h in state.holders.values() if h.node == event.node]:
        heartbeats.on_lost(state, holder.holder)


@apply.register
def _(event: ev.Measured, state: CoreState) -> None:
    readings.on_measured(state, event)


@apply.register
def _(event: ev.EngineGone, state: CoreState) -> None:
    readings.on_engine_gone(state, event)


@apply.register
def _(event: ev.Joined, state: CoreState) -> None:
    heartbeats.on_joined(state, event)
    slabs.on_holder_joined(state, event.holder)
    floors.on_join(state, event)


@apply.register
def _(event: ev.Renewed, state: CoreState) -> None:
    heartbeats.on_renewed(state, event)


@apply.register
def _(event: ev.HolderLost, state: CoreState) -> None:
    heartbeats.on_lost(state, event.holder)


@apply.register
def _(event: ev.Requested, state: CoreState) -> None:
    admission.on_requested(state, event)


@apply.register
def _(event: ev.GrowthAsked, state: CoreState) -> None:
    growth.on_growth_asked(state, event)


@apply.register
def _(event: ev.GaveBack, state: CoreState) -> None:
    growth.on_gave_back(state, event)


@apply.register
def _(event: ev.Withdrawn, state: CoreState) -> None:
    loads.on_withdrawn(state, event)


@apply.register
def _(event: ev.Loaded, state: CoreState) -> None:
    if ticket := state.find_or_count_stale(event.ticket, State.LOADING):
        loads.on_loaded(state, ticket, event.took, verified=event.verified, is_used=event.is_used)
        loading_share.watch_loaded(state, ticket)


@apply.register
def _(event: ev.LoadBroke, state: CoreState) -> None:
    loads.note_cause(state, event)
    if ticket := state.find_or_count_stale(event.ticket, State.LOADING):
        loads.on_load_failed(state, ticket, event.cause, event.out_of_memory)


@apply.register
def _(event: ev.Busy, state: CoreState) -> None:
    if ticket := state.find_or_count_stale(event.ticket, State.DRAINING):
        reason = ticket.leaving
        eviction.victim_declined(state, ticket, EventKind.VICTIM_BUSY, event.inflight)
        if reason is Reason.PRESSURE:
            pressure.evict_next(state, ticket)


@apply.register
def _(event: ev.BarrierDropped, state: CoreState) -> None:
    if ticket := state.find_or_count_stale(event.ticket, State.DRAINING):
        eviction.victim_declined(state, ticket, EventKind.BARRIER_DROPPED, event.inflight)


@apply.register
def _(event: ev.Slept, state: CoreState) -> None:
    if ticket := state.find_or_count_stale(event.ticket, State.DRAINING):
        sleep.on_slept(state, ticket)


@apply.register
def _(event: ev.Released, state: CoreState) -> None:
    reclaim.on_released(state, event)


@apply.register
def _(event: ev.Prewarmed, state: CoreState) -> None:
    prewarm.on_prewarmed(state, event)


@apply.register
def _(event: ev.SpeechStarted, state: CoreState) -> None:
    prewarm.on_speech(state, event)


@apply.register
def _(event: ev.UnloadAsked, state: CoreState) -> None:
    idle.on_unload_asked(state, event.ticket)


@apply.register
def _(event: ev.PriorityRaised, state: CoreState) -> None:
    admission.on_raised(state, event)


@apply.register
def _(event: ev.CancelAsked, state: CoreState) -> None:
    admission.on_cancel_asked(state, event)


@apply.register
def _(event: ev.FloorSet, state: CoreState) -> None:
    floors.on_set(state, event)
    state.mark_dirty(*state.nodes)  # other tickets may be victims now


@apply.register
def _(event: ev.LoadAsked, state: CoreState) -> None:
    floors.on_load_asked(state, event)


@apply.register
def _(event: ev.CompactAsked, state: CoreState) -> None:
    compaction.on_asked(state, event)


@apply.register
def _(event: ev.PressurePushed, state: CoreState) -> None:
    pressure.on_pushed(state, event)


@apply.register
def _(event: ev.TenantRemoved, state: CoreState) -> None:
    slabs.on_tenant_removed(state, event)


@apply.register
def _(event: ev.HoursRead, state: CoreState) -> None:
    hours.on_read(state, event)


@apply.register
def _(_event: ev.ClosingDown, state: CoreState) -> None:
    timeouts.start_closing(state)


@apply.register
def _(_event: ev.TimerFired, _: CoreState) -> None:
    pass
