"""The demand behind a recorded life: who wanted what when, and what it took.

A recording holds what happened *because* of what was decided, so under another policy its later
events would be wrong. What carries over is the demand: requests for models that were not there,
use as heartbeats told it (to the second), and seconds of loads, wakes and unloads as they were.
Leases, pressure and memory of others are left out.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Revoke
from arbiter.errors import ArbiterError
from arbiter.replay.demand import Demand, Seat, Use, Uses
from arbiter.server.recording import Step
from arbiter.units import SECOND, Bytes, HolderId, Instant, NodeId, Span, TicketId

Key = tuple[str, str, NodeId]  # capability, model, node
BEAT = SECOND  # a use told by a heartbeat lasts until the next


class NothingLoaded(ArbiterError):
    def __str__(self) -> str:
        return "nothing was loaded in this recording, so there is nothing to compare"


@dataclass(slots=True)
class _Seen:
    """One seat as its events come by."""

    need: types.Need
    last_used: Instant = Instant(-1)
    loads: list[int] = field(default_factory=list)
    wakes: list[int] = field(default_factory=list)
    sleeps: list[int] = field(default_factory=list)
    unloads: list[int] = field(default_factory=list)


def demand_of(steps: Iterable[Step]) -> Demand:
    """Raises NothingLoaded."""
    reader = _Reader()
    for step in steps:
        reader.read(step)
        reader.note_orders(step)
    return reader.demand()


class _Reader:
    def __init__(self) -> None:
        self._nodes: dict[NodeId, ev.NodeSeen] = {}
        self._configured: dict[str, types.CapabilitySpec] = {}  # of the table
        self._registered: dict[str, types.CapabilitySpec] = {}  # from Python
        self._homes: dict[HolderId, tuple[NodeId, str]] = {}
        self._keys: dict[TicketId, Key] = {}
        self._seen: dict[Key, _Seen] = {}
        self._uses: list[tuple[int, Key, int]] = []
        self._awake_once: set[TicketId] = set()
        self._revoked_at: dict[TicketId, Instant] = {}
        self._began: Instant | None = None

    def read(self, step: Step) -> None:
        match step.event:
            case ev.NodeSeen(node):
                self._nodes[node] = step.event
            case ev.CapabilitiesSet() | ev.CapabilityRegistered() | ev.CapabilityUnregistered():
                self._set_capabilities(step.event)
            case ev.Joined() | ev.Renewed():
                self._heard(step.event, step.at)
            case ev.Requested():
                self._asked(step.event, step.at)
            case ev.Loaded(ticket, took):
                self._took(ticket, took)
            case ev.Slept(ticket):
                self._left(ticket, step.at, asleep=True)
            case ev.EngineGone(_, ticket):
                self._left(ticket, step.at, asleep=False)

    def note_orders(self, step: Step) -> None:
        self._began = step.at if self._began is None else self._began
        for decision in step.decisions:
            if isinstance(decision, Revoke):
                self._revoked_at.setdefault(decision.ticket, step.at)

    def _set_capabilities(
        self, event: ev.CapabilitiesSet | ev.CapabilityRegistered | ev.CapabilityUnregistered
    ) -> None:
        match event:
            case ev.CapabilitiesSet(capabilities):
                self._configured = {spec.name: spec for spec in capabilities}
            case ev.CapabilityRegistered(spec):
                self._registered[spec.name] = spec
            case ev.CapabilityUnregistered(name):
                self._registered.pop(name, None)

    def _asked(self, event: ev.Requested, at: Instant) -> None:
        home = self._homes.get(event.holder)
        if home is None:
            return
        key = (event.capability, event.model, home[0])
        self._keys[event.ticket] = key
        seen = self._seen.setdefault(key, _Seen(event.need))
        if at - seen.last_used >= BEAT:  # not the same request once more
            seen.last_used = at
            self._uses.append((at, key, 0))

    def _heard(self, event: ev.Joined | ev.Renewed, at: Instant) -> None:
        if isinstance(event, ev.Joined):
            self._homes[event.holder] = (event.node, event.capability)
        node, capability = self._homes.get(event.holder, (None, ""))
        if node is None:
            return
        for held in event.tickets:
            key = (capability, held.model, node)
            self._keys[held.ticket] = key
            seen = self._seen.setdefault(key, _Seen(held.need))
            if held.phase is types.Phase.RESIDENT:
                self._used(key, seen, held, at)

    def _used(self, key: Key, seen: _Seen, held: ev.HeldTicket, at: Instant) -> None:
        last = at if held.inflight else at - held.idle
        if last - seen.last_used >= BEAT // 2:  # idle times jitter by the way they took
            seen.last_used = Instant(last)
            self._uses.append((last, key, BEAT if held.inflight else 0))

    def _took(self, ticket: TicketId, took: Span) -> None:
        if key := self._keys.get(ticket):
            times = self._seen[key].wakes if ticket in self._awake_once else self._seen[key].loads
            times.append(took)
            self._awake_once.add(ticket)
        self._revoked_at.pop(ticket, None)

    def _left(self, ticket: TicketId, at: Instant, *, asleep: bool) -> None:
        revoked, key = self._revoked_at.pop(ticket, None), self._keys.get(ticket)
        if revoked is not None and key:
            times = self._seen[key].sleeps if asleep else self._seen[key].unloads
            times.append(at - revoked)

    # -- the sum of it -------------------------------------------------------------------------

    def demand(self) -> Demand:
        """Times begin with the recording. What a seat never showed is taken from the others."""
        began = self._began or Instant(0)
        usual = self._usual()
        known = self._configured | self._registered
        keys = sorted(key for key in self._seen if key[0] in known and key[2] in self._nodes)
        place = {key: n for n, key in enumerate(keys)}
        uses = (
            Use(Instant(max(0, at - began)), place[key], Span(busy))
            for at, key, busy in self._uses
            if key in place
        )
        seats = tuple(self._seat(key, usual) for key in keys)
        table = ev.CapabilitiesSet(tuple(known.values()))
        return Demand(tuple(self._nodes.values()), table, seats, Uses(uses))

    def _usual(self) -> _Seen:
        every = _Seen(types.Need(Bytes(0)))
        for seen in self._seen.values():
            every.loads += seen.loads
            every.wakes += seen.wakes
            every.sleeps += seen.sleeps
            every.unloads += seen.unloads
        if not every.loads:
            raise NothingLoaded
        return every

    def _seat(self, key: Key, usual: _Seen) -> Seat:
        capability, model, node = key
        seen = self._seen[key]
        return Seat(
            capability,
            model,
            node,
            seen.need,
            load=_median(seen.loads or usual.loads),
            wake=_median(seen.wakes or usual.wakes),
            sleep=_median(seen.sleeps or usual.sleeps),
            unload=_median(seen.unloads or usual.unloads),
        )


def _median(times: list[int]) -> Span:
    return Span(round(statistics.median(times))) if times else Span(0)


__all__ = ["NothingLoaded", "demand_of"]
