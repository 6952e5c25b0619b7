"""Engines with their real bytes, and the node agents that start, measure and end them.

Each does what its real counterpart does, and each can fail at it. None of them shares anything
with the arbiter but messages.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TYPE_CHECKING

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.units import SECOND, Bytes, DeviceId, Epoch, HolderId, Instant, NodeId, TicketId

if TYPE_CHECKING:
    from tests.sim.world import World

CONFIRM_S, CONFIRM_AGAIN_S = 10.0, 0.25


class Spawn(Enum):
    """How a spawn ended."""

    STARTED = auto()
    CLOSED = auto()  # its ticket ended meanwhile
    FAILED = auto()  # no such grant, or neither arbiter nor agent answered


@dataclass
class Engine:
    """A process tree. `held` is the truth; `extra` the part it takes beyond its grant."""

    ticket: TicketId
    holder: HolderId
    granted: dict[DeviceId, int]
    host_bytes: int
    held: dict[DeviceId, int] = field(default_factory=dict)
    extra: dict[DeviceId, int] = field(default_factory=dict)
    alive: bool = True
    stuck: bool = False  # its memory does not come back
    is_outside: bool = False  # under a lease: only its own holder ends it

    def fill(self) -> None:
        self.held = {**self.held, **self.granted}

    def resize(self, devices: tuple[types.DeviceBytes, ...]) -> None:
        """Another process in its place."""
        self.granted = {d.device: int(d.size_bytes) for d in devices}
        self.extra = {}
        self.fill()

    def take_more(self, share: float) -> None:
        for device, size in self.granted.items():
            self.extra[device] = int(size * share)
            self.held[device] = size + self.extra[device]


@dataclass
class Agent:
    """One per node: measures, reaps, reports in order."""

    world: "World"
    node: NodeId
    specs: tuple[types.DeviceSpec, ...]
    epoch: Epoch | None = None
    engines: dict[TicketId, Engine] = field(default_factory=dict)
    tombstones: set[TicketId] = field(default_factory=set)
    down_until: Instant = Instant(0)
    last_arrival: Instant = Instant(0)
    lives_count: int = 0  # a spawn under way ends with the process that began it
    reading_s: float = 0.0  # how long one takes
    unreadable: set[DeviceId] = field(default_factory=set)
    lost: set[DeviceId] = field(default_factory=set)  # GPUs that fell off the bus

    @property
    def is_up(self) -> bool:
        return self.world.now >= self.down_until and self.node not in self.world.dead_nodes

    def introduction(self) -> ev.NodeSeen:
        present = tuple(spec for spec in self.specs if spec.device not in self.lost)
        return ev.NodeSeen(self.node, present, lost=tuple(sorted(self.lost)))

    def lose(self, device: DeviceId) -> None:
        """A GPU falls off the bus, and what computes on it ends."""
        self.lost.add(device)
        self.send(self.introduction())
        for engine in [e for e in self.engines.values() if device in e.granted]:
            for sizes in (engine.held, engine.extra):
                sizes.pop(device, None)
            self.end(engine)

    def find(self, device: DeviceId) -> None:
        """The GPU is back."""
        self.lost.discard(device)
        self.send(self.introduction())

    def spawn(self, engine: Engine, then: Callable[[Spawn], None]) -> None:
        """Asks the arbiter first (A3), as `Reports.confirm` does; `then` hears how it ended."""
        began, life = self.world.now, self.lives_count

        def ask() -> None:
            check = self.world.check_grant(self, engine.ticket)
            self.world.at(self.world.now + self.world.delay(), lambda: answered(check))

        def answered(check: types.GrantCheck | None) -> None:
            is_late = self.world.now - began > CONFIRM_S * SECOND
            if not self.is_up or self.lives_count != life:
                then(Spawn.FAILED)
            elif check is types.GrantCheck.GRANTED:
                then(Spawn.STARTED if self.start(engine) else Spawn.CLOSED)
            elif check is types.GrantCheck.ENDED or engine.ticket in self.tombstones:
                then(Spawn.CLOSED)
            elif check is types.GrantCheck.NOT_GRANTED or is_late:
                then(Spawn.FAILED)
            else:  # it settles, or is away
                self.world.later(CONFIRM_AGAIN_S, ask, exactly=True)

        self.world.at(self.world.now + self.world.delay(), ask)

    def start(self, engine: Engine) -> bool:
        if not self.is_up or engine.ticket in self.tombstones or self.lost & engine.granted.keys():
            return False
        self.engines[engine.ticket] = engine
        engine.fill()  # worst case: all of it from the first instant
        return True

    def beat(self) -> None:
        self.world.later(1.0, self.beat, exactly=True)
        if self.is_up:
            self.read()

    def read(self) -> None:
        if not self.is_up:
            return
        reading, life = self.reading(), self.lives_count

        def send() -> None:
            """Engines that ended meanwhile are left out, as `NodeAgent` does."""
            if self.is_up and self.lives_count == life:
                present = tuple(e for e in reading.engines if e.ticket in self.engines)
                self.report(replace(reading, engines=present))

        if self.reading_s:
            self.world.later(self.reading_s, send, exactly=True)
        else:
            send()

    def reading(self) -> ev.Measured:
        hidden = self.unreadable | self.lost
        seen = [spec for spec in self.specs if spec.device not in hidden]
        devices = tuple(ev.DeviceReading(s.device, s.total_bytes, Bytes(0)) for s in seen)
        engines = tuple(
            ev.EngineReading(
                e.ticket,
                tuple(
                    types.DeviceBytes(d, Bytes(b))
                    for d, b in e.held.items() if b and d not in hidden
                ),
            )
            for e in self.engines.values()
        )  # fmt: skip
        blind = tuple(ev.DeviceUnreadable(d, "injected") for d in sorted(self.unreadable))
        return ev.Measured(self.node, devices, engines, unreadable=blind)

    def report(self, event: ev.Event) -> None:
        """A reading that is lost is followed by the next."""
        if not self.world.chance("lose"):
            self.send(event)

    def send(self, event: ev.Event) -> None:
        """In order: nothing overtakes what was sent before."""
        arrival = Instant(max(self.last_arrival + 1, self.world.now + self.world.delay()))
        self.last_arrival = arrival
        epoch = self.epoch
        self.world.at(arrival, lambda: self.world.on_agent_message(self, epoch, event))

    def reap(self, ticket: TicketId) -> None:
        if not self.is_up:
            return
        engine = self.engines.get(ticket)
        if engine is not None and engine.is_outside and engine.alive:
            return
        self.tombstones.add(ticket)
        if engine is None:
            self.report(ev.EngineGone(self.node, ticket, True))
        elif engine.alive:
            self.world.later(0.3, lambda: self.end(engine))
        else:
            self.report(ev.EngineGone(self.node, ticket, False))

    def end(self, engine: Engine) -> None:
        """The process is dead; its memory returns now, late, or never."""
        if not engine.alive:
            return
        engine.alive = False
        engine.stuck = self.world.chance("stuck")
        self.report(ev.EngineGone(self.node, engine.ticket, False))
        if not engine.stuck:
            self.world.later(7.0 if self.world.chance("slow") else 0.2, lambda: self.free(engine))

    def free(self, engine: Engine) -> None:
        if self.engines.pop(engine.ticket, None):
            self.report(ev.EngineGone(self.node, engine.ticket, True))
