"""What waits between the arbiter and its holders is bounded, and nothing is lost where a bound is
reached (J8)."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from arbiter.client.admin import call_arbiter
from arbiter.client.session import OUTBOX_MOST_COUNT
from arbiter.protocol.messages import ModelSize, Resize
from arbiter.server.shell import COMMANDS_BESIDE_QUEUE_COUNT
from tests.support.live_arbiter import live_arbiter
from tests.support.waits import eventually

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.spec("J8")]
QUEUE = 10
NOTHING = Resize("no-model", ModelSize.FIRST)  # a command that has no effect


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def commanded(count: int) -> None:
    """So many commands are on their way to each holder."""
    await asyncio.gather(*(call_arbiter("resize", NOTHING) for _ in range(count)))


async def has_another_session(holder: Any, before: str) -> None:
    async def is_another() -> bool:
        return bool(await holder.session.remote() != before)

    await eventually(is_another, 60)


async def test_holder_that_reads_no_commands_is_kept_so_many_and_rejoins_with_what_it_has() -> None:
    async with live_arbiter(queue_total=QUEUE) as d:
        holder = d.holder()
        assert await holder.ask.remote("a") == 200
        pid, before = await holder.pid.remote(), await holder.session.remote()
        with stopped(pid):
            await commanded(COMMANDS_BESIDE_QUEUE_COUNT + QUEUE - 50)
        assert await holder.ask.remote("a") == 200
        assert await holder.session.remote() == before, "it has read them"
        with stopped(pid):
            await commanded(COMMANDS_BESIDE_QUEUE_COUNT + QUEUE + 1)
        await has_another_session(holder, before)
        assert await holder.ask.remote("a") == 200
        assert await d.states() == {"a": "resident"} and await holder.pid.remote() == pid
        assert len([e for e in await d.events("model_load") if e["model"] == "a"]) == 1


async def test_what_a_holder_has_to_say_is_bounded_while_the_arbiter_does_not_listen() -> None:
    async with live_arbiter() as d:
        holder = d.holder()
        assert await holder.ask.remote("a") == 200
        before = await holder.session.remote()
        with stopped(await d.arbiter_pid()):
            assert await holder.speak_often.remote(OUTBOX_MOST_COUNT // 2) <= OUTBOX_MOST_COUNT
            assert await holder.speak_often.remote(2 * OUTBOX_MOST_COUNT) <= OUTBOX_MOST_COUNT
        await has_another_session(holder, before)
        assert await holder.ask.remote("a") == 200
        assert await d.states() == {"a": "resident"}
