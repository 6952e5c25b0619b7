"""Drivers and leases that hang or die give their bytes back, on a real cluster."""

import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import ray

from arbiter import leases
from tests.support.engine_host import ROOT
from tests.support.live_arbiter import LiveArbiter, live_arbiter
from tests.support.waits import eventually

pytestmark = pytest.mark.usefixtures("cluster")
# Ten heartbeats; and room for a machine on which twenty processes want two cores.
SILENCE_S, SLACK_S = 10.0, 30.0
START_S = 60.0  # of a process with Ray, on such a machine


class Driver:
    """A process of its own that holds a model."""

    def __init__(self, process: Process) -> None:
        self.process = process

    async def answer(self) -> str:
        """The ticket under which it was served; empty when it has ended."""
        assert self.process.stdout is not None
        async with asyncio.timeout(START_S):
            return (await self.process.stdout.readline()).decode().strip()

    async def ask_again(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        await self.process.stdin.drain()
        return await self.answer()


@asynccontextmanager
async def driver(model: str) -> AsyncIterator[tuple[Driver, str]]:
    """A driver, and the ticket that it holds."""
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "tests.support.model_driver", address, "chat", model]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=PIPE, stdout=PIPE)
    try:
        running = Driver(process)
        yield running, await running.answer()
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def in_use(d: LiveArbiter, ticket: str) -> None:
    """The arbiter has heard that its model serves a request."""
    await d.until(lambda s: (ticket, 1) in {(t["ticket"], t["inflight"]) for t in s["tickets"]})


def states(state: dict[str, Any]) -> set[tuple[str, str]]:
    return {(t["ticket"], t["state"]) for t in state["tickets"]}


async def given_up(d: LiveArbiter, ticket: str, within_s: float) -> None:
    """Off the books: its holder counts as dead and its engine is gone."""
    await d.until(lambda s: ticket not in {t["ticket"] for t in s["tickets"]}, within_s)
    assert ticket not in await d.engines()


@pytest.mark.spec("A1", "A5")
async def test_driver_that_hangs_is_dead_after_ten_seconds_and_rejoins_when_it_goes_on() -> None:
    async with live_arbiter() as d:
        async with driver("a") as (running, ticket):
            await in_use(d, ticket)
            stopped_s = time.time()
            os.kill(running.process.pid, signal.SIGSTOP)
            await given_up(d, ticket, SILENCE_S + SLACK_S)
            [lost] = await d.events("holder_lost")
            # From its last heartbeat on, which may have been a second before.
            assert lost["unix_s"] - stopped_s > SILENCE_S - 1.5
            await d.books_are_true()
            os.kill(running.process.pid, signal.SIGCONT)

            async def is_served_anew() -> bool:
                return await running.ask_again() not in ("", ticket)

            await eventually(is_served_anew)
            await d.books_are_true()


@pytest.mark.spec("A5", "A7", "A19")
async def test_killed_driver_gives_its_ticket_back() -> None:
    """Sooner than by its silence."""
    async with live_arbiter() as d:
        async with driver("a") as (running, ticket):
            await in_use(d, ticket)
            running.process.kill()
            await d.soon(lambda s: (ticket, "resident") not in states(s), within_s=2)
            await given_up(d, ticket, SLACK_S)
            await d.books_are_true()


class Mute(leases.RayTransport):
    """A way to the arbiter that breaks when told."""

    is_broken = False

    def put(self, lease: str, body: leases.Plain) -> leases.Plain:
        if self.is_broken:
            raise ConnectionError("cut")
        return super().put(lease, body)


@pytest.mark.spec("A15")
async def test_lease_without_heartbeats_lapses_after_ten_seconds_at_both_ends() -> None:
    async with live_arbiter(lease_tenant="1 GiB") as d:
        way = Mute()
        lease = leases.ask(0.1, name="mute", way=way)
        await asyncio.to_thread(lease.acquire)
        assert lease.lapse_s == SILENCE_S
        way.is_broken = True
        await d.until(lambda s: not any(t["lease"] for t in s["tickets"]), SILENCE_S + SLACK_S)
        assert (await d.events("lease_ended"))[-1]["reason"] == "lost"
        assert await asyncio.to_thread(lease.ended.wait, SLACK_S)
        assert "10 s" in lease.reason
