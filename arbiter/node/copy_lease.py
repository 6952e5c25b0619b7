"""The lease under which a node agent holds one copy of a model's files in host RAM (D4)."""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from arbiter.core.types import DeviceBytes, LeaseConditions
from arbiter.node.reports import AWAY
from arbiter.protocol.messages import LeaseCall, LeaseState, lease_ticket
from arbiter.units import SECOND, Bytes, NodeId, Span, TicketId, host_device, seconds

logger = logging.getLogger("arbiter.agent")

TENANT = "@host"  # no key's tenant begins so, so that none can name these leases
# It ends with the copy. A number, because a lease has a term; the arbiter holds it to no bound.
TERM = Span(100 * 365 * 86_400 * SECOND)
NOTICE = seconds(5.0)  # what is unused is dropped in a millisecond; a busy agent takes a second
GRANT_S = 2.0  # the answer comes in a millisecond, or the engine reads the files
CALL_S = 1.0  # one call waits as long: so old is what the arbiter knows of use at most
AWAY_S = 0.5  # before an arbiter that did not answer is asked again


class Calls(Protocol):
    """Names how the agent calls its arbiter. Raises one of AWAY."""

    async def call(self, name: str, *args: object) -> object: ...


class CopyLease:
    """Holds the lease of one copy, from its first call to its end. No byte of the copy is written
    before `acquire` returns."""

    def __init__(
        self,
        calls: Calls,
        node: NodeId,
        name: str,
        label: str,
        size: Bytes,
    ) -> None:
        self._calls, self._node, self._name = calls, node, name
        self._label, self._size = label, size
        self._devices = (DeviceBytes(host_device(node), size),)
        self.is_held = False

    def anew(self, name: str) -> "CopyLease":
        """Returns another lease for the same copy: a name that has been refused stays refused."""
        return CopyLease(self._calls, self._node, name, self._label, self._size)

    @property
    def ticket(self) -> TicketId:
        return lease_ticket(TENANT, self._name)

    async def acquire(self) -> bool:
        """Waits for the grant. Returns False where host RAM has no room, or there is no arbiter to
        say so."""
        try:
            state = await self._call(1, "queued", seconds(GRANT_S))
        except AWAY as error:
            logger.info("no host copy: %s", error)
            return False
        if state.state != "held":
            await self.end()
            return False
        self.is_held = True
        return True

    async def hold(
        self, users: Callable[[], int], give_way: Callable[[], None], is_gone: Callable[[], bool]
    ) -> None:
        """Renews it, and has the copy give way when the arbiter says so. Returns once the copy is
        gone, or the lease is over all the same."""
        seen = "held"
        while not is_gone():
            try:
                state = await self._call(users(), seen, seconds(CALL_S))
            except AWAY:
                await asyncio.sleep(AWAY_S)
                continue
            if state.state == "ended":
                self.is_held = False
                return
            seen = state.state
            if state.state == "leaving":
                give_way()

    async def end(self) -> None:
        """Gives it back. An arbiter that cannot be told of it lets it lapse."""
        self.is_held = False
        try:
            await self._calls.call("end_lease", self._name, TENANT)
        except AWAY as error:
            logger.info("the lease of a host copy was not given back: %s", error)

    async def _call(self, users_count: int, seen: str, wait: Span) -> LeaseState:
        terms = LeaseConditions(TENANT, TERM, NOTICE, preemptible=True, on_host=True)
        call = LeaseCall(
            self._name,
            self._size,
            terms,
            self._label,
            self._node,
            devices=self._devices,
            users_count=users_count,
            seen=seen,
            wait=wait,
        )
        reply = await self._calls.call("lease", call)
        assert isinstance(reply, LeaseState)
        return reply
