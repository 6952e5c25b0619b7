"""A holder's calls to the node agent beside it, which spawns engines."""

import asyncio
import contextlib
from typing import Any

from ray.exceptions import RayError

from arbiter.client.admin import actor_handle
from arbiter.errors import ActorAbsent
from arbiter.protocol import messages, ray_internals, rpc
from arbiter.units import TicketId

AGAIN_S = 0.05  # between tries while the agent restarts
PREPARE_S = 10.0  # an agent answers at once, or restarts


class AgentClient:
    """Calls the node agent over a connection that is made when it is first needed, and again after
    it broke."""

    def __init__(self) -> None:
        self._agent: rpc.Peer | None = None
        self._finding = asyncio.Lock()
        self._preparing: asyncio.Future[None] | None = None

    async def call(self, method: str, ticket: TicketId, spec: messages.SpawnSpec) -> Any:
        """Calls the agent, and waits as long as it restarts; the caller bounds the wait. Raises
        what the agent raises."""
        while True:
            agent: rpc.Peer | None = None
            try:
                agent = await self._find()
                return await agent.call(method, ticket, spec)
            except (rpc.ConnectionLost, ActorAbsent, RayError):
                self._drop(agent)
            await asyncio.sleep(AGAIN_S)

    def _drop(self, agent: rpc.Peer | None) -> None:
        """Closes a connection that broke. Another call may have connected again meanwhile."""
        if agent is not None:
            agent.close()
        if self._agent is agent:
            self._agent = None

    def prepare(self) -> None:
        """Looks for the agent before the first grant, which then need not wait for it."""
        self._preparing = asyncio.ensure_future(self._prepare())

    async def _prepare(self) -> None:
        with contextlib.suppress(ActorAbsent, RayError, TimeoutError):
            async with asyncio.timeout(PREPARE_S):
                await self._find()

    async def _find(self) -> rpc.Peer:
        """Returns the connection to this node's agent. Raises ActorAbsent when there is none yet,
        RayError while it restarts."""
        async with self._finding:
            if self._agent is None:
                node = ray_internals.own_node()
                handle = await asyncio.to_thread(actor_handle, messages.agent_name(node))
                address = await handle.rpc_address.remote()
                self._agent = await rpc.connect_to_socket(handle, address, node)
            return self._agent

    def close(self) -> None:
        """Closes the connection."""
        if self._preparing is not None:
            self._preparing.cancel()
        if self._agent is not None:
            self._agent.close()
