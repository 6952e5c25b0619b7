"""The node's zygote: found, started, and given up on, with its own last words or without any."""

import asyncio
import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest

from arbiter.core import events as ev
from arbiter.errors import TicketClosed
from arbiter.node import procfs, zygote_client
from arbiter.node import zygote_supervisor as module
from arbiter.protocol.messages import AgentSettings, SpawnSpec
from arbiter.units import NodeId, TicketId
from tests.support.hung_zygote import HungZygote
from tests.support.local_agent import BROKEN_ZYGOTE, START_S, agent_in
from tests.support.waits import eventually

T = TicketId("t")
SPEC = SpawnSpec("a:b", {})

pytestmark = pytest.mark.usefixtures("granted")


@pytest.mark.spec("A19")
async def test_zygote_that_cannot_start_is_given_up_with_the_end_of_its_log(folder: Path) -> None:
    running = agent_in(folder, BROKEN_ZYGOTE)
    async with asyncio.timeout(START_S):
        with pytest.raises(zygote_client.ZygoteError, match="No module named 'missing'"):
            await running.spawn(T, SPEC)
    await running.close()


@pytest.mark.spec("A10")
async def test_kill_ends_a_spawn_that_waits_for_a_zygote(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STARTS_FAILED", 1_000)
    running = agent_in(folder, BROKEN_ZYGOTE)
    spawning = asyncio.ensure_future(running.spawn(T, SPEC))
    await eventually(lambda: running._engines.supervisor.news._waiters)  # type: ignore[attr-defined]
    assert T in running._engines._spawning
    await running.kill(T)
    async with asyncio.timeout(60):
        with pytest.raises(TicketClosed):
            await spawning
    assert running._reports.unsent_ends[T] == ev.EngineGone(NodeId("n"), T, bytes_back=True)
    await running.close()


async def nothing() -> None: ...


def supervisor(folder: Path) -> module.ZygoteSupervisor:
    """Of the zygote that serves `zygote.sock` there."""
    settings, log = AgentSettings("no.zygote"), folder / "zygote.log"
    return module.ZygoteSupervisor(settings, folder / "zygote.sock", log, nothing, lambda: None)


@pytest.mark.spec("A19")
async def test_zygote_that_hangs_over_a_spawn_is_given_up_after_three_pings(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the spawn is asked for again and again, as the agent does."""
    monkeypatch.setattr(module, "TURN_S", 0.01)
    monkeypatch.setattr(zygote_client, "ANSWER_S", 0.05)
    hangs = supervisor(folder)
    own = procfs.process(os.getpid())
    assert own is not None
    hangs.known = (own.pid, own.start_ticks)  # it lives

    async def spawn() -> None:
        while True:
            with contextlib.suppress(zygote_client.ZygoteError):
                await hangs.zygote.spawn(T, SPEC, folder / "t.sock")
            await asyncio.sleep(0)

    async with HungZygote(folder) as hung:
        spawning = asyncio.ensure_future(spawn())
        try:
            async with asyncio.timeout(60):
                await hung.asked.wait()
                await hangs._stays_up()
        finally:
            spawning.cancel()
            hangs.zygote.close()


@pytest.mark.spec("A19")
@pytest.mark.parametrize(
    "shell",
    [
        subprocess.TimeoutExpired("sh", 10),
        subprocess.CalledProcessError(2, "sh"),
        BlockingIOError("no process can be forked"),
        subprocess.CompletedProcess("sh", 0, stdout=b""),
    ],
    ids=["slow", "failed", "not forked", "silent"],
)
async def test_start_that_fails_in_the_shell_is_tried_again_and_then_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, shell: Exception | object
) -> None:
    """As on a machine that is short of memory."""
    tries: list[object] = []

    def run(*_: object, **__: object) -> object:
        tries.append(shell)
        if isinstance(shell, Exception):
            raise shell
        return shell

    monkeypatch.setattr(zygote_client.subprocess, "run", run)
    starts = supervisor(folder)
    keeping = asyncio.ensure_future(starts.keep())
    await eventually(lambda: starts.trouble or keeping.done())
    assert not keeping.done(), keeping.exception()
    assert "does not start" in str(starts.trouble) and len(tries) >= module.STARTS_FAILED
    keeping.cancel()


@pytest.mark.spec("A19")
async def test_zygote_that_still_starts_is_killed_with_its_supervisor(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = subprocess.Popen(["sleep", "600"])
    monkeypatch.setattr(zygote_client, "start", lambda *_: starts.pid)
    made = supervisor(folder)
    keeping = asyncio.ensure_future(made.keep())
    await eventually(lambda: made.pids == {starts.pid})
    keeping.cancel()
    made.end()
    assert await asyncio.to_thread(starts.wait, 60) == -signal.SIGKILL
