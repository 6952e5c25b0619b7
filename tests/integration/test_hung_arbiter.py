"""`arbiter down` and `arbiter upgrade` do without an answer of an arbiter that hangs."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from arbiter.client import admin
from arbiter.client.admin import find_arbiter, stop_arbiter, upgrade_arbiter
from arbiter.protocol.messages import StartConfig
from arbiter.server import state_path
from deployments.config import boot
from tests.support.live_arbiter import gone, live_arbiter
from tests.support.waits import WITHIN_S

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.spec("A20")]


@contextlib.contextmanager
def hung(pid: int) -> Iterator[pytest.MonkeyPatch]:
    """Commands give its answer up sooner, until what is given here is undone: the start of another
    arbiter may take as long as any. A kill that was sent meanwhile is delivered at the latest with
    the end."""
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.MonkeyPatch.context() as impatience:
            impatience.setattr(admin, "START_S", 10.0)
            yield impatience
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def test_arbiter_that_hangs_is_shut_down_with_its_agents_engines_and_zygotes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admin, "CLOSE_S", WITHIN_S)  # the agents do answer, if late
    async with live_arbiter() as d:
        await d.holder().ask.remote("a")
        pids = [pid for tree in (await d.engines()).values() for pid in tree]
        pids += [(await d.pids())[name] for name in ("zygote", "agent")]
        arbiter = await d.arbiter_pid()
        with hung(arbiter):
            report = await asyncio.to_thread(stop_arbiter, 1.0)
        assert "killed" in report["arbiter"] and find_arbiter() is None
        for pid in (arbiter, *pids):
            await gone(pid)


async def test_arbiter_that_hangs_is_upgraded_and_keeps_its_engines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with live_arbiter() as d:
        monkeypatch.setattr(state_path, "default_path", lambda: tmp_path / "of another.sqlite")
        h = d.holder()
        await h.ask.remote("a")
        engines, pid = await d.engines(), await d.arbiter_pid()
        with hung(pid) as impatience:

            def read(table: dict[str, Any]) -> StartConfig:
                impatience.undo()
                return boot.read(table)

            report = await asyncio.to_thread(upgrade_arbiter, read)
        assert "did not answer" in report["before"] and await d.arbiter_pid() != pid
        await d.until(lambda s: any(t["measured_bytes"] for t in s["tickets"]))
        assert await d.engines() == engines and await h.ask.remote("a") == 200
        await d.books_are_true()
