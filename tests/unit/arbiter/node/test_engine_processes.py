"""A node agent spawns an engine only under a ticket that the arbiter granted."""

import asyncio
import errno
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytest_asyncio
from ray.exceptions import ActorDiedError

from arbiter.core.types import GrantCheck, ModelName
from arbiter.errors import ArbiterError, ArbiterUnavailable, TicketClosed, TicketNotGranted
from arbiter.node import engine_processes, procfs, reports
from arbiter.node.agent import NodeAgent
from arbiter.protocol.messages import CopyRequest, SpawnSpec
from arbiter.protocol.rpc import RayPeer
from arbiter.units import NodeId, TicketId
from tests.support.fake_arbiter import FakeArbiter
from tests.support.local_agent import BROKEN_ZYGOTE, FAKE_ENGINE, START_S, agent_in
from tests.support.waits import eventually

N, T = NodeId("n"), TicketId("t")
SPEC = SpawnSpec("a:b", {})
WITHIN_S = 60

pytestmark = pytest.mark.spec("A3")


class Arbiter:
    """Answers each check with the next of `answers`, and with the last for ever."""

    def __init__(self, *answers: GrantCheck | Exception) -> None:
        self.answers, self.checked = list(answers), list[tuple[NodeId, TicketId]]()

    async def check_grant(self, node: NodeId, ticket: TicketId) -> GrantCheck:
        self.checked.append((node, ticket))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest_asyncio.fixture
async def agent(no_arbiter: None, folder: Path) -> AsyncIterator[NodeAgent]:
    """Its zygote cannot start, so a spawn that is let through waits."""
    running = agent_in(folder, BROKEN_ZYGOTE)
    yield running
    await running.close()


def use(agent: NodeAgent, arbiter: Arbiter, monkeypatch: pytest.MonkeyPatch) -> None:
    async def reach_arbiter(_: object) -> RayPeer:
        return RayPeer(FakeArbiter(check_grant=arbiter.check_grant))

    monkeypatch.setattr(reports.Reports, "_reach_arbiter", reach_arbiter)


@pytest.mark.parametrize(
    ("answer", "error"),
    [(GrantCheck.NOT_GRANTED, TicketNotGranted), (GrantCheck.ENDED, TicketClosed)],
)
@pytest.mark.parametrize("how", ["spawn", "respawn"])
async def test_ticket_without_a_grant_spawns_nothing(
    agent: NodeAgent,
    monkeypatch: pytest.MonkeyPatch,
    answer: GrantCheck,
    error: type[ArbiterError],
    how: str,
) -> None:
    arbiter = Arbiter(answer)
    use(agent, arbiter, monkeypatch)
    with pytest.raises(error, match=T):
        await getattr(agent, how)(T, SPEC)
    assert arbiter.checked == [(N, T)]
    assert not agent._engines._spawning and not await agent.engines()


async def test_check_is_repeated_until_the_restarted_arbiter_knows_the_ticket(
    agent: NodeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    arbiter = Arbiter(ActorDiedError(), GrantCheck.SETTLING, GrantCheck.GRANTED)
    use(agent, arbiter, monkeypatch)
    async with asyncio.timeout(WITHIN_S):
        await agent._reports.confirm(T)
    assert len(arbiter.checked) == 3


@pytest.mark.parametrize(
    "answer",
    [ActorDiedError(), GrantCheck.SETTLING],
    ids=["away", "settling"],
)
async def test_check_is_given_up_after_its_bound(
    agent: NodeAgent, monkeypatch: pytest.MonkeyPatch, answer: GrantCheck | Exception
) -> None:
    monkeypatch.setattr(reports, "CONFIRM_S", 0.0)
    use(agent, Arbiter(answer), monkeypatch)
    async with asyncio.timeout(WITHIN_S):
        with pytest.raises(ArbiterUnavailable):
            await agent.spawn(T, SPEC)


async def test_check_without_an_answer_is_given_up_after_the_same_bound(
    agent: NodeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question that hangs may not take its own bound on top."""
    monkeypatch.setattr(reports, "CONFIRM_S", 0.0)
    monkeypatch.setattr(reports, "REPORT_S", 1_000.0)

    async def reach_arbiter(_: object) -> RayPeer:
        return RayPeer(FakeArbiter())

    monkeypatch.setattr(reports.Reports, "_reach_arbiter", reach_arbiter)
    async with asyncio.timeout(WITHIN_S):
        with pytest.raises(ArbiterUnavailable):
            await agent.spawn(T, SPEC)


async def test_cancelled_spawn_of_a_killed_ticket_is_cancelled(
    agent: NodeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()

    async def confirm(_: object, ticket: TicketId) -> None:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(reports.Reports, "confirm", confirm)
    confirming = asyncio.ensure_future(agent._engines._confirm(T))
    async with asyncio.timeout(WITHIN_S):
        await asked.wait()
        agent._engines.children.forbid_start(T)
        confirming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await confirming


@pytest.mark.spec("A14", "A18")
@pytest.mark.usefixtures("no_arbiter")
async def test_respawn_outlives_an_arbiter_that_ends_after_its_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arbiter, running = Arbiter(GrantCheck.GRANTED), agent_in(folder)
    use(running, arbiter, monkeypatch)
    async with asyncio.timeout(START_S):
        spawned = await running.spawn(T, FAKE_ENGINE)
        before = await running.engines()
        arbiter.answers = [GrantCheck.GRANTED, ActorDiedError()]
        monkeypatch.setattr(reports, "CONFIRM_S", 0.0)
        assert (await running.respawn(T, FAKE_ENGINE)).path == spawned.path
    after = await running.engines()
    assert after.keys() == {T} and after != before and not running._reports.unsent_ends
    await running.close()


@pytest.mark.spec("A17")
async def test_wait_for_a_copy_and_for_a_zygote_is_told_to_the_nanosecond(
    agent: NodeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = SimpleNamespace(ns=7, zygote_takes_ns=5)

    async def answer(*_: object) -> None:
        now.ns += 1_000  # the arbiter's, before it waits

    async def lend(*_: object) -> None:
        now.ns += 30

    async def come(_: TicketId) -> None:
        now.ns, now.zygote_takes_ns = now.ns + now.zygote_takes_ns, 0

    async def fork(*_: object) -> SimpleNamespace:
        now.ns += 100
        return SimpleNamespace()

    engines, wanted = agent._engines, CopyRequest(ModelName("chat", "w"), "/w", ("*",))
    monkeypatch.setattr(agent._reports, "confirm", answer)
    monkeypatch.setattr(agent._copies, "lend", lend)
    with monkeypatch.context() as patched:
        patched.setattr(engines, "_wait_for_zygote", come)
        patched.setattr(engines, "_fork", fork)
        patched.setattr(engines, "_watch", lambda _: None)
        patched.setattr(engines, "_logs", SimpleNamespace(link=lambda *_: None))
        clock = SimpleNamespace(monotonic_ns=lambda: now.ns, monotonic=time.monotonic)
        patched.setattr(engine_processes, "time", clock)
        assert (await agent.spawn(T, SpawnSpec("a:b", {}, copy=wanted))).waited == 35
        assert (await agent.spawn(T, SPEC)).waited == 0


@pytest.mark.spec("A10")
async def test_ticket_reaped_during_its_check_spawns_nothing_and_is_reported(
    agent: NodeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answered = asyncio.Event(), asyncio.Event()

    async def confirm(_: object, ticket: TicketId) -> None:
        asked.set()
        await answered.wait()

    monkeypatch.setattr(reports.Reports, "confirm", confirm)
    spawning = asyncio.ensure_future(agent.spawn(T, SPEC))
    async with asyncio.timeout(WITHIN_S):
        await asked.wait()
        await agent.kill(T)
        answered.set()
        with pytest.raises(TicketClosed):
            await spawning
    assert list(agent._reports.unsent_ends) == [T]


@pytest.mark.spec("A10", "D4")
@pytest.mark.usefixtures("granted")
async def test_ticket_reaped_while_a_copy_is_made_for_it_has_its_bytes_back_at_once(
    agent: NodeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of many files takes longer than the arbiter waits before it quarantines a holder."""
    begun, made = asyncio.Event(), asyncio.Event()

    async def lend(*_: object) -> None:
        begun.set()
        await made.wait()

    monkeypatch.setattr(agent._copies, "lend", lend)
    wanted = CopyRequest(ModelName("chat", "w"), "/w", ("*",))
    spawning = asyncio.ensure_future(agent.spawn(T, SpawnSpec("a:b", {}, copy=wanted)))
    async with asyncio.timeout(WITHIN_S):
        await begun.wait()
        await agent.kill(T)
        assert list(agent._reports.unsent_ends) == [T]
        made.set()
        with pytest.raises(TicketClosed):
            await spawning


@pytest.mark.spec("A10")
@pytest.mark.usefixtures("no_arbiter", "granted")
async def test_ticket_reaped_while_it_is_forked_has_its_bytes_back_when_its_process_has_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = agent_in(folder)
    async with asyncio.timeout(START_S):
        await running.spawn(TicketId("other"), FAKE_ENGINE)  # the zygote is up
        fork = running._engines.supervisor.zygote.spawn

        async def forks(ticket: TicketId, spec: SpawnSpec, path: Path) -> int:
            pid = await fork(ticket, spec, path)
            await running.kill(T)
            assert T not in running._reports.unsent_ends and procfs.process(pid)
            return pid

        monkeypatch.setattr(running._engines.supervisor.zygote, "spawn", forks)
        with pytest.raises(TicketClosed):
            await running.spawn(T, FAKE_ENGINE)
        await eventually(lambda: T in running._reports.unsent_ends)
        await running.close()


@pytest.mark.spec("A3", "A19")
@pytest.mark.usefixtures("granted")
async def test_nothing_is_forked_that_an_agent_without_descriptors_could_not_know(
    agent: NodeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines, opened = agent._engines, os.open

    async def is_up(_: TicketId) -> None: ...

    def few(path: str, *how: int) -> int:
        if path == os.devnull:
            raise OSError(errno.EMFILE, "Too many open files")
        return opened(path, *how)

    async def forks(*_: object) -> int:
        raise AssertionError("it forked")

    monkeypatch.setattr(engines, "_wait_for_zygote", is_up)
    monkeypatch.setattr(engines.supervisor.zygote, "spawn", forks)
    monkeypatch.setattr(os, "open", few)
    with pytest.raises(OSError, match="Too many open files"):
        await agent.spawn(T, SPEC)
    monkeypatch.undo()
    assert not engines._spawning and not engines._forked


@pytest.mark.usefixtures("granted")
@pytest.mark.spec("A14")
async def test_respawn_replaces_the_process_of_a_ticket_without_a_report(
    folder: Path,
) -> None:
    running = agent_in(folder)
    path = (await running.spawn(T, FAKE_ENGINE)).path
    [before] = (await running.engines())[T]
    async with asyncio.timeout(START_S):
        both = [running.respawn(T, FAKE_ENGINE) for _ in range(2)]
        assert [spawned.path for spawned in await asyncio.gather(*both)] == [path, path]
    [after] = (await running.engines())[T]
    assert after != before and not running._reports.unsent_ends and Path(path).exists()
    await running.kill(T)
    with pytest.raises(TicketClosed):
        await running.respawn(T, SPEC)
    await running.close()


@pytest.mark.usefixtures("granted")
@pytest.mark.spec("A3", "A14")
async def test_respawn_without_a_grant_leaves_the_process_alive(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = agent_in(folder)
    async with asyncio.timeout(START_S):
        await running.spawn(T, FAKE_ENGINE)
        before = await running.engines()

        async def refuse(_: object, ticket: TicketId) -> None:
            raise TicketNotGranted(ticket, NodeId("n"))

        monkeypatch.setattr(reports.Reports, "confirm", refuse)
        with pytest.raises(TicketNotGranted):
            await running.respawn(T, SPEC)
        assert await running.engines() == before
        found = procfs.process(before[T][0])
        assert found is not None and found.alive
        await running.close()
