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
        self._mind = mind = CoreState(settings, policies, epoch, known_holders, now)
        mind.foresight = foresight
        mind.alarms.set(("line", ""), mind.settled_at)
        mind.alarms.set(("audit", ""), after(now, settings.terms.audit))

    def handle(self, event: ev.Event, now: Instant) -> list[Decision]:
        """Raises CapabilityConflict, having changed nothing, for a CapabilityRegistered that
        differs from what is known."""
        mind = self._mind
        assert now >= mind.now, "time went back"
        mind.now, mind.out = now, []
        _apply.registry.get(type(event), _apply)(event, mind)  # its own look-up takes 0.5 us
        timeouts.fire_due(mind)
        eviction.evict_overcommitted(mind)
        growth.grant_waiting(mind)
        grant_pass.run(mind)
        wait_estimate.estimate_new(mind)
        floors.forget_removed(mind)
        prefetch.predict_next(mind)
        mind.accounts.settle(mind.ledger.holdings, mind.now)
        mind.ledger.check_touched()
        if (at := mind.alarms.next()) is not None:
            mind.say(SetTimer(max(at, after(now, NEXT))))
        return mind.out

    # -- reading -------------------------------------------------------------------------------

    @property
    def epoch(self) -> Epoch:
        return self._mind.epoch

    @property
    def settings(self) -> Settings:
        return self._mind.settings

    @property
    def stale_count(self) -> int:
        return self._mind.stale_count

    @property
    def awaited(self) -> frozenset[HolderId]:
        """Holders of the last epoch that are not back."""
        return frozenset(self._mind.awaited)

    @property
    def gave_up_waiting(self) -> bool:
        """Those who are not back are as good as dead."""
        return self._mind.gave_up_waiting

    def state_of(self, ticket: TicketId) -> str:
        """`closed` for one that is not on the books."""
        entry = self._mind.ledger.find(ticket)
        return entry.state.value if entry else State.CLOSED.value

    def holder_of(self, ticket: TicketId) -> HolderId | None:
        """None: it is not on the books."""
        entry = self._mind.ledger.find(ticket)
        return entry.holder if entry else None

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        return tuple(sorted(self._mind.nodes))

    def snapshot(self, now: Instant) -> StateView:
        return view_of(self._mind, now)

    def explain(self, ticket: TicketId, now: Instant) -> Explanation:
        """Why it waits, or why it went. Raises UnknownTicket."""
        return explain(self._mind, ticket, now)

    def replica_targets(self, now: Instant) -> dict[str, int]:
        """Replicas wanted of each capability; WakeAt also comes when one of these changes."""
        return replica_targets.targets(self._mind, now)

    def export_learned(self) -> list[dict[str, Any]]:
        """What was learned, as plain rows."""
        return self._mind.estimates.export()

    def export_floors(self) -> list[list[str]]:
        """Capability, model, floor."""
        return [[*name, floor.value] for name, floor in sorted(self._mind.floors.items())]

    def export_accounts(self) -> list[list[Any]]:
        """What clients have used (SPEC C10)."""
        return self._mind.accounts.export()

    def restore_accounts(self, rows: list[list[Any]]) -> None:
        self._mind.accounts.restore(rows, self._mind.now)

    def restore_floors(self, rows: list[list[str]]) -> None:
        for capability, model, floor in rows:
            self._mind.floors[(capability, model)] = types.Floor(floor)

    def restore_learned(self, rows: list[dict[str, Any]]) -> None:
        self._mind.estimates.restore(rows)


# -- the events -----------------------------------------------------------------------------------


@singledispatch
def _apply(event: ev.Event, _: CoreState) -> None:
    raise TypeError(f"unknown event {event!r}")


@_apply.register
def _(event: ev.CapabilitiesSet, mind: CoreState) -> None:
    before = tuple(mind.registry.specs.values())
    mind.registry.replace(event.capabilities)
    floors.note_removed(mind, before)
    admission.reject_removed_models(mind)
    for entry in mind.ledger.entries(*CHARGED):
        heartbeats.apply_configuration(mind, entry)
        mind.watch(entry, mind.now)
    readings.rebudget(mind)
    device_limits.cap_pins(mind, mind.ledger.books)
    mind.ledger.changed.update(mind.nodes)
    device_limits.flag_pinned(mind, mind.ledger.books)


@_apply.register
def _(event: ev.CapabilityRegistered, mind: CoreState) -> None:
    mind.registry.register(event.capability)
    readings.rebudget(mind)


@_apply.register
def _(event: ev.NodeSeen, mind: CoreState) -> None:
    readings.on_node_seen(mind, event)
    device_limits.flag_pinned(mind, [spec.device for spec in event.devices])


@_apply.register
def _(event: ev.NodeLost, mind: CoreState) -> None:
    readings.on_node_lost(mind, event)
    for holder in [h for h in mind.holders.values() if h.node == event.node]:
        heartbeats.on_lost(mind, holder.holder)


@_apply.register
def _(event: ev.Measured, mind: CoreState) -> None:
    readings.on_measured(mind, event)


@_apply.register
def _(event: ev.EngineGone, mind: CoreState) -> None:
    readings.on_engine_gone(mind, event)


@_apply.register
def _(event: ev.Joined, mind: CoreState) -> None:
    heartbeats.on_joined(mind, event)
    floors.on_join(mind, event.capability)


@_apply.register
def _(event: ev.Renewed, mind: CoreState) -> None:
    heartbeats.on_renewed(mind, event)


@_apply.register
def _(event: ev.HolderLost, mind: CoreState) -> None:
    heartbeats.on_lost(mind, event.holder)


@_apply.register
def _(event: ev.Requested, mind: CoreState) -> None:
    admission.on_requested(mind, event)


@_apply.register
def _(event: ev.GrowthAsked, mind: CoreState) -> None:
    growth.on_growth_asked(mind, event)


@_apply.register
def _(event: ev.GaveBack, mind: CoreState) -> None:
    growth.on_gave_back(mind, event)


@_apply.register
def _(event: ev.Withdrawn, mind: CoreState) -> None:
    loads.on_withdrawn(mind, event)


@_apply.register
def _(event: ev.Loaded, mind: CoreState) -> None:
    if entry := mind.live(event.ticket, State.LOADING):
        loads.on_loaded(mind, entry, event.took, verified=event.verified)


@_apply.register
def _(event: ev.LoadBroke, mind: CoreState) -> None:
    loads.note_cause(mind, event)
    if entry := mind.live(event.ticket, State.LOADING):
        loads.on_load_failed(mind, entry, event.cause, event.out_of_memory)


@_apply.register
def _(event: ev.Busy, mind: CoreState) -> None:
    if entry := mind.live(event.ticket, State.DRAINING):
        reason = entry.leaving
        eviction.victim_declined(mind, entry, "victim_busy", event.inflight)
        if reason is Reason.PRESSURE:
            pressure.evict_next(mind, entry)


@_apply.register
def _(event: ev.BarrierDropped, mind: CoreState) -> None:
    if entry := mind.live(event.ticket, State.DRAINING):
        eviction.victim_declined(mind, entry, "barrier_dropped", event.inflight)


@_apply.register
def _(event: ev.Slept, mind: CoreState) -> None:
    if entry := mind.live(event.ticket, State.DRAINING):
        sleep.on_slept(mind, entry)


@_apply.register
def _(event: ev.Released, mind: CoreState) -> None:
    reclaim.on_released(mind, event)


@_apply.register
def _(event: ev.UnloadAsked, mind: CoreState) -> None:
    timeouts.unload_asked(mind, event.ticket)


@_apply.register
def _(event: ev.FloorSet, mind: CoreState) -> None:
    floors.on_set(mind, event)
    mind.ledger.changed.update(mind.nodes)  # who may be a victim has changed


@_apply.register
def _(event: ev.LoadAsked, mind: CoreState) -> None:
    floors.on_load_asked(mind, event)


@_apply.register
def _(event: ev.PressurePushed, mind: CoreState) -> None:
    pressure.on_pushed(mind, event)


@_apply.register
def _(_event: ev.ClosingDown, mind: CoreState) -> None:
    timeouts.start_closing(mind)


@_apply.register
def _(_event: ev.TimerFired, _: CoreState) -> None:
    pass
