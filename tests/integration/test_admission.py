"""In which order a real arbiter grants queued tickets, and when it takes no more (C6, C7)."""

import asyncio

import pytest
import ray

from arbiter.errors import QueueFull
from tests.support.live_arbiter import LiveArbiter, capability, live_arbiter, model

pytestmark = pytest.mark.usefixtures("cluster")


async def queue_is(d: LiveArbiter, *models: str) -> None:
    await d.until(lambda s: tuple(q["model"] for q in s["queue"]) == models)


@pytest.mark.spec("C6")
async def test_ticket_that_cannot_load_now_is_bypassed_only_as_often_as_the_settings_say() -> None:
    """The bytes that fall free behind that bound are kept for it."""
    small = {name: capability(**{name: model(20)}) for name in "xyz"}
    large = {"busy": capability(a=model(200)), "large": capability(b=model(250))}
    async with live_arbiter(small | large, barrier_s=60, bypass_count=2) as d:
        busy, waiting = d.holder("busy"), d.holder("large")
        await busy.keep.remote("a")
        asked = waiting.ask.remote("b")
        await queue_is(d, "b")
        for name in "xy":  # it cannot load now, and they can
            assert await d.holder(name).ask.remote(name) == 200
        third = d.holder("z").ask.remote("z")
        await queue_is(d, "b", "z")  # there is room for it, as for the two before
        [cpu] = [x for x in (await d.state())["devices"] if x["kind"] == "cpu"]
        assert cpu["free_bytes"] > 50 << 20
        await busy.let_go.remote("a")
        assert await asyncio.wait_for(asyncio.gather(asked, third), 30) == [200, 200]
        granted = [e["model"] for e in await d.events("ticket_granted")]
        assert granted == ["a", "x", "y", "b", "z"]
        await d.books_are_true()


@pytest.mark.spec("C6")
async def test_model_that_sleeps_is_granted_before_a_cold_model_that_came_earlier() -> None:
    three = {name: capability(**{name: model(200)}) for name in "abc"}
    async with live_arbiter(three, barrier_s=60) as d:
        a, b, c = (d.holder(name) for name in "abc")
        assert await b.ask.remote("b") == 200
        await a.keep.remote("a")
        assert (await d.states())["b"] == "asleep"
        cold = c.ask.remote("c")
        await queue_is(d, "c")
        warm = b.ask.remote("b")
        await queue_is(d, "b", "c")
        await a.let_go.remote("a")
        assert await asyncio.wait_for(asyncio.gather(cold, warm), 30) == [200, 200]
        await d.books_are_true()


@pytest.mark.spec("C7", "J8")
async def test_full_queue_of_all_models_refuses_with_the_seconds_of_a_load() -> None:
    table = {name: capability(**{name: model(200)}) for name in "ab"}
    table["c"] = capability(c=model(200, load_seconds=2))
    async with live_arbiter(table, barrier_s=60, queue_total=1) as d:
        a, b, c = (d.holder(name) for name in "abc")
        assert await c.ask.remote("c") == 200
        await d.unload("c")
        await a.keep.remote("a")
        waiting = b.ask.remote("b")
        await queue_is(d, "b")
        with pytest.raises(ray.exceptions.RayTaskError) as caught:
            await c.ask.remote("c")
        refused = caught.value.cause
        assert isinstance(refused, QueueFull) and (refused.waiting, refused.bound) == (1, 1)
        assert 2 <= refused.retry_after_s < 20
        await a.let_go.remote("a")
        assert await asyncio.wait_for(waiting, 30) == 200
