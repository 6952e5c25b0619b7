"""A holder's connection to the node agent, when it breaks."""

import asyncio

import pytest

from arbiter.client import admin, agent_client
from arbiter.client.agent_client import AgentClient
from arbiter.protocol import ray_internals
from arbiter.protocol.messages import SpawnSpec
from arbiter.protocol.rpc import ConnectionLost, Peer
from arbiter.units import NodeId, TicketId
from tests.support.fake_arbiter import FakeArbiter
from tests.support.waits import eventually

SPEC = SpawnSpec("a:b", {})


class Agent:
    """Answers, or hangs until its connection breaks."""

    is_open = True

    def __init__(self, *, answers: bool) -> None:
        self.answers, self.is_closed, self.breaks = answers, False, dict[str, asyncio.Event]()

    async def call(self, name: str, ticket: TicketId, spec: SpawnSpec) -> str:
        if self.answers:
            return f"{ticket}.sock"
        self.breaks[ticket] = asyncio.Event()
        await self.breaks[ticket].wait()
        raise ConnectionLost(name)

    def close(self) -> None:
        self.is_closed = True


class Broken(Agent):
    """Has a bug on this side of the connection."""

    async def call(self, name: str, ticket: TicketId, spec: SpawnSpec) -> str:
        raise KeyError("a bug")


class Finding(AgentClient):
    """Connects to these agents, one after the other."""

    def __init__(self, *agents: Agent) -> None:
        super().__init__()
        self.agents = list(agents)

    async def _find(self) -> Peer:
        if self._agent is None:
            self._agent = self.agents.pop(0)
        return self._agent


@pytest.mark.spec("A18")
async def test_broken_connection_is_closed_and_leaves_the_one_made_since() -> None:
    old, new = Agent(answers=False), Agent(answers=True)
    client = Finding(old, new)
    first, second = (asyncio.ensure_future(client.call("spawn", TicketId(t), SPEC)) for t in "ab")
    await eventually(lambda: len(old.breaks) == 2)
    old.breaks["a"].set()
    async with asyncio.timeout(60):
        assert await first == "a.sock"  # by a connection of its own
        old.breaks["b"].set()
        assert await second == "b.sock"
    assert old.is_closed and not new.is_closed and client._agent is new
    client.close()


@pytest.mark.spec("A18")
async def test_bug_beside_a_call_is_no_absence_of_the_agent() -> None:
    client = Finding(Broken(answers=True), Agent(answers=True))
    with pytest.raises(KeyError, match="a bug"):
        await client.call("spawn", TicketId("a"), SPEC)


@pytest.mark.spec("A18")
async def test_call_waits_for_an_agent_that_is_not_there_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks_count = 0

    async def spawn(ticket: TicketId, spec: SpawnSpec) -> str:
        return f"{ticket}.sock"

    async def rpc_address() -> None: ...

    def find(name: str) -> FakeArbiter | None:
        nonlocal looks_count
        looks_count += 1
        return FakeArbiter(spawn=spawn, rpc_address=rpc_address) if looks_count > 2 else None

    monkeypatch.setattr(ray_internals, "own_node", lambda: NodeId("n"))
    monkeypatch.setattr(admin, "find_actor", find)
    monkeypatch.setattr(agent_client, "AGAIN_S", 0.0)
    async with asyncio.timeout(60):
        assert await AgentClient().call("spawn", TicketId("a"), SPEC) == "a.sock"
    assert looks_count == 3
