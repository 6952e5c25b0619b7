"""In which order a real arbiter grants queued tickets, and when it takes no more (C6, C7)."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import ray

from arbiter.core.settings import Timeouts
from arbiter.errors import QueueFull
from arbiter.units import in_seconds
from tests.support import message_counter
from tests.support.live_arbiter import LiveArbiter, capability, live_arbiter, model
from tests.support.waits import eventually

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
        assert await asyncio.wait_for(asyncio.gather(asked, third), 90) == [200, 200]
        granted = [e["model"] for e in await d.events("ticket_granted")]
        assert granted == ["a", "x", "y", "b", "z"]
        await d.books_are_true()


@pytest.mark.spec("C6")
async def test_ticket_is_bypassed_no_more_once_it_has_waited_as_long_as_the_settings_say() -> None:
    both = {"busy": capability(a=model(200)), "large": capability(b=model(250))}
    small = {"x": capability(x=model(20))}
    async with live_arbiter(both | small, barrier_s=60, bypass_s=1.0) as d:
        busy = d.holder("busy")
        await busy.keep.remote("a")
        asked = d.holder("large").ask.remote("b")
        await d.until(lambda s: [q["model"] for q in s["queue"] if q["waited_s"] > 1] == ["b"])
        later = d.holder("x").ask.remote("x")
        await queue_is(d, "b", "x")  # there is room for it
        [cpu] = [x for x in (await d.state())["devices"] if x["kind"] == "cpu"]
        assert cpu["free_bytes"] > 50 << 20
        await busy.let_go.remote("a")
        assert await asyncio.wait_for(asyncio.gather(asked, later), 90) == [200, 200]
        assert [e["model"] for e in await d.events("ticket_granted")] == ["a", "b", "x"]
        await d.books_are_true()


@pytest.mark.spec("C6")
async def test_equals_are_granted_as_they_came_and_first_while_another_load_of_theirs_runs(
    tmp_path: Path,
) -> None:
    """Of `u`, `a`, `c` and `e` two fit, so what is granted first is not what fits beside others."""
    gate = tmp_path / "gate"
    table = {name: capability(**{name: model(150, can_sleep=False)}) for name in "uce"}
    table["chat"] = capability(a=model(150, can_sleep=False, gate=str(gate)))
    async with live_arbiter(table, barrier_s=60) as d:
        u, c, e = (d.holder(name) for name in "uce")
        first, second, third = (d.holder("chat") for _ in range(3))
        await u.keep.remote("u")
        kept = [first.keep.remote("a")]
        await eventually(gate.with_suffix(".reached").exists)
        asked = [c.ask.remote("c")]
        await queue_is(d, "c")
        asked.append(e.ask.remote("e"))
        await queue_is(d, "c", "e")
        kept.append(second.keep.remote("a"))
        await queue_is(d, "a", "c", "e")
        timeouts = await message_counter.ask(u, arbiters_timeouts)
        assert in_seconds(timeouts.bypass) == 30  # where nothing is set
        await u.let_go.remote("u")
        await queue_is(d, "c", "e")
        asked.append(third.ask.remote("a"))
        await queue_is(d, "a", "c", "e")
        gate.touch()
        await queue_is(d, "c", "e", "a")  # its loads have ended
        await asyncio.wait_for(asyncio.gather(*kept), 60)
        for holder in (first, second):
            await holder.let_go.remote("a")
        assert await asyncio.wait_for(asyncio.gather(*asked), 60) == [200] * 3
        granted = [line["model"] for line in await d.events("ticket_granted")]
        assert granted[:4] == ["u", "a", "a", "c"] and sorted(granted[4:]) == ["a", "e"]
        await d.books_are_true()


def arbiters_timeouts(holder: Any) -> Timeouts:
    """As a holder was told when it joined."""
    timeouts: Timeouts = holder.residency.client().timeouts
    return timeouts


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
        assert await asyncio.wait_for(asyncio.gather(cold, warm), 90) == [200, 200]
        [woke] = await d.events("model_wake")
        [loaded] = [e for e in await d.events("ticket_granted") if e["model"] == "c"]
        assert woke["model"] == "b" and woke["seq"] < loaded["seq"]
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
        assert 2 <= refused.retry_after_s < 60
        await a.let_go.remote("a")
        assert await asyncio.wait_for(waiting, 90) == 200
