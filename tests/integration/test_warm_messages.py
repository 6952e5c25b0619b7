"""A warm request causes no message: every message is counted, at the holder and the arbiter."""

import asyncio
from typing import Any

import pytest

from arbiter.client.admin import find_arbiter
from arbiter.client.session import RENEW_S
from arbiter.core import events as ev
from deployments.replica.use import Use
from tests.support import message_counter
from tests.support.live_arbiter import LiveArbiter, live_arbiter
from tests.support.waits import eventually

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.spec("A5", "N2")]
REQUESTS = 200
# What goes on whether there are requests or not: each second the holder's heartbeat and the node's
# reading, and the arbiter's look at the node's agent. The agent reads four times a second at most,
# so that one message of these for each request is more than any test here waits for.
HEARTBEATS = {"renew", "report", "rpc_address"}


def others(counted: dict[str, int]) -> dict[str, int]:
    """Without the heartbeats, unless there are as many as requests."""
    return {
        what: count
        for what, count in counted.items()
        if what.split()[0] not in HEARTBEATS or count >= REQUESTS
    }


async def warm(d: LiveArbiter) -> Any:
    """A holder whose model serves, with all that belongs to its load said."""
    holder = d.own_holder()
    assert await holder.ask.remote("a") == 200
    await d.until(lambda s: [t["state"] for t in s["tickets"]] == ["resident"])

    async def nothing() -> None:
        return None

    async def all_is_said() -> bool:
        return await messages_of(holder, nothing) == ({}, {})

    await eventually(all_is_said, within_s=60)
    return holder


async def messages_of(holder: Any, requests: Any) -> tuple[dict[str, int], dict[str, int]]:
    """At the holder and at the arbiter, from before the requests until two heartbeats after."""
    processes = holder, find_arbiter()
    for process in processes:
        await message_counter.ask(process, message_counter.begin)
    await requests()
    seen = (await message_counter.ask(holder, message_counter.counts)).get("renew sent", 0)

    async def two_more() -> bool:
        now = await message_counter.ask(holder, message_counter.counts)
        return bool(now.get("renew answered", 0) >= seen + 2)

    await eventually(two_more, within_s=60 * RENEW_S)
    at_holder, at_arbiter = [
        await message_counter.ask(process, message_counter.counts) for process in processes
    ]
    assert at_holder["renew sent"] >= 2 and at_arbiter["renew heard"] >= 2
    return others(at_holder), others(at_arbiter)


async def test_warm_requests_cause_no_message_but_the_heartbeat() -> None:
    async with live_arbiter() as d:
        holder = await warm(d)

        async def ask() -> None:
            answers = await asyncio.gather(*(holder.ask.remote("a") for _ in range(REQUESTS)))
            assert answers == [200] * REQUESTS

        assert await messages_of(holder, ask) == ({}, {})


def plant(_actor: object) -> None:
    """A warm request that tells the arbiter, as a well-meant mend might."""
    enter = Use.__aenter__

    async def and_tell(self: Use) -> Use:
        await enter(self)
        assert self._held is not None
        of = self._residency
        of.client().tell(self._held.ticket_request(of.holder, of.capability))
        return self

    Use.__aenter__ = and_tell  # type: ignore[method-assign]


def plant_ray_call(_actor: object) -> None:
    """The same by Ray."""
    enter = Use.__aenter__

    async def and_call(self: Use) -> Use:
        find_arbiter().pid.remote()  # type: ignore[union-attr]
        return await enter(self)

    Use.__aenter__ = and_call  # type: ignore[method-assign]


def plant_heartbeat(_actor: object) -> None:
    """A warm request with a heartbeat of its own."""
    enter = Use.__aenter__

    async def and_renew(self: Use) -> Use:
        await enter(self)
        session: Any = self._residency.client().session
        renewed = ev.Renewed(session.holder, session._held_tickets())
        await session.arbiter.call("renew", session.epoch, renewed)
        return self

    Use.__aenter__ = and_renew  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("planted", "name", "requests_count"),
    [(plant, "tell", 1), (plant_ray_call, "pid", 1), (plant_heartbeat, "renew", REQUESTS)],
    ids=["socket", "ray", "heartbeat"],
)
async def test_planted_message_is_counted(planted: Any, name: str, requests_count: int) -> None:
    async with live_arbiter() as d:
        holder = await warm(d)
        await message_counter.ask(holder, planted)

        async def ask() -> None:
            answers = [holder.ask.remote("a") for _ in range(requests_count)]
            assert await asyncio.gather(*answers) == [200] * requests_count

        at_holder, at_arbiter = await messages_of(holder, ask)
        assert {what.split()[0] for what in at_holder} == {name}
        assert {what.split()[0] for what in at_arbiter} <= {name}
