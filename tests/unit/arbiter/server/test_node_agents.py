"""A node agent is told whose memory a lease is: its own word, or that it said nothing."""

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.errors import AgentAway, LeaseRefused
from arbiter.protocol.messages import AgentSettings
from arbiter.server import node_agents
from arbiter.server.node_agents import RayAgents
from arbiter.server.store import ExpectedHolder
from arbiter.units import Bytes, DeviceId, HolderId, NodeId, TicketId
from tests.support.fake_arbiter import FakeArbiter, never

N, JOB = NodeId("n"), TicketId("lease:t:job")
GRANTED = (types.DeviceBytes(DeviceId("n/cpu:0"), Bytes(5)),)


async def adopted(adopt: Callable[..., Coroutine[Any, Any, Any]]) -> None:
    made = node_agents.RayAgents(AgentSettings("no.zygote"))
    made._handles[N] = FakeArbiter(adopt=adopt)
    await made.adopt(N, JOB, 77, GRANTED)


@pytest.mark.spec("A15")
async def test_agent_is_told_the_process_and_devices_of_a_lease() -> None:
    heard: list[object] = []

    async def adopt(*said: object) -> None:
        heard.extend(said)

    await adopted(adopt)
    assert heard == [JOB, 77, GRANTED]


@pytest.mark.spec("A15")
@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (RayTaskError("adopt", "there", LeaseRefused("pid", "is no process")), LeaseRefused),
        (RayTaskError("adopt", "there", KeyError("a bug")), AgentAway),
        (RayActorError(), AgentAway),
        (ActorUnavailableError("it restarts", None), AgentAway),
    ],
    ids=["refused", "failed", "died", "restarts"],
)
async def test_lease_ends_only_by_a_refusal_of_the_agent(
    error: Exception, raised: type[Exception]
) -> None:
    async def adopt(*_: object) -> None:
        raise error

    with pytest.raises(raised):
        await adopted(adopt)


@pytest.mark.spec("A15")
async def test_agent_that_does_not_answer_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_agents, "ADOPT_S", 0.0)
    with pytest.raises(AgentAway):
        await adopted(never)


@pytest.mark.spec("A15")
async def test_a_node_without_an_agent_is_away() -> None:
    with pytest.raises(AgentAway):
        await node_agents.RayAgents(AgentSettings("no.zygote")).adopt(N, JOB, 77, GRANTED)


@pytest.mark.spec("A18")
async def test_agent_identifies_dead_holders_by_pid_and_start_time() -> None:
    async def living(pids: list[int]) -> dict[int, int]:
        return {7: 9, 8: 9}

    agents = RayAgents(AgentSettings("no.zygote"))
    agents._nodes = frozenset({NodeId("n"), NodeId("agentless")})
    agents._handles[NodeId("n")] = FakeArbiter(living=living)
    asked = [
        ExpectedHolder(HolderId("lives"), NodeId("n"), 7, 9),
        ExpectedHolder(HolderId("replaced"), NodeId("n"), 8, 1),
        ExpectedHolder(HolderId("gone"), NodeId("n"), 6, 9),
        ExpectedHolder(HolderId("elsewhere"), NodeId("lost"), 7, 9),
        ExpectedHolder(HolderId("unsaid"), NodeId("n")),
        ExpectedHolder(HolderId("unasked"), NodeId("agentless"), 7, 9),
    ]
    assert sorted(await agents.dead(asked)) == ["elsewhere", "gone", "replaced"]


@pytest.mark.spec("A18")
async def test_agents_are_asked_for_dead_holders_beside_each_other() -> None:
    """Each may take seconds not to answer."""
    all_asked = asyncio.Barrier(3)

    async def living(pids: list[int]) -> dict[int, int]:
        await all_asked.wait()
        return {}

    agents, nodes = RayAgents(AgentSettings("no.zygote")), [NodeId(name) for name in "abc"]
    agents._nodes = frozenset(nodes)
    agents._handles = {node: FakeArbiter(living=living) for node in nodes}
    asked = [ExpectedHolder(HolderId(f"of {node}"), node, 7, 9) for node in nodes]
    assert sorted(await agents.dead(asked)) == ["of a", "of b", "of c"]


@pytest.mark.spec("B1")
async def test_an_agent_that_cannot_start_says_why_once_until_one_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_agents.ray_internals, "own_node", lambda: N)
    made, told = node_agents.RayAgents(AgentSettings("no.zygote")), list[tuple[NodeId, str]]()
    made.on_end = lambda node, cause: told.append((node, cause))

    async def ends(cause: str) -> None:
        async def died() -> None:
            raise RayActorError(error_msg=f"a traceback\n  of the start\n{cause}\n")

        made._handles[N] = FakeArbiter(rpc_address=died)
        await made._await_answer(N, made._look_at(N, made._handles[N]))
        assert N not in made._handles  # the next look starts another

    async def nowhere() -> None:
        return None

    for cause in ("the driver is away", "the driver is away", "another"):
        await ends(cause)
    assert told == [(N, "the driver is away"), (N, "another")]
    made._handles[N] = FakeArbiter(rpc_address=nowhere)
    await made._look_at(N, made._handles[N])
    await ends("another")
    assert len(told) == 3


@pytest.mark.spec("A19", "B1")
async def test_agent_that_cannot_start_is_started_at_growing_intervals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, starts_s, can_start = 0.0, list[float](), False
    made = RayAgents(AgentSettings("no.zygote"))

    async def rpc_address() -> None:
        if not can_start:
            raise RayActorError(error_msg="the driver is away")

    def start(node: NodeId, ray_node_id: str) -> FakeArbiter:
        starts_s.append(now_s)
        return FakeArbiter(rpc_address=rpc_address)

    async def look() -> None:
        await made.look(lambda event: None, ())
        await asyncio.gather(*made._pending.values())

    monkeypatch.setattr(node_agents.ray_internals, "own_node", lambda: N)
    monkeypatch.setattr(node_agents.ray_internals, "living_nodes", lambda: {N: "n"})
    monkeypatch.setattr(node_agents, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(made, "_start", start)
    for second in range(200):
        now_s = float(second)
        await look()
    assert starts_s == [0, 1, 2, 4, 8, 16, 32, 64, 124, 184]
    now_s, can_start = 300.0, True
    await look()
    can_start = False
    await look()  # it has lived, so it is started at once
    await look()
    assert starts_s[-2:] == [300, 300] and len(starts_s) == 12


@pytest.mark.spec("A18", "A19")
async def test_node_that_ray_gave_up_before_this_epoch_is_lost_though_its_agent_introduced_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_agents.ray_internals, "living_nodes", dict)
    told: list[ev.Event] = []
    await RayAgents(AgentSettings("no.zygote")).look(told.append, (N,))
    assert told == [ev.NodeLost(N)]


@pytest.mark.spec("A18", "J8")
async def test_agent_that_hangs_is_asked_each_thing_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it answers, and then anew; however often the nodes are looked at or a kill repeated."""
    asked, goes_on = list[tuple[object, ...]](), asyncio.Event()

    async def ask(*said: object) -> None:
        asked.append(said)
        await goes_on.wait()

    async def repeat() -> None:
        for ticket in (JOB, JOB, TicketId("other")) * 5:
            await made.look(lambda event: None, ())
            made.kill(N, ticket)
            made.probe(N)

    monkeypatch.setattr(node_agents.ray_internals, "own_node", lambda: N)
    monkeypatch.setattr(node_agents.ray_internals, "living_nodes", lambda: {N: "n"})
    made = RayAgents(AgentSettings("no.zygote"))
    made._handles[N] = FakeArbiter(rpc_address=ask, kill=ask, probe=ask)
    await repeat()
    expected = [(), (), (TicketId("other"),), (JOB,)]
    assert sorted(asked) == sorted(expected) and len(made._pending) == len(expected)
    goes_on.set()
    await asyncio.gather(*made._pending.values())
    await asyncio.sleep(0)
    assert not made._pending
    await repeat()
    await asyncio.gather(*made._pending.values())
    assert len(asked) > 2 * len(expected) and set(asked) == set(expected)


@pytest.mark.spec("A19")
async def test_every_agent_is_closed_though_another_ends_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, closed = RayAgents(AgentSettings("no.zygote")), list[str]()

    def agent(name: str) -> FakeArbiter:
        async def close() -> None:
            closed.append(name)
            made._handles.pop(NodeId("c"), None)  # a call to it has failed: it died

        return FakeArbiter(close=close)

    monkeypatch.setattr(node_agents.ray, "kill", lambda handle, no_restart: None)
    made._handles = {NodeId(name): agent(name) for name in "abc"}
    await made.close()
    assert closed[:2] == ["a", "b"] and not made._handles


@pytest.mark.spec("M1")
async def test_readiness_of_a_node_is_its_agents_word_and_starting_without_it() -> None:
    async def warm() -> dict[str, str]:
        return {"state": "ready"}

    async def restarts() -> dict[str, str]:
        raise ActorUnavailableError("it restarts", None)

    agents = RayAgents(AgentSettings("no.zygote"))
    agents._nodes = frozenset(NodeId(n) for n in ("warm", "new", "again"))
    agents._handles[NodeId("warm")] = FakeArbiter(readiness=warm)
    agents._handles[NodeId("again")] = FakeArbiter(readiness=restarts)
    agents._causes[NodeId("again")] = "out of memory"
    assert await agents.readiness() == {
        "again": {"state": "starting", "cause": "out of memory"},
        "new": {"state": "starting"},
        "warm": {"state": "ready"},
    }
