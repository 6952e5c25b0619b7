"""The core driver on a node with two GPUs, in whose RAM engines have a part."""

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Decision
from arbiter.units import DeviceId, NodeId, TicketId
from tests.support.core_driver import HOST, CoreDriver, gib, listed

GPU, OTHER = DeviceId("n/gpu:0"), DeviceId("n/gpu:1")
UUIDS = {GPU: "GPU-aaaa", OTHER: "GPU-bbbb"}


class GpuCoreDriver(CoreDriver):
    """`device` is what each GPU has."""

    def __init__(self, *args: object, **how: object) -> None:
        self.there: dict[DeviceId, str] = dict(UUIDS)
        self.unreadable: dict[DeviceId, str] = {}
        self.lost: tuple[DeviceId, ...] = ()  # fell off the bus
        self.delta_only: set[DeviceId] = set()  # their readings are inexact
        self.strangers: dict[DeviceId, tuple[ev.ForeignProcess, ...]] = {}
        super().__init__(*args, **how)  # type: ignore[arg-type]

    def see_node(self, t: float, device: float, host: float, node: str = "n") -> None:
        self.size, self.host = device, host
        self.introduce(t)

    def introduce(self, t: float) -> list[Decision]:
        """The agent says what it has; a GPU that is unreadable it may not have opened."""
        gpus = [
            types.DeviceSpec(d, types.DeviceKind.GPU, gib(self.size), "NVIDIA A10G", uuid)
            for d, uuid in self.there.items()
            if d not in self.unreadable
        ]
        host = types.DeviceSpec(HOST, types.DeviceKind.HOST, gib(self.host))
        return self.at(t, ev.NodeSeen(NodeId("n"), (*gpus, host), self._unread(), self.lost))

    def read(self, t: float, node: str = "n") -> list[Decision]:
        devices = tuple(
            ev.DeviceReading(
                d, gib(self.physical.get(d, 1e6)), gib(self.foreign.get(d, 0)),
                d not in self.delta_only, self.strangers.get(d, ()),
            )
            for d in (*self.there, HOST) if d not in self.unreadable
        )  # fmt: skip
        engines = tuple(
            ev.EngineReading(
                TicketId(ticket),
                listed({d: size for d, size in sizes.items() if d not in self.unreadable}),
                ticket not in self.inexact,
            )
            for ticket, sizes in self.engines.items()
        )
        return self.at(t, ev.Measured(NodeId("n"), devices, engines, self.stalls, self._unread()))

    def _unread(self) -> tuple[ev.DeviceUnreadable, ...]:
        return tuple(ev.DeviceUnreadable(d, cause) for d, cause in self.unreadable.items())

    def measured(self, name: str) -> dict[DeviceId, int]:
        ticket = self.ticket(name)
        return dict(ticket.measured)

    def device_of(self, name: str) -> DeviceId:
        ticket = self.ticket(name)
        [device] = ticket.home
        return DeviceId(device)
