"""A resident grows by a restart of its engine, and gives back, on a real cluster."""

import asyncio

import pytest

from arbiter.errors import GrowthRefused, NeverFits
from arbiter.protocol.messages import Plain
from arbiter.units import MIB
from tests.support.live_arbiter import capability, live_arbiter, model
from tests.support.waits import eventually

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.spec("A14")]


def of(state: Plain, name: str) -> Plain:
    [found] = [t for t in state["tickets"] if t["model"] == name]
    return dict(found)


def size(ticket: Plain, what: str) -> int:
    return int(sum(ticket[f"{what}_bytes"].values()))


async def test_growing_model_evicts_idle_models_and_gives_its_growth_back() -> None:
    more = {"grow_to": {"kv_cache_memory_bytes": 150 * MIB}, "can_sleep": False}
    far = {"grow_to": {"kv_cache_memory_bytes": 900 * MIB}}
    names = {"a": model(50) | more, "b": model(100, can_sleep=False), "c": model(10) | far}
    async with live_arbiter({"chat": capability(**names)}, mib=300) as d:
        h = d.holder()
        for name in ("a", "b"):
            assert await h.ask.remote(name) == 200
        before, engines = of(await d.state(), "a"), await d.engines()
        await h.grow.remote("a")
        state = await d.until(lambda s: size(of(s, "a"), "measured") >= 200 * MIB)
        assert [t["model"] for t in state["tickets"]] == ["a"]  # b was idle
        assert of(state, "a")["ticket"] == before["ticket"]
        assert (await d.engines())[before["ticket"]] != engines[before["ticket"]]
        assert await h.ask.remote("a") == 200
        await d.books_are_true()
        await h.give_back.remote("a")
        await d.until(lambda s: size(of(s, "a"), "charged") == size(before, "charged"))
        assert await h.ask.remote("a") == 200 and await h.ask.remote("c") == 200
        with pytest.raises(NeverFits):
            await h.grow.remote("c")
        assert await h.ask.remote("c") == 200  # with what it has
        await d.books_are_true()


async def test_growth_that_would_wait_on_a_holder_that_waits_to_grow_is_refused() -> None:
    more = {"grow_to": {"kv_cache_memory_bytes": 150 * MIB}, "can_sleep": False}
    both = {"chat": capability(a=model(100) | more), "other": capability(b=model(100) | more)}
    async with live_arbiter(both, mib=300) as d:
        chat, other = d.holder("chat"), d.holder("other")
        assert await chat.ask.remote("a") == 200
        await other.keep.remote("b")
        growing = chat.grow.remote("a")
        await eventually(lambda: d.events("growth_asked"))
        with pytest.raises(GrowthRefused, match="waits as well"):
            await other.grow.remote("b")
        await other.let_go.remote("b")
        await growing
        state = await d.until(lambda s: size(of(s, "a"), "measured") >= 250 * MIB)
        assert [t["model"] for t in state["tickets"]] == ["a"]
        await d.books_are_true()


async def test_requests_in_flight_end_before_their_model_is_restarted_to_grow() -> None:
    """A request that comes meanwhile waits for the new engine."""
    slow = {"chunks": 40, "chunk_seconds": 0.02}
    more = {"grow_to": {"kv_cache_memory_bytes": 50 * MIB}, "can_sleep": False}
    async with live_arbiter({"chat": capability(a=model(50, **slow) | more)}) as d:
        h = d.holder()
        ticket = await h.keep.remote("a")
        before, streamed = await d.engines(), h.stream.remote("a")
        growing = h.grow.remote("a")

        async def drains() -> bool:
            lives = await h.lives.remote()
            return bool(lives["a"] == "draining")

        await eventually(drains)
        [granted] = await d.events("growth_granted")
        late = h.ask.remote("a")

        async def waits() -> bool:
            return int(await h.waiting.remote("a")) == 1

        await eventually(waits)
        assert await streamed >= 40  # to its end
        assert await d.engines() == before and granted["size_bytes"] == 50 * MIB
        assert (await h.lives.remote())["a"] == "draining"
        await h.let_go.remote("a")
        assert await asyncio.wait_for(late, 90) == 200
        await growing
        after = await d.engines()
        assert after.keys() == before.keys() == {ticket} and after != before
        await d.until(lambda s: size(of(s, "a"), "measured") >= 100 * MIB)
        await d.books_are_true()
