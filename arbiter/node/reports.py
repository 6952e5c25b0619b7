"""What a node agent says to the arbiter, whichever life of it, and what it still has to say."""

import asyncio
from collections.abc import Callable

import ray
from ray.exceptions import RayError

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.errors import ArbiterError
from arbiter.node.device_probe import Tree
from arbiter.protocol import rpc
from arbiter.protocol.messages import NAME, NAMESPACE
from arbiter.units import Epoch, NodeId, TicketId

REPORT_S = 5.0  # an arbiter slower than its own reading bound is as good as away


class Reports:
    """`introduction`: the node's devices, told first to each life of the arbiter, and again when
    they change. `gpu_pids`: the processes that NVML lists."""

    def __init__(
        self,
        node: NodeId,
        introduction: Callable[[], ev.NodeSeen],
        gpu_pids: Callable[[], set[int]],
    ) -> None:
        self.gone: dict[TicketId, ev.EngineGone] = {}  # not yet said
        self._returning: dict[TicketId, set[int]] = {}  # dead, but NVML still lists these pids
        self._node, self._introduction, self._gpu_pids = node, introduction, gpu_pids
        self._told: tuple[types.DeviceSpec, ...] | None = None  # devices the arbiter heard of last
        self._arbiter: rpc.Peer | None = None
        self._finding = asyncio.Lock()
        self._epoch: Epoch | None = None

    @property
    def are_open(self) -> bool:
        """Something is still to be said."""
        return bool(self.gone or self._returning)

    def note_ended(self, ticket: TicketId, *pids: int) -> None:
        """No process of the engine is left. `pids`: the processes it had, if the caller knows."""
        still_listed = self._gpu_pids() & (set(pids) | self._returning.pop(ticket, set()))
        if still_listed:
            self._returning[ticket] = still_listed
        self.note_gone(ticket, bytes_back=not still_listed)

    def see_returned(self) -> None:
        """Bytes of dead engines count as back when NVML no longer lists their processes."""
        listed = self._gpu_pids() if self._returning else set()
        for ticket in [t for t, pids in self._returning.items() if not pids & listed]:
            del self._returning[ticket]
            self.note_gone(ticket, bytes_back=True)

    def trees(self) -> list[Tree]:
        """Dead engines that a driver still lists: these bytes belong to tickets, they are not
        foreign."""
        return [Tree(ticket, frozenset(pids)) for ticket, pids in self._returning.items()]

    def note_gone(self, ticket: TicketId, *, bytes_back: bool) -> None:
        self.gone[ticket] = ev.EngineGone(self._node, ticket, bytes_back)

    async def say_all_gone(self) -> None:
        """Kept for the next turn if nobody hears it."""
        gone = dict(self.gone)
        if gone and await self.say(tuple(gone.values())):
            for ticket, event in gone.items():
                if self.gone.get(ticket) == event:
                    del self.gone[ticket]

    async def say(self, said: tuple[ev.Event, ...]) -> bool:
        """Whether the arbiter heard it."""
        try:
            async with asyncio.timeout(REPORT_S):
                arbiter, seen = await self._found(), self._introduction()
                has_changed = self._told not in (None, seen.devices)
                news = (seen, *said) if has_changed else said
                epoch = await arbiter.call("report", self._node, self._epoch, news)
                if epoch != self._epoch:
                    self._epoch = epoch
                    await arbiter.call("report", self._node, epoch, (seen, *said))
                self._told = seen.devices
        except (RayError, ArbiterError, ValueError, TimeoutError):
            self.close()
            return False  # away; the next turn says it again
        return True

    def close(self) -> None:
        if self._arbiter is not None:
            self._arbiter.close()
            self._arbiter = None

    async def _found(self) -> rpc.Peer:
        """Raises RayError, ValueError when there is no arbiter."""
        async with self._finding:
            if self._arbiter is None:
                handle = ray.get_actor(NAME, namespace=NAMESPACE)
                door = (await handle.hello.remote()).get("door")
                self._arbiter = await rpc.connect_to_socket(handle, door, self._node)
            return self._arbiter
