"""Holders and agents that do what the core decides, in virtual time and without faults.

One holder per seat. As in production the warm path tells the core nothing: a request on a resident
model only keeps it in use, and the core hears of it by the heartbeat at the next full second. Of
heartbeats only those that say something new are sent, which halves what a replay takes.
"""

import heapq
import itertools
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.arbiter import Arbiter
from arbiter.core.decisions import (
    Decision,
    Grant,
    KillEngine,
    Refuse,
    RequestReading,
    Revoke,
    SetTimer,
    Tier,
)
from arbiter.core.settings import Settings
from arbiter.core.view import Policies
from arbiter.replay.demand import Demand, Seat
from arbiter.replay.score import Score, Tally
from arbiter.units import (
    SECOND,
    Bytes,
    Epoch,
    HolderId,
    Instant,
    NodeId,
    Span,
    TicketId,
    after,
    host_device,
)

NEVER = Instant(1 << 62)
EMPTY = array("q")
NO_TICKET = TicketId("")
PATIENCE = Span(NEVER // 4)  # no holder falls silent here, so none needs a heartbeat to live


class HolderState(Enum):
    COLD = "cold"
    WAITING = "waiting"
    LOADING = "loading"
    RESIDENT = "resident"
    DRAINING = "draining"
    ASLEEP = "asleep"


@dataclass(slots=True)
class SimulatedHolder:
    """Describes a holder of one model, as it stands."""

    seat: Seat
    holder: HolderId
    state: HolderState = HolderState.COLD
    ticket: TicketId = NO_TICKET
    home: tuple[types.DeviceBytes, ...] = ()
    is_wake: bool = False
    uses_count: int = 0
    busy_until: Instant = Instant(0)
    waiters: list[tuple[Instant, Span]] = field(default_factory=list)
    beats_at: Instant = NEVER  # its next heartbeat on the agenda


class World:
    """Runs once. `counted_from`: what happens earlier warms the books and is not scored. `usage`:
    what the core knows of uses already, as parts of what `Arbiter.export_usage` returns."""

    def __init__(
        self,
        demand: Demand,
        settings: Settings,
        policies: Policies,
        counted_from: Instant = Instant(0),
        usage: Mapping[str, Any] | None = None,
    ) -> None:
        self._demand, self._tally = demand, Tally(counted_from)
        self.now = Instant(0)
        terms = replace(
            settings.timeouts, silent=PATIENCE, reading=PATIENCE, lost=PATIENCE, audit=PATIENCE
        )
        patient = replace(settings, timeouts=terms)
        self.core = Arbiter(patient, policies, Epoch(1), frozenset(), Instant(0), self.next_use)
        if usage:
            self.core.restore_usage(self.core.export_usage() | dict(usage))
        self._simulated = [
            SimulatedHolder(seat, HolderId(f"{seat.capability}-{n}"))
            for n, seat in enumerate(demand.seats)
        ]
        self._tickets: dict[TicketId, SimulatedHolder] = {}
        self._wanted = demand.wanted()
        self._agenda: list[tuple[Instant, int, Callable[[], None]]] = []
        self._sequence = itertools.count()
        self._numbers = itertools.count()
        self._woken_at = NEVER

    def run(self) -> Score:
        self._introduce()
        for at, seat, busy in self._demand.uses:
            self._until(at)
            self.now = at
            self._arrive(self._simulated[seat], busy)
        self._until(after(self._demand.uses.end, self.core.settings.timeouts.load))
        self._tally.refused_count += sum(
            self._counts(at) for d in self._simulated for at, _ in d.waiters
        )
        return self._tally.score()

    def next_use(self, name: types.ModelName, now: Instant) -> Instant | None:
        """Returns when a model is asked for next; None: never. This is the foresight of policies
        that are yardsticks."""
        times = self._wanted.get(name, EMPTY)
        index = bisect_right(times, now)
        return Instant(times[index]) if index < len(times) else None

    # -- time ----------------------------------------------------------------------------------

    def _at(self, when: Instant, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (when, next(self._sequence), action))

    def _later(self, span: Span, action: Callable[[], None]) -> None:
        self._at(after(self.now, span), action)

    def _until(self, end: Instant) -> None:
        while self._agenda and self._agenda[0][0] <= end:
            self.now, _, action = heapq.heappop(self._agenda)
            action()

    def _feed(self, event: ev.Event) -> None:
        for decision in self.core.handle(event, self.now):
            self._perform(decision)

    def _tell(self, event: ev.Event) -> None:
        """Has the core handle an event now, but after what is being performed."""
        self._later(Span(0), lambda: self._feed(event))

    # -- requests ------------------------------------------------------------------------------

    def _introduce(self) -> None:
        self._feed(self._demand.table)
        for node in self._demand.nodes:
            self._feed(node)
            self._read(node)
        for simulated in self._simulated:
            self._feed(
                ev.Joined(simulated.holder, simulated.seat.node, simulated.seat.capability, ())
            )

    def _counts(self, at: Instant) -> bool:
        return at >= self._tally.since

    def _arrive(self, simulated: SimulatedHolder, busy: Span) -> None:
        self._tally.requests_count += self._counts(self.now)
        if simulated.state is HolderState.RESIDENT:
            self._use(simulated, busy)
            return
        simulated.waiters.append((self.now, busy))
        if simulated.state in (HolderState.COLD, HolderState.ASLEEP):
            self._ask(simulated)

    def _use(self, simulated: SimulatedHolder, busy: Span) -> None:
        simulated.uses_count += 1
        simulated.busy_until = max(simulated.busy_until, after(self.now, busy))
        self._beat_by(simulated, _next_second(self.now))

    def _beat_by(self, simulated: SimulatedHolder, by: Instant) -> None:
        if by < simulated.beats_at:
            simulated.beats_at = by
            self._at(by, lambda: self._beat(simulated))

    def _beat(self, simulated: SimulatedHolder) -> None:
        """Sends a heartbeat at the full second after a use, and once more to say since when the
        model is not in use."""
        if self.now != simulated.beats_at:  # an earlier one has said it
            return
        simulated.beats_at = NEVER
        if simulated.state is not HolderState.RESIDENT:
            return
        inflight, idle = (
            int(simulated.busy_until > self.now),
            Span(max(0, self.now - simulated.busy_until)),
        )
        held = ev.HeldTicket(
            simulated.ticket,
            simulated.seat.model,
            types.Phase.RESIDENT,
            inflight,
            idle,
            simulated.home,
            simulated.seat.need,
            priority=simulated.seat.priority,
            uses_count=simulated.uses_count,
        )
        if inflight:
            self._beat_by(simulated, _next_second(Instant(simulated.busy_until - 1)))
        self._feed(ev.Renewed(simulated.holder, (held,)))

    def _ask(self, simulated: SimulatedHolder) -> None:
        if simulated.state is HolderState.COLD:
            simulated.uses_count = 0
            simulated.ticket = TicketId(f"{simulated.seat.model}.{next(self._numbers)}")
            self._tickets[simulated.ticket] = simulated
        simulated.is_wake = simulated.state is HolderState.ASLEEP
        simulated.state = HolderState.WAITING
        seat = simulated.seat
        request = ev.Requested(
            simulated.ticket,
            simulated.holder,
            seat.capability,
            seat.model,
            seat.need,
            need_is_explicit=True,
            priority=seat.priority,
        )
        self._feed(request)

    # -- what the core decides -----------------------------------------------------------------

    def _perform(self, decision: Decision) -> None:
        match decision:
            case Grant(ticket, devices):
                self._granted(self._tickets[ticket], devices)
            case Refuse(ticket):
                self._refused(self._tickets[ticket])
            case Revoke():
                self._revoked(decision)
            case KillEngine(node, ticket):
                self._kill_engine(node, ticket)
            case RequestReading():
                self._later(Span(0), self._read_all)
            case SetTimer(at) if at < self._woken_at:
                self._woken_at = at
                self._at(at, self._fire_timer)

    def _fire_timer(self) -> None:
        if self.now >= self._woken_at:
            self._woken_at = NEVER
            self._feed(ev.TimerFired())

    def _granted(self, simulated: SimulatedHolder, devices: tuple[types.DeviceBytes, ...]) -> None:
        if simulated.state is not HolderState.WAITING:
            return
        simulated.state, simulated.home = HolderState.LOADING, devices
        took = simulated.seat.wake if simulated.is_wake else simulated.seat.load
        ticket = simulated.ticket
        self._later(took, lambda: self._loaded(simulated, ticket, took))

    def _loaded(self, simulated: SimulatedHolder, ticket: TicketId, took: Span) -> None:
        if simulated.ticket != ticket or simulated.state is not HolderState.LOADING:
            return
        if self._counts(self.now):
            self._tally.loads_count += not simulated.is_wake
            self._tally.wakes_count += simulated.is_wake
            self._tally.loading = Span(self._tally.loading + took)
            self._tally.moved_bytes += sum(d.size_bytes for d in simulated.home)
        self._serve(simulated)
        self._feed(ev.Loaded(ticket, took))
        if simulated.is_wake:
            self._read_all()  # its copy in host RAM is gone

    def _serve(self, simulated: SimulatedHolder) -> None:
        simulated.state = HolderState.RESIDENT
        waiters, simulated.waiters = simulated.waiters, []
        for came, busy in waiters:
            if self._counts(came):
                self._tally.waits.append(self.now - came)
            self._use(simulated, busy)

    def _refused(self, simulated: SimulatedHolder) -> None:
        self._tally.refused_count += sum(self._counts(at) for at, _ in simulated.waiters)
        simulated.waiters.clear()
        simulated.state = HolderState.ASLEEP if simulated.is_wake else HolderState.COLD

    # -- leaving -------------------------------------------------------------------------------

    def _revoked(self, revoke: Revoke) -> None:
        simulated = self._tickets.get(revoke.ticket)
        if simulated is None or simulated.ticket != revoke.ticket:
            return
        if simulated.state is not HolderState.RESIDENT:  # taken: its engine is being ended
            self._leave(simulated)
            return
        self._tally.evictions_count += self._counts(self.now) and not revoke.reason.only_if_idle
        if revoke.reason.only_if_idle and simulated.busy_until > self.now:
            self._tell(ev.Busy(simulated.ticket, 1))
        elif simulated.busy_until > revoke.barrier_until:
            simulated.state = HolderState.DRAINING
            self._at(revoke.barrier_until, lambda: self._drop_barrier(simulated, revoke.ticket))
        else:
            simulated.state = HolderState.DRAINING
            self._at(max(self.now, simulated.busy_until), lambda: self._empty(simulated, revoke))

    def _drop_barrier(self, simulated: SimulatedHolder, ticket: TicketId) -> None:
        if simulated.ticket != ticket or simulated.state is not HolderState.DRAINING:
            return
        self._feed(ev.BarrierDropped(ticket, 1))
        self._serve(simulated)
        self._beat_by(simulated, _next_second(self.now))

    def _empty(self, simulated: SimulatedHolder, revoke: Revoke) -> None:
        """Notes that nothing is in flight any more at a holder."""
        if simulated.ticket != revoke.ticket or simulated.state is not HolderState.DRAINING:
            return
        if revoke.to is Tier.ASLEEP:
            self._later(simulated.seat.sleep, lambda: self._slept(simulated, revoke.ticket))
        else:
            self._later(simulated.seat.unload, lambda: self._unloaded(simulated, revoke))

    def _slept(self, simulated: SimulatedHolder, ticket: TicketId) -> None:
        if simulated.ticket != ticket or simulated.state is not HolderState.DRAINING:
            return
        simulated.state = HolderState.ASLEEP
        self._feed(ev.Slept(ticket))  # the core asks for a reading to see it
        if simulated.waiters:
            self._later(Span(1), lambda: self._ask_awake(simulated, ticket))

    def _ask_awake(self, simulated: SimulatedHolder, ticket: TicketId) -> None:
        if simulated.ticket == ticket and simulated.state is HolderState.ASLEEP:
            self._ask(simulated)

    def _unloaded(self, simulated: SimulatedHolder, revoke: Revoke) -> None:
        if simulated.ticket == revoke.ticket:
            self._feed(ev.Released(revoke.ticket, revoke.reason.value))
            self._leave(simulated)

    def _kill_engine(self, node: NodeId, ticket: TicketId) -> None:
        """Ends what is left and says so; the unload's own seconds have passed already."""
        if (simulated := self._tickets.get(ticket)) and simulated.ticket == ticket:
            self._leave(simulated)
        self._later(Span(0), lambda: self._gone(node, ticket))

    def _gone(self, node: NodeId, ticket: TicketId) -> None:
        if self._tickets.pop(ticket, None):
            self._feed(ev.EngineGone(node, ticket, bytes_back=True))

    def _leave(self, simulated: SimulatedHolder) -> None:
        """Makes the model cold; its waiters ask anew under another ticket."""
        if simulated.state is HolderState.COLD:
            return
        simulated.state, simulated.home = HolderState.COLD, ()
        if simulated.waiters:
            self._later(Span(0), lambda: self._ask_if_cold(simulated))

    def _ask_if_cold(self, simulated: SimulatedHolder) -> None:
        if simulated.state is HolderState.COLD and simulated.waiters:
            self._ask(simulated)

    # -- readings ------------------------------------------------------------------------------

    def _read_all(self) -> None:
        for node in self._demand.nodes:
            self._read(node)

    def _read(self, node: ev.NodeSeen) -> None:
        """Takes a reading, in which every engine holds exactly what it was granted."""
        devices = tuple(ev.DeviceReading(d.device, d.total_bytes, Bytes(0)) for d in node.devices)
        on_node = [
            d
            for d in self._simulated
            if d.seat.node == node.node and d.state is not HolderState.COLD
        ]
        engines = tuple(ev.EngineReading(d.ticket, _held(d)) for d in on_node if _held(d))
        self._feed(ev.Measured(node.node, devices, engines))


def _held(simulated: SimulatedHolder) -> tuple[types.DeviceBytes, ...]:
    if simulated.state is HolderState.ASLEEP or (
        simulated.state is HolderState.WAITING and simulated.is_wake
    ):
        host = host_device(simulated.seat.node)
        return (types.DeviceBytes(host, simulated.seat.need.host_bytes),)
    return simulated.home


def _next_second(now: Instant) -> Instant:
    return Instant((now // SECOND + 1) * SECOND)
