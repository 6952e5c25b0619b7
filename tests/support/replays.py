"""A demand of three models of which the device holds two, and the events of a core that met it."""

from dataclasses import replace

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.settings import Settings
from arbiter.replay.demand import Demand, PackedRequests, Seat, Use
from arbiter.replay.recorded import DemandReader
from arbiter.replay.world import World
from arbiter.units import DeviceId, NodeId, seconds
from benchmarks.replay.table import SETTINGS
from policies import bundle
from tests.support.core_driver import capability, gib, s

NODE, NAMES = NodeId("n"), ("a", "b", "c")
LOAD_S = 4.0


def in_turns(uses_count: int, every_s: float) -> Demand:
    """Asks for a, b, c, a, b, c and so on, each 5 GiB of a device of 10. Least recently used loads
    for every use; foresight for every second."""
    need = types.Need(gib(5))
    seats = tuple(Seat("text", name, NODE, need, load=seconds(LOAD_S)) for name in NAMES)
    device = types.DeviceSpec(DeviceId("n/gpu:0"), types.DeviceKind.GPU, gib(10))
    table = ev.CapabilitiesSet((capability("text", "text", NAMES),))
    asked = PackedRequests(Use(s(n * every_s), n % 3, seconds(0.5)) for n in range(uses_count))
    return Demand((ev.NodeSeen(NODE, (device,)),), table, seats, asked)


class _Told(World):
    """Tells a reader what its core is given, as the arbiter's shell does."""

    reader: DemandReader

    def _feed(self, event: ev.Event) -> None:
        decisions = self.core.handle(event, self.now)
        self.reader.read(event, self.now, decisions)
        for decision in decisions:
            self._perform(decision)


def read_by(reader: DemandReader, demand: Demand, evict: str = "priority_lru") -> Settings:
    """Lives through the demand while `reader` notes it; returns the settings it was met with."""
    settings = replace(SETTINGS, evict=evict)
    world = _Told(demand, settings, bundle(settings))
    world.reader = reader
    world.run()
    return settings
