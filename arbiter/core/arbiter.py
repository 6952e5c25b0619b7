"""The arbiter's rules behind one door: `handle(event, now)` returns what must be done.

Deterministic, and pure in time: the clock, the wire and the dice are outside. Every call runs the
same steps in this order: apply the event, look at what is overdue, bring overcommitted devices
back within their budget, admit from the line, check the books of what was touched.

A message about a ticket that has moved on is normal (holders race with revokes, wires repeat), so
it is counted in `stale_count` and otherwise ignored; an identity that does not hold is a bug and
raises LedgerBroken, after which the actor must crash.

The rules stand in folders by subject: `queue/` (admission, grants, placement), `eviction/`
(victims, sleep, pressure), `residency/` (heartbeats, readings, floors, growth, prefetch),
`tickets/` (loads, reclaim, leases, quotas); `records/` holds their data, `state.py` all of it.
"""

from functools import singledispatch
from typing import Any

from arbiter.core import events as ev
from arbiter.core import timeouts, types
from arbiter.core.decisions import Decision, Reason, SetTimer
from arbiter.core.eviction import eviction, pressure, sleep
from arbiter.core.queue import admission, grant_pass, wait_estimate
from arbiter.core.records.ticket import CHARGED, State
from arbiter.core.reports import replica_targets
from arbiter.core.reports.explain import Explanation, explain
from arbiter.core.reports.snapshot import StateView, view_of
from arbiter.core.residency import floors, growth, heartbeats, prefetch, readings
from arbiter.core.settings import Settings
from arbiter.core.state import CoreState, Foresight
from arbiter.core.tickets import device_limits, loads, reclaim
from arbiter.core.view import Policies
from arbiter.units import Epoch, HolderId, Instant, NodeId, Span, TicketId, after

NEXT = Span(1)  # what admission left to be looked at is looked at in a step of its own


class Arbiter:
    """One life of the arbiter. `known_holders`: those of the last epoch, still expected back.
    `foresight`: when a model is next used, in a replay that knows."""

    def __init__(
        self,
        settings: Settings,
        policies: Policies,
        epoch: Epoch,
        known_holders: frozenset[HolderId],
        now: Instant,
        foresight: Foresight | None = None,
    ) -> None:
        self._state = state = CoreState(settings, policies, epoch, known_holders, now)
        state.foresight = foresight
        state.timers.set(("queue", ""), state.settled_at)
        state.timers.set(("audit", ""), after(now, settings.timeouts.audit))

    def handle(self, event: ev.Event, now: Instant) -> list[Decision]:
        """Raises CapabilityConflict, having changed nothing, for a CapabilityRegistered that
        differs from what is known."""
        state = self._state
        assert now >= state.now, "time went back"
        state.now, state.out = now, []
        _apply.registry.get(type(event), _apply)(event, state)  # its own look-up takes 0.5 us
        timeouts.fire_due(state)
        eviction.evict_overcommitted(state)
        growth.grant_waiting(state)
        grant_pass.run(state)
        wait_estimate.estimate_new(state)
        floors.forget_removed(state)
        prefetch.predict_next(state)
        state.accounts.settle(state.ledger.holdings, state.now)
        state.ledger.check_touched()
        if (at := state.timers.next()) is not None:
            state.decide(SetTimer(max(at, after(now, NEXT))))
        return state.out

    # -- reading -------------------------------------------------------------------------------

    @property
    def epoch(self) -> Epoch:
        return self._state.epoch

    @property
    def settings(self) -> Settings:
        return self._state.settings

    @property
    def stale_count(self) -> int:
        return self._state.stale_count

    def has_joined(self, holder: HolderId) -> bool:
        """False: it never did, or counts as dead since."""
        return holder in self._state.holders

    @property
    def awaited(self) -> frozenset[HolderId]:
        """Holders of the last epoch that are not back."""
        return frozenset(self._state.awaited)

    @property
    def gave_up_waiting(self) -> bool:
        """Those who are not back are as good as dead."""
        return self._state.gave_up_waiting

    def state_of(self, ticket: TicketId) -> str:
        """`closed` for one that is not on the books."""
        entry = self._state.ledger.find(ticket)
        return entry.state.value if entry else State.CLOSED.value

    def holder_of(self, ticket: TicketId) -> HolderId | None:
        """None: it is not on the books."""
        entry = self._state.ledger.find(ticket)
        return entry.holder if entry else None

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        return tuple(sorted(self._state.nodes))

    def snapshot(self, now: Instant) -> StateView:
        return view_of(self._state, now)

    def explain(self, ticket: TicketId, now: Instant) -> Explanation:
        """Why it waits, or why it went. Raises UnknownTicket."""
        return explain(self._state, ticket, now)

    def replica_targets(self, now: Instant) -> dict[str, int]:
        """Replicas wanted of each capability; WakeAt also comes when one of these changes."""
        return replica_targets.targets(self._state, now)

    def export_learned(self) -> list[dict[str, Any]]:
        """What was learned, as plain rows."""
        return self._state.estimates.export()

    def export_floors(self) -> list[list[str]]:
        """Capability, model, floor."""
        return [[*name, floor.value] for name, floor in sorted(self._state.floors.items())]

    def export_accounts(self) -> list[list[Any]]:
        """What clients have used (C10)."""
        return self._state.accounts.export()

    def restore_accounts(self, rows: list[list[Any]]) -> None:
        self._state.accounts.restore(rows, self._state.now)

    def restore_floors(self, rows: list[list[str]]) -> None:
        for capability, model, floor in rows:
            self._state.floors[(capability, model)] = types.Floor(floor)

    def restore_learned(self, rows: list[dict[str, Any]]) -> None:
        self._state.estimates.restore(rows)


# -- the events -----------------------------------------------------------------------------------


@singledispatch
def _apply(event: ev.Event, _: CoreState) -> None:
    raise TypeError(f"unknown event {event!r}")


@_apply.register
def _(event: ev.CapabilitiesSet, state: CoreState) -> None:
    before = tuple(state.registry.specs.values())
    state.registry.replace(event.capabilities)
    floors.note_removed(state, before)
    admission.reject_removed_models(state)
    for entry in state.ledger.entries(*CHARGED):
        heartbeats.apply_configuration(state, entry)
        state.set_timer(entry, state.now)
    readings.rebudget(state)
    device_limits.cap_pins(state, state.ledger.books)
    state.ledger.changed.update(state.nodes)
    device_limits.flag_pinned(state, state.ledger.books)


@_apply.register
def _(event: ev.CapabilityRegistered, state: CoreState) -> None:
    state.registry.register(event.capability)
    readings.rebudget(state)


@_apply.register
def _(event: ev.NodeSeen, state: CoreState) -> None:
    readings.on_node_seen(state, event)
    device_limits.flag_pinned(state, [spec.device for spec in event.devices])


@_apply.register
def _(event: ev.NodeLost, state: CoreState) -> None:
    readings.on_node_lost(state, event)
    for holder in [h for h in state.holders.values() if h.node == event.node]:
        heartbeats.on_lost(state, holder.holder)


@_apply.register
def _(event: ev.Measured, state: CoreState) -> None:
    readings.on_measured(state, event)


@_apply.register
def _(event: ev.EngineGone, state: CoreState) -> None:
    readings.on_engine_gone(state, event)


@_apply.register
def _(event: ev.Joined, state: CoreState) -> None:
    heartbeats.on_joined(state, event)
    floors.on_join(state, event.capability)


@_apply.register
def _(event: ev.Renewed, state: CoreState) -> None:
    heartbeats.on_renewed(state, event)


@_apply.register
def _(event: ev.HolderLost, state: CoreState) -> None:
    heartbeats.on_lost(state, event.holder)


@_apply.register
def _(event: ev.Requested, state: CoreState) -> None:
    admission.on_requested(state, event)


@_apply.register
def _(event: ev.GrowthAsked, state: CoreState) -> None:
    growth.on_growth_asked(state, event)


@_apply.register
def _(event: ev.GaveBack, state: CoreState) -> None:
    growth.on_gave_back(state, event)


@_apply.register
def _(event: ev.Withdrawn, state: CoreState) -> None:
    loads.on_withdrawn(state, event)


@_apply.register
def _(event: ev.Loaded, state: CoreState) -> None:
    if entry := state.live(event.ticket, State.LOADING):
        loads.on_loaded(state, entry, event.took, verified=event.verified)


@_apply.register
def _(event: ev.LoadBroke, state: CoreState) -> None:
    loads.note_cause(state, event)
    if entry := state.live(event.ticket, State.LOADING):
        loads.on_load_failed(state, entry, event.cause, event.out_of_memory)


@_apply.register
def _(event: ev.Busy, state: CoreState) -> None:
    if entry := state.live(event.ticket, State.DRAINING):
        reason = entry.leaving
        eviction.victim_declined(state, entry, "victim_busy", event.inflight)
        if reason is Reason.PRESSURE:
            pressure.evict_next(state, entry)


@_apply.register
def _(event: ev.BarrierDropped, state: CoreState) -> None:
    if entry := state.live(event.ticket, State.DRAINING):
        eviction.victim_declined(state, entry, "barrier_dropped", event.inflight)


@_apply.register
def _(event: ev.Slept, state: CoreState) -> None:
    if entry := state.live(event.ticket, State.DRAINING):
        sleep.on_slept(state, entry)


@_apply.register
def _(event: ev.Released, state: CoreState) -> None:
    reclaim.on_released(state, event)


@_apply.register
def _(event: ev.UnloadAsked, state: CoreState) -> None:
    timeouts.unload_asked(state, event.ticket)


@_apply.register
def _(event: ev.FloorSet, state: CoreState) -> None:
    floors.on_set(state, event)
    state.ledger.changed.update(state.nodes)  # who may be a victim has changed


@_apply.register
def _(event: ev.LoadAsked, state: CoreState) -> None:
    floors.on_load_asked(state, event)


@_apply.register
def _(event: ev.PressurePushed, state: CoreState) -> None:
    pressure.on_pushed(state, event)


@_apply.register
def _(_event: ev.ClosingDown, state: CoreState) -> None:
    timeouts.start_closing(state)


@_apply.register
def _(_event: ev.TimerFired, _: CoreState) -> None:
    pass
