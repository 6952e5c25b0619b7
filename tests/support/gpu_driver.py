"""Drives an arbiter whose node has GPUs."""

from arbiter import units
from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.settings import Settings
from arbiter.core.types import Split
from arbiter.units import DeviceId, HolderId, NodeId, TicketId
from tests.support.core_driver import PLAIN, CoreDriver, gib

GPUS = [DeviceId(f"g/gpu:{i}") for i in range(4)]


class GpuDriver(CoreDriver):
    """A node of GPUs of the given GiB."""

    def __init__(self, *sizes: float, settings: Settings = PLAIN) -> None:
        super().__init__(settings=settings)
        self.gpus = [
            types.DeviceSpec(d, types.DeviceKind.GPU, gib(size))
            for d, size in zip(GPUS, sizes, strict=False)
        ]
        self.at(0, ev.NodeSeen(NodeId("g"), tuple(self.gpus)))
        readings = tuple(ev.DeviceReading(s.device, s.total_bytes, gib(0)) for s in self.gpus)
        self.at(0, ev.Measured(NodeId("g"), readings, ()))
        self.join(0, "k", node="g")

    def see_only(self, t: float, *numbers: int) -> list[object]:
        """A reading of these devices; of the others the agent could read nothing."""
        readings = tuple(
            ev.DeviceReading(self.gpus[n].device, self.gpus[n].total_bytes, gib(0)) for n in numbers
        )
        return list(self.at(t, ev.Measured(NodeId("g"), readings, ())))

    def want(
        self, t: float, name: str, size: float, gang: str = "", how: Split = Split.NONE
    ) -> list[object]:
        return list(self.at(t, ev.Requested(
            TicketId(name), HolderId("k"), "text", name, types.Need(gib(size)), "", True,
            gang=tuple(map(TicketId, gang)), split=how,
        )))  # fmt: skip

    def done(self, t: float, name: str) -> None:
        self.at(t, ev.Loaded(TicketId(name), units.Span(0)))
        self.beat(t, name, holder="k")

    def home(self, name: str) -> dict[str, float]:
        ticket = self.ticket(name)
        return {d[-1]: size / gib(1) for d, size in ticket.home.items()}
