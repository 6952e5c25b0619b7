"""The demand behind the events of a core: who wanted what when, and what it took. The events are a
recording's, or those of a living arbiter as they come.

A recording holds what happened *because* of what was decided, so under another policy its later
events would be wrong. What carries over is the demand: requests for models that were not there,
use as heartbeats told it (to the second), and seconds of loads, wakes and unloads as they were.
Leases, pressure and memory of others are left out.
"""

import statistics
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Decision, Refuse, Revoke
from arbiter.errors import ArbiterError
from arbiter.replay.demand import Demand, PackedRequests, Seat, Use
from arbiter.server.recording import Step
from arbiter.units import SECOND, Bytes, HolderId, Instant, NodeId, Span, TicketId, seconds

Key = tuple[str, str, NodeId]  # capability, model, node
BEAT = SECOND  # a use told by a heartbeat lasts until the next
DAY = seconds(86_400)
# Of a living arbiter, the newest uses: 1.2 MB, and some four seconds of a replay for each policy.
# They are a day of fourteen hours in which one model is in use, less with more models.
LIVE_USES_COUNT = 50_000
TICKETS_COUNT = 20_000  # twice what the queue holds (settings.queue_total_count)
TIMES_COUNT = 128  # of a seat's loads, the newest; their median moves no more with more of them


class NothingLoaded(ArbiterError):
    def __str__(self) -> str:
        return "nothing was loaded in this recording, so there is nothing to compare"


@dataclass(slots=True)
class _SeatHistory:
    """Keeps what has happened at one seat, as its events come by."""

    need: types.Need
    last_used: Instant = Instant(-1)
    loads: deque[int] = field(default_factory=lambda: deque(maxlen=TIMES_COUNT))
    wakes: deque[int] = field(default_factory=lambda: deque(maxlen=TIMES_COUNT))
    sleeps: deque[int] = field(default_factory=lambda: deque(maxlen=TIMES_COUNT))
    unloads: deque[int] = field(default_factory=lambda: deque(maxlen=TIMES_COUNT))


class _UseLog:
    """Keeps uses packed, so that 50,000 of them are copied and pickled within a millisecond."""

    def __init__(self, most_count: int | None) -> None:
        self._most_count = most_count
        self._keys: list[Key] = []
        self._places: dict[Key, int] = {}
        self._packed = array("q")  # instant, place of the key, span in use; again and again
        self.noted_count = 0
        self.kept_since = Instant(0)  # older ones were dropped

    def append(self, at: int, key: Key, busy: int) -> None:
        """Notes a use. Beyond `most_count` uses, the oldest tenth goes."""
        if key not in self._places:
            self._places[key] = len(self._keys)
            self._keys.append(key)
        self._packed.extend((at, self._places[key], busy))
        self.noted_count += 1
        if self._most_count is not None and len(self._packed) > 3 * self._most_count:
            del self._packed[: 3 * max(1, self._most_count // 10)]
            self.kept_since = Instant(self._packed[0])

    def keep_used(self) -> set[Key]:
        """Forgets keys of which no use is kept, and returns the others."""
        places = self._packed[1::3]
        used = sorted(set(places))
        moved = {old: new for new, old in enumerate(used)}
        self._keys = [self._keys[old] for old in used]
        self._places = {key: place for place, key in enumerate(self._keys)}
        self._packed[1::3] = array("q", (moved[place] for place in places))
        return set(self._keys)

    def since(self, at: Instant) -> Iterator[tuple[int, Key, int]]:
        packed = self._packed
        for begins in range(0, len(packed), 3):
            if packed[begins] >= at:
                yield packed[begins], self._keys[packed[begins + 1]], packed[begins + 2]


def demand_of(steps: Iterable[Step]) -> Demand:
    """Returns what a replay of recorded steps needs. Raises NothingLoaded."""
    reader = DemandReader()
    for step in steps:
        reader.read(step.event, step.at, step.decisions)
    return reader.demand()


class DemandReader:
    """Reads the events of one epoch in their order. Of those of a living arbiter it keeps
    `most_uses_count` uses; what else it keeps is bounded by models, holders and open tickets."""

    def __init__(self, most_uses_count: int | None = None) -> None:
        self._nodes: dict[NodeId, ev.NodeSeen] = {}
        self._nodes_left: set[NodeId] = set()  # of these
        self._configured: dict[str, types.CapabilitySpec] = {}  # of the table
        self._registered: dict[str, types.CapabilitySpec] = {}  # from Python
        self._homes: dict[HolderId, tuple[NodeId, str]] = {}
        self._keys: dict[TicketId, Key] = {}
        self._seen: dict[Key, _SeatHistory] = {}
        self._uses = _UseLog(most_uses_count)
        self._awake_once: set[TicketId] = set()
        self._revoked_at: dict[TicketId, Instant] = {}
        self._began: Instant | None = None

    @property
    def uses_count(self) -> int:
        """Returns how many uses were noted so far, those that are forgotten among them."""
        return self._uses.noted_count

    def began(self, since: Instant) -> Instant:
        """Returns when the demand from `since` on begins: with the oldest event, or with the oldest
        use that is kept."""
        return max(self._began or Instant(0), self._uses.kept_since, since)

    def read(self, event: ev.Event, at: Instant, decisions: Iterable[Decision]) -> None:
        self._began = at if self._began is None else self._began
        match event:
            case ev.NodeSeen(node):
                self._nodes[node] = event
                self._nodes_left.discard(node)
            case ev.NodeLost(node):
                self._node_left(node)
            case ev.CapabilitiesSet() | ev.CapabilityRegistered() | ev.CapabilityUnregistered():
                self._set_capabilities(event)
            case ev.Joined() | ev.Renewed():
                self._heard(event, at)
            case ev.Requested():
                self._asked(event, at)
            case ev.HolderLost(holder):
                self._homes.pop(holder, None)
            case _:
                self._note_ticket(event, at)
        self._note_orders(decisions, at)

    def _node_left(self, node: NodeId) -> None:
        """Notes that a node has left. What it was asked for is demand as well, so it is forgotten
        only once no such use is kept."""
        self._nodes_left |= {node} & self._nodes.keys()
        used = {key[2] for key in self._uses.keep_used()}
        gone = self._nodes_left - used
        self._nodes_left -= gone
        for name in gone:
            del self._nodes[name]
        for key in [key for key in self._seen if key[2] in gone]:
            del self._seen[key]
        for ticket in [ticket for ticket, key in self._keys.items() if key[2] in gone]:
            self._forget(ticket)

    def _note_ticket(self, event: ev.Event, at: Instant) -> None:
        match event:
            case ev.Loaded(ticket, took):
                self._took(ticket, took)
            case ev.Slept(ticket):
                self._left(ticket, at, asleep=True)
            case ev.EngineGone(_, ticket):
                self._left(ticket, at, asleep=False)
                self._forget(ticket)
            case ev.Withdrawn(ticket):
                self._forget_unloaded(ticket)

    def _note_orders(self, decisions: Iterable[Decision], at: Instant) -> None:
        for decision in decisions:
            match decision:
                case Revoke(ticket) if ticket in self._keys:
                    self._revoked_at.setdefault(ticket, at)
                case Refuse(ticket):
                    self._forget_unloaded(ticket)

    def _remember(self, ticket: TicketId, key: Key) -> None:
        self._keys[ticket] = key
        if len(self._keys) > TICKETS_COUNT:  # some ended in a way that is not told here
            self._forget(next(iter(self._keys)))

    def _forget_unloaded(self, ticket: TicketId) -> None:
        """Forgets a ticket that was refused before it loaded. A ticket that was loaded goes on:
        what was refused is its wake or its growth."""
        if ticket not in self._awake_once:
            self._forget(ticket)

    def _forget(self, ticket: TicketId) -> None:
        self._keys.pop(ticket, None)
        self._awake_once.discard(ticket)
        self._revoked_at.pop(ticket, None)

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
        if home is None or event.lease is not None:  # a replay leaves leases out
            return
        key = (event.capability, event.model, home[0])
        self._remember(event.ticket, key)
        seat = self._seen.setdefault(key, _SeatHistory(event.need))
        if at - seat.last_used >= BEAT:  # not the same request once more
            seat.last_used = at
            self._uses.append(at, key, 0)

    def _heard(self, event: ev.Joined | ev.Renewed, at: Instant) -> None:
        if isinstance(event, ev.Joined):
            self._homes[event.holder] = (event.node, event.capability)
        node, capability = self._homes.get(event.holder, (None, ""))
        if node is None:
            return
        for held in [h for h in event.tickets if h.lease is None]:
            key = (capability, held.model, node)
            self._remember(held.ticket, key)
            seat = self._seen.setdefault(key, _SeatHistory(held.need))
            if held.phase is types.Phase.RESIDENT:
                self._used(key, seat, held, at)

    def _used(self, key: Key, seat: _SeatHistory, held: ev.HeldTicket, at: Instant) -> None:
        last = at if held.inflight else at - held.idle
        if last - seat.last_used >= BEAT // 2:  # idle times jitter by the way they took
            seat.last_used = Instant(last)
            self._uses.append(last, key, BEAT if held.inflight else 0)

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

    def demand(self, since: Instant = Instant(0)) -> Demand:
        """Times begin with the recording, or with `since`. What a seat never showed is taken from
        the others. Raises NothingLoaded."""
        began = self.began(since)
        usual = self._usual()
        needs = self._configured | self._registered
        keys = sorted(key for key in self._seen if key[0] in needs and key[2] in self._nodes)
        place = {key: n for n, key in enumerate(keys)}
        uses = (
            Use(Instant(max(0, at - began)), place[key], Span(busy))
            for at, key, busy in self._uses.since(since)
            if key in place
        )
        seats = tuple(self._seat(key, usual) for key in keys)
        table = ev.CapabilitiesSet(tuple(needs.values()))
        return Demand(tuple(self._nodes.values()), table, seats, PackedRequests(uses))

    def _usual(self) -> _SeatHistory:
        every = _SeatHistory(types.Need(Bytes(0)), Instant(-1), deque(), deque(), deque(), deque())
        for seat in self._seen.values():
            every.loads += seat.loads
            every.wakes += seat.wakes
            every.sleeps += seat.sleeps
            every.unloads += seat.unloads
        if not every.loads:
            raise NothingLoaded
        return every

    def _seat(self, key: Key, usual: _SeatHistory) -> Seat:
        capability, model, node = key
        seat = self._seen[key]
        return Seat(
            capability,
            model,
            node,
            seat.need,
            load=_median(seat.loads or usual.loads),
            wake=_median(seat.wakes or usual.wakes),
            sleep=_median(seat.sleeps or usual.sleeps),
            unload=_median(seat.unloads or usual.unloads),
        )


def _median(times: deque[int]) -> Span:
    return Span(round(statistics.median(times))) if times else Span(0)


__all__ = ["NothingLoaded", "demand_of"]
