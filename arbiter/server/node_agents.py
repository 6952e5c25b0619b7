"""Handles of the node agents: one actor per living node, started when the node appears and dropped
with it."""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Hashable
from functools import partial
from typing import Any

import ray

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.errors import AgentAway, ArbiterUnavailable, LeaseRefused, UnknownHostCopy
from arbiter.node.agent import NodeAgent
from arbiter.protocol import ray_internals, rpc
from arbiter.protocol.messages import NAMESPACE, AgentSettings, agent_name
from arbiter.server.store import ExpectedHolder
from arbiter.units import HolderId, NodeId, Span, TicketId

logger = logging.getLogger("arbiter")

LOOK_S = 1.0  # one GCS call per second: A19 asks for 2 s
ANSWER_S = 2.0  # a look at /proc; an agent that restarts is asked again at the next look
# A start takes a core for a second or two (the imports of a Ray worker), so an agent that cannot
# start takes a fortieth of one, and is back within a minute of its cause's removal.
START_PAUSE_MOST_S = 60.0
ADOPT_S = 5.0  # the agent looks at one process
CLOSE_S = 10.0  # killing everything and seeing it dead takes milliseconds


class RayAgents:
    """Starts, calls and drops the agents of all nodes. A message to an agent waits for no answer:
    the core repeats what matters."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._nodes: frozenset[NodeId] = frozenset()  # that lived at the last look
        self._handles: dict[NodeId, Any] = {}  # of their agents; none while one is to be started
        self._peers: dict[NodeId, rpc.Peer] = {}  # the shortest way to each
        # What each has not answered yet, by node, call and arguments.
        self._pending: dict[tuple[Hashable, ...], asyncio.Future[None]] = {}
        self._causes: dict[NodeId, str] = {}  # why each agent ended last, until one answers
        self._pauses_s: dict[NodeId, float] = {}  # before the next start of it, likewise
        self._next_start_s: dict[NodeId, float] = {}  # monotonic
        self.on_end: Callable[[NodeId, str], None] = _log_end  # why an agent has ended for good

    def kill(self, node: NodeId, ticket: TicketId) -> None:
        self._send_to(node, "kill", ticket)

    def probe(self, node: NodeId) -> None:
        self._send_to(node, "probe")

    def drop_slabs(self, node: NodeId, owner: str) -> None:
        self._send_to(node, "drop_slabs", owner)

    def drop_tenant(self, node: NodeId, tenant: str, ago: Span) -> None:
        self._send_to(node, "drop_tenant", tenant, ago)

    async def adopt(
        self, node: NodeId, ticket: TicketId, pid: int, granted: tuple[types.DeviceBytes, ...]
    ) -> None:
        """Has the agent of a node measure an outside process under its lease. Raises LeaseRefused,
        the agent's own answer, or AgentAway when it did not answer."""
        handle = self._handles.get(node)
        if handle is None:
            raise AgentAway(f"{node} has no agent")
        try:
            async with asyncio.timeout(ADOPT_S):
                await handle.adopt.remote(ticket, pid, granted)
        except ray.exceptions.RayError as error:
            if refusal := ray_internals.raised_there(error, LeaseRefused):
                raise refusal from None
            raise AgentAway(f"the agent of {node} failed: {error}") from error
        except TimeoutError as error:
            raise AgentAway(f"the agent of {node} did not answer within {ADOPT_S} s") from error

    async def drop_host_copy(self, key: str, nodes: tuple[NodeId, ...]) -> bool:
        """Has agents drop a copy of a model's files. Returns whether it is gone from all of these
        nodes; where it is not, it leaves with the last engine that has it open. Raises
        UnknownHostCopy when no agent knows it, ArbiterUnavailable when one did not answer."""
        known: list[bool] = []
        for node in (node for node in nodes if node in self._handles):
            try:
                async with asyncio.timeout(ADOPT_S):
                    known.append(await self._handles[node].drop_host_copy.remote(key))
            except (ray.exceptions.RayError, TimeoutError) as error:
                if ray_internals.raised_there(error, UnknownHostCopy) is None:
                    raise ArbiterUnavailable(ADOPT_S) from error
        if not known:
            raise UnknownHostCopy(key)
        return all(known)

    async def look(self, feed: Callable[[ev.Event], None], known: Collection[NodeId]) -> None:
        """Starts agents on new nodes, and feeds the core with the nodes that are gone. `known`:
        nodes that agents have introduced. An agent may outlive for some seconds its node, which Ray
        has given up."""
        living = await asyncio.to_thread(ray_internals.living_nodes)
        for node in self._nodes.union(known) - living.keys():
            self._close_peer(node)
            self._forget_ends(node)
            if handle := self._handles.pop(node, None):
                ray.kill(handle, no_restart=True)
            feed(ev.NodeLost(node))
        self._nodes = frozenset(living)
        for node in filter(self._may_start, living.keys() - self._handles.keys()):
            self._handles[node] = await asyncio.to_thread(self._start, node, living[node])
        for node in tuple(self._handles):
            self._send_once(node, "look", partial(self._look_at, node, self._handles[node]))

    async def dead(self, members: list[ExpectedHolder]) -> list[HolderId]:
        """Returns the holders known to be dead: their node is gone, or its agent sees no such
        process."""
        members_asked = [m for m in members if m.node in self._handles and m.pid]
        gone = [m.holder for m in members if m.node not in self._nodes]
        nodes = {m.node for m in members_asked}
        answers = (
            self._dead_on(node, [m for m in members_asked if m.node == node]) for node in nodes
        )
        return gone + list(itertools.chain(*await asyncio.gather(*answers)))

    async def _dead_on(self, node: NodeId, on_node: list[ExpectedHolder]) -> list[HolderId]:
        """Returns the holders known to be dead on one node; none where its agent does not answer,
        because it is asked again at the next look."""
        try:
            async with asyncio.timeout(ANSWER_S):
                living = await self._handles[node].living.remote([m.pid for m in on_node])
        except (ray.exceptions.RayError, TimeoutError, KeyError):
            return []
        return [m.holder for m in on_node if living.get(m.pid) != m.start_ticks]

    async def readiness(self) -> dict[str, dict[str, str]]:
        """Says of each living node whether engines start there as fast as they can."""
        nodes = sorted(self._nodes)
        readings = await asyncio.gather(*(self._readiness_of(node) for node in nodes))
        return dict(zip(nodes, readings, strict=True))

    async def _readiness_of(self, node: NodeId) -> dict[str, str]:
        """Returns the readiness of one node: `starting` while it has no agent, or its agent does
        not answer."""
        try:
            async with asyncio.timeout(ANSWER_S):
                readiness: dict[str, str] = await self._handles[node].readiness.remote()
                return readiness
        except (ray.exceptions.RayError, TimeoutError, KeyError):
            cause = self._causes.get(node)
            return {"state": "starting", "cause": cause} if cause else {"state": "starting"}

    async def close(self) -> None:
        """Ends all agents and every engine and zygote of theirs."""
        for node, handle in tuple(self._handles.items()):  # a call that fails takes one out
            self._close_peer(node)
            try:
                async with asyncio.timeout(CLOSE_S):
                    await handle.close.remote()
            except (ray.exceptions.RayError, TimeoutError) as error:
                logger.warning("the agent of %s did not close: %r", node, error)
            ray.kill(handle, no_restart=True)
        self._handles.clear()

    def _start(self, node: NodeId, ray_node_id: str) -> Any:
        """Starts the agent of a node as a detached actor there, and returns its handle."""
        options = ray_internals.detached(ray_node_id, agent_name(node), NAMESPACE)
        return ray.remote(NodeAgent).options(**options).remote(node, self._settings)

    def _close_peer(self, node: NodeId) -> None:
        """Closes the connection to an agent, if there is one."""
        if peer := self._peers.pop(node, None):
            peer.close()

    def _send_to(self, node: NodeId, name: str, *args: Hashable) -> None:
        """Sends a message to an agent, over its socket where it is on this node, by Ray
        otherwise."""
        handle, peer = self._handles.get(node), self._peers.get(node)
        if handle is not None:
            nearest = peer if peer and peer.is_open else rpc.RayPeer(handle)
            self._send_once(node, name, partial(nearest.call, name), *args)

    async def _look_at(self, node: NodeId, handle: Any) -> None:
        """Asks by Ray whether the agent lives, and connects to its socket on this node."""
        address = await handle.rpc_address.remote()
        self._forget_ends(node)
        peer = self._peers.get(node)
        if peer is None or not peer.is_open:
            own_node = ray_internals.own_node()
            self._peers[node] = await rpc.connect_to_socket(handle, address, own_node)

    def _send_once(
        self, node: NodeId, name: str, call: Callable[..., Awaitable[None]], *args: Hashable
    ) -> None:
        """Sends a message to an agent, unless the same message still waits for its answer: what is
        repeated to an agent that hangs would pile up without end."""
        key = (node, name, *args)
        if key not in self._pending:
            self._pending[key] = sent = asyncio.ensure_future(self._await_answer(node, call(*args)))
            sent.add_done_callback(lambda _: self._pending.pop(key))

    async def _await_answer(self, node: NodeId, sending: Awaitable[None]) -> None:
        """Waits for the answer of an agent, and forgets the agent where it is dead for good."""
        try:
            await sending
        except rpc.ConnectionLost:
            return  # the next look tells why; the core repeats the message
        except ray.exceptions.ActorUnavailableError:
            return  # restarting; the core repeats the message
        except ray.exceptions.RayActorError as error:
            self._close_peer(node)
            if self._handles.pop(node, None) is not None:  # dead for good: a look starts another
                self._note_end(node, error)
        except (ray.exceptions.RayError, rpc.RemoteError) as error:
            logger.warning("agent of %s: %r", node, error)

    def _may_start(self, node: NodeId) -> bool:
        """Says whether the pause after the last failed start on a node is over."""
        return time.monotonic() >= self._next_start_s.get(node, 0.0)

    def _forget_ends(self, node: NodeId) -> None:
        """Forgets how the agents of a node have ended, because one answers."""
        for by_node in (self._causes, self._pauses_s, self._next_start_s):
            by_node.pop(node, None)

    def _note_end(self, node: NodeId, error: ray.exceptions.RayActorError) -> None:
        """Notes that an agent has ended for good, and tells each cause once. The next look starts
        another agent; after further failures it waits twice as long each time, because only a
        person can remove the cause."""
        pause_s = self._pauses_s.get(node, 0.0)
        self._next_start_s[node] = time.monotonic() + pause_s
        self._pauses_s[node] = min(START_PAUSE_MOST_S, max(LOOK_S, 2 * pause_s))
        cause = str(error).strip().splitlines()[-1]
        if self._causes.get(node) != cause:
            self._causes[node] = cause
            self.on_end(node, cause)


def _log_end(node: NodeId, cause: str) -> None:
    logger.warning("the agent of %s ended, and is started again: %s", node, cause)
