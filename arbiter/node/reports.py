"""Sends the reports of a node agent to the arbiter, and keeps those that it has not heard yet."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import RayError

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.errors import (
    ActorAbsent,
    ArbiterError,
    ArbiterUnavailable,
    RequestError,
    TicketClosed,
    TicketNotGranted,
)
from arbiter.node.device_probe import Tree
from arbiter.protocol import rpc
from arbiter.protocol.messages import NAME, NAMESPACE
from arbiter.units import DeviceId, Epoch, NodeId, TicketId

logger = logging.getLogger("arbiter.agent")

REPORT_S = 5.0  # an arbiter slower than its own reading bound is as good as away
CONFIRM_S = 10.0  # a restart takes 1.0-2.0 s measured; as long as a holder waits for the arbiter
CONFIRM_AGAIN_S = 0.05  # until the arbiter is back, and with it the holder of the ticket
AWAY = (RayError, ArbiterError, TimeoutError)  # what a call of the arbiter raises


class Reports:
    """Tells the arbiter of one node. `introduction` returns the node's devices, which are told
    first in each epoch of the arbiter, and again when they change. `gpu_pids` returns the processes
    that NVML lists."""

    def __init__(
        self,
        node: NodeId,
        introduction: Callable[[], ev.NodeSeen],
        gpu_pids: Callable[[], set[int]],
    ) -> None:
        self.unsent_ends: dict[TicketId, ev.EngineGone] = {}  # until the arbiter has heard of them
        self._returning: dict[TicketId, set[int]] = {}  # dead, but NVML still lists these pids
        self._node, self._introduction, self._gpu_pids = node, introduction, gpu_pids
        # What the arbiter heard last: the devices, and those that may yet be among them.
        self._last_told: tuple[tuple[types.DeviceSpec, ...], set[DeviceId]] | None = None
        self._arbiter: rpc.Peer | None = None
        self._finding = asyncio.Lock()
        # One thread: Ray may take a minute, while reports give up sooner and ask again.
        self._lookups = ThreadPoolExecutor(1, "arbiter-lookup")
        self._epoch: Epoch | None = None
        self._failure = ""  # of the arbiter, as logged last

    @property
    def are_open(self) -> bool:
        """Says whether something is still to be reported."""
        return bool(self.unsent_ends or self._returning)

    def note_ended(self, ticket: TicketId, *pids: int) -> None:
        """Notes that no process of the engine is left. `pids`: the processes that it had, if the
        caller knows."""
        still_listed = self._gpu_pids() & (set(pids) | self._returning.pop(ticket, set()))
        if still_listed:
            self._returning[ticket] = still_listed
        self.note_gone(ticket, bytes_back=not still_listed)

    def note_returned(self) -> None:
        """Notes the dead engines whose bytes are back, because NVML lists their processes no
        more."""
        listed = self._gpu_pids() if self._returning else set()
        for ticket in [t for t, pids in self._returning.items() if not pids & listed]:
            del self._returning[ticket]
            self.note_gone(ticket, bytes_back=True)

    def trees(self) -> list[Tree]:
        """Returns the dead engines that a driver still lists: their bytes belong to tickets and are
        not foreign."""
        return [Tree(ticket, frozenset(pids)) for ticket, pids in self._returning.items()]

    def note_gone(self, ticket: TicketId, *, bytes_back: bool) -> None:
        """Notes that no process of a ticket is left, and whether its bytes are back. The arbiter is
        told with the next report."""
        self.unsent_ends[ticket] = ev.EngineGone(self._node, ticket, bytes_back)

    async def send_ends(self) -> None:
        """Reports the engines that have ended. What the arbiter does not receive is reported again
        with the next call."""
        gone = dict(self.unsent_ends)
        if gone and await self.send(tuple(gone.values())):
            for ticket, event in gone.items():
                if self.unsent_ends.get(ticket) == event:
                    del self.unsent_ends[ticket]

    async def send(self, events: tuple[ev.Event, ...]) -> bool:
        """Sends events to the arbiter. Returns whether it has received them."""
        arbiter: rpc.Peer | None = None
        try:
            async with asyncio.timeout(REPORT_S):
                arbiter, seen = await self._reach_arbiter(), self._introduction()
                may_come = {u.device for u in seen.unreadable} - {d.device for d in seen.devices}
                tells = seen.devices, may_come
                has_changed = self._last_told not in (None, tells)
                news = (seen, *events) if has_changed else events
                sent = self._epoch
                epoch = await arbiter.call("report", self._node, sent, news)
                if epoch != sent:  # it was dropped, though another report may know the epoch by now
                    await arbiter.call("report", self._node, epoch, (seen, *events))
                    self._epoch = epoch  # not before: it knows the node only once it heard that
                self._last_told = tells
        except AWAY as error:
            self._note_away(arbiter, error)
            return False  # the next call repeats it
        self._failure = ""
        return True

    async def confirm(self, ticket: TicketId) -> None:
        """Returns once the arbiter has said that it granted this ticket on this node (A3), also
        across a restart of it. Raises TicketNotGranted, TicketClosed, ArbiterUnavailable when
        there was no answer that settles it within CONFIRM_S."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(CONFIRM_S):
                while not await self._is_granted(ticket):
                    await asyncio.sleep(CONFIRM_AGAIN_S)
        except TimeoutError:
            raise ArbiterUnavailable(time.monotonic() - began) from None

    async def _is_granted(self, ticket: TicketId) -> bool:
        """Says whether the arbiter has granted a ticket on this node. False: not known yet, because
        the arbiter is away, or the ticket's holder may not be back. Raises TicketNotGranted,
        TicketClosed."""
        check = await self._check(ticket)
        if check is types.GrantCheck.ENDED:
            raise TicketClosed(ticket)
        if check is types.GrantCheck.NOT_GRANTED:
            raise TicketNotGranted(ticket, self._node)
        return check is types.GrantCheck.GRANTED

    async def _check(self, ticket: TicketId) -> types.GrantCheck | None:
        """Asks the arbiter whether an engine may start under a ticket. None: the arbiter is
        away."""
        arbiter: rpc.Peer | None = None
        try:
            async with asyncio.timeout(REPORT_S):
                arbiter = await self._reach_arbiter()
                check: types.GrantCheck = await arbiter.call("check_grant", self._node, ticket)
        except AWAY as error:
            self._note_away(arbiter, error)
            return None
        self._failure = ""
        return check

    async def call(self, name: str, *args: object) -> object:
        """Calls another of the arbiter's methods for agents. Raises one of AWAY: an ArbiterError
        may be its answer."""
        arbiter: rpc.Peer | None = None
        try:
            async with asyncio.timeout(REPORT_S):
                arbiter = await self._reach_arbiter()
                return await arbiter.call(name, *args)
        except AWAY as error:
            if not isinstance(error, RequestError):
                self._note_away(arbiter, error)
            raise

    def _note_away(self, arbiter: rpc.Peer | None, error: Exception) -> None:
        """Closes a connection on which a call failed, so that the next call connects anew, unless
        another call has done so already. A bug of the arbiter is logged once, because the question
        is repeated twenty times a second."""
        if arbiter is not None:
            arbiter.close()
        if self._arbiter is arbiter:
            self._arbiter = None
        if isinstance(error, rpc.RemoteError) and str(error) != self._failure:
            self._failure = str(error)
            logger.warning("the arbiter failed on %s: %s", self._node, error)

    async def _reach_arbiter(self) -> rpc.Peer:
        """Returns the connection to the arbiter. Raises RayError, ActorAbsent when there is
        none."""
        async with self._finding:
            if self._arbiter is None:
                handle = await asyncio.get_running_loop().run_in_executor(self._lookups, _look_up)
                address = (await handle.hello.remote()).get("rpc_address")
                self._arbiter = await rpc.connect_to_socket(handle, address, self._node)
            return self._arbiter


def _look_up() -> Any:
    """Returns the handle of the arbiter's actor. Raises ActorAbsent, RayError."""
    try:
        return ray.get_actor(NAME, namespace=NAMESPACE)
    except ValueError:
        raise ActorAbsent(NAME) from None
