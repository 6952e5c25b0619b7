"""Every process of the protocol killed under load. Afterwards: the books equal what is measured, no
process is left behind, the next request is served.
"""

import asyncio
from typing import Any

import pytest
import ray

from arbiter.errors import EngineLost
from tests.support.live_arbiter import LiveArbiter, capability, gone, kill, live_arbiter, model, two

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.spec("A19")]

SLOW = {"chunks": 2_000, "chunk_seconds": 0.05}  # a stream of 100 s, longer than any test needs
# For what leaves with a process that died: half of what a load here takes, or a barrier, or the
# silence after which a replica counts as dead.
LEAVES_S = 30.0


async def state_is(d: LiveArbiter, name: str, state: str) -> None:
    await d.until(lambda s: any((t["model"], t["state"]) == (name, state) for t in s["tickets"]))


async def served(d: LiveArbiter, name: str = "a", at: str = "chat") -> None:
    """The next request, from a new holder."""
    assert await asyncio.wait_for(d.holder(at).ask.remote(name), 90) == 200
    await d.books_are_true()


async def root(d: LiveArbiter) -> int:
    """Pid of the only engine."""
    (pids,) = (await d.engines()).values()
    return pids[0]


@pytest.mark.parametrize("state", ["queued", "loading", "resident", "draining", "asleep"])
async def test_a_holder_killed_leaves_nothing(state: str) -> None:
    slow = {"load_seconds": 60} if state == "loading" else {}
    async with live_arbiter(two(**slow), barrier_s=60) as d:
        chat, other = d.holder("chat"), d.holder("other")
        pid = await chat.pid.remote()
        await other.pid.remote()
        await reach(d, chat, other, state)
        kill(pid)
        await gone(pid)
        await d.until(lambda s: not any(t["model"] == "a" for t in s["tickets"]), LEAVES_S)
        await d.books_are_true()
        if state == "queued":
            await other.let_go.remote("b")
        assert await asyncio.wait_for(other.ask.remote("b"), 90) == 200


async def reach(d: LiveArbiter, chat: Any, other: Any, state: str) -> None:
    """Bring model `a` of `chat` into `state`."""
    if state == "queued":
        await other.keep.remote("b")
    if state == "draining":
        await chat.keep.remote("a")
        other.ask.remote("b")
    elif state in ("resident", "asleep"):
        await chat.ask.remote("a")
    else:
        chat.ask.remote("a")
    if state == "asleep":
        await other.ask.remote("b")
    await state_is(d, "a", state)


def is_reclaiming(state: dict[str, Any]) -> bool:
    return all(t["state"] == "reclaiming" for t in state["tickets"])


async def test_a_dead_holders_ticket_is_reclaiming_within_two_seconds() -> None:
    async with live_arbiter() as d:
        h = d.holder()
        pid = await h.pid.remote()
        await h.ask.remote("a")
        kill(pid)
        await d.soon(is_reclaiming, within_s=2)
        await served(d)


async def test_a_dead_engines_ticket_is_reclaiming_within_two_seconds() -> None:
    async with live_arbiter() as d:
        await d.holder().ask.remote("a")
        kill(await root(d))
        await d.soon(is_reclaiming, within_s=2)
        await d.until(lambda s: not s["tickets"])
        await served(d)


async def test_an_engine_killed_mid_stream_is_a_typed_error_and_the_next_request_loads() -> None:
    async with live_arbiter({"chat": capability(a=model(50, **SLOW))}) as d:
        h = d.holder()
        streaming = h.stream.remote("a")
        await d.until(lambda s: s["tickets"] and s["tickets"][0]["inflight"] == 1)
        await state_is(d, "a", "resident")
        kill(await root(d))
        with pytest.raises(EngineLost):
            await streaming
        # Its socket breaks before the agent is told of its end; a request between is lost, too.
        await d.until(lambda s: all(t["state"] != "resident" for t in s["tickets"]))
        assert await asyncio.wait_for(h.ask.remote("a"), 90) == 200
        await d.books_are_true()


async def test_an_engine_killed_while_it_sleeps_is_loaded_anew() -> None:
    async with live_arbiter(two()) as d:
        chat, other = d.holder("chat"), d.holder("other")
        await chat.ask.remote("a")
        pid = await root(d)
        await other.ask.remote("b")
        await state_is(d, "a", "asleep")
        kill(pid)
        await d.until(lambda s: [t["model"] for t in s["tickets"]] == ["b"], LEAVES_S)
        assert await asyncio.wait_for(chat.ask.remote("a"), 90) == 200
        await d.books_are_true()


async def test_a_killed_node_agent_finds_its_engines_again() -> None:
    async with live_arbiter({"chat": capability(a=model(50, **SLOW), b=model(50))}) as d:
        h = d.holder()
        streaming = h.stream.remote("a")
        await state_is(d, "a", "resident")
        before, pids = await d.engines(), await d.pids()
        kill(pids["agent"])
        assert await asyncio.wait_for(h.ask.remote("b"), 90) == 200
        assert before.items() <= (await d.engines()).items()
        assert (await d.pids())["zygote"] == pids["zygote"]
        await d.books_are_true()
        ray.cancel(streaming)


async def test_engines_live_through_a_killed_zygote_and_the_next_one_forks_more() -> None:
    async with live_arbiter({"chat": capability(a=model(50), b=model(50))}) as d:
        h = d.holder()
        await h.ask.remote("a")
        before, zygote = await d.engines(), (await d.pids())["zygote"]
        kill(zygote)
        await gone(zygote)
        assert await asyncio.wait_for(h.ask.remote("b"), 90) == 200
        assert before.items() <= (await d.engines()).items()
        assert await h.ask.remote("a") == 200
        await d.books_are_true()


async def test_agent_and_zygote_killed_together_still_know_their_engines() -> None:
    async with live_arbiter({"chat": capability(a=model(50), b=model(50))}) as d:
        h = d.holder()
        await h.ask.remote("a")
        engine, pids = await root(d), await d.pids()
        kill(pids["zygote"])
        kill(pids["agent"])
        assert await asyncio.wait_for(h.ask.remote("b"), 90) == 200
        await d.books_are_true()
        ray.kill(h)
        await gone(engine)
        await d.until(lambda s: not s["tickets"])
        await served(d)
