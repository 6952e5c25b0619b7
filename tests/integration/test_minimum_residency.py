"""How long a model may stay that another would replace, the share of time spent loading, and marks
of devices, on a real cluster (C4, C13).
"""

from dataclasses import replace

import pytest

from arbiter.client.admin import call_arbiter
from arbiter.core.types import Priority
from arbiter.units import MIB, seconds
from deployments.config import boot
from tests.support.live_arbiter import LiveArbiter, capability, live_arbiter, model
from tests.support.waits import eventually

STAYS_S = 15
pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.spec("C4")]


async def idle(d: LiveArbiter, *names: str) -> None:
    await d.until(lambda s: {t["model"] for t in s["tickets"] if t["idle_s"] is not None} == {
        *names
    })  # fmt: skip


async def test_model_stays_for_as_many_of_its_loads_as_the_settings_say() -> None:
    both = {"chat": capability(a=model(200, load_seconds=1)), "other": capability(b=model(200))}
    async with live_arbiter(both, min_residency_loads=3) as d:
        assert await d.holder("chat").ask.remote("a") == 200
        assert await d.holder("other").ask.remote("b") == 200
        load, *_ = await d.events("model_load")
        [eviction] = await d.events("eviction")
        assert (load["model"], eviction["model"]) == ("a", "a")
        # A line has the time at which it was written, on a busy machine a while after the load.
        assert eviction["unix_s"] - load["unix_s"] > 2 * load["took_s"] >= 2


async def test_minimum_residency_holds_against_an_equal_and_not_against_an_urgent_request() -> None:
    three = {name: capability(**{name: model(200, load_seconds=1)}) for name in "abc"}
    async with live_arbiter(three, min_residency_loads=60) as d:
        a, b, c = (d.holder(name) for name in "abc")
        assert await a.ask.remote("a") == 200
        b.ask.remote("b")  # which is still queued at the end
        await d.until(lambda s: [q["model"] for q in s["queue"]] == ["b"])
        await idle(d, "a")
        assert not await d.events("eviction")
        assert await c.ask.remote("c", priority=Priority.URGENT) == 200
        asked = {e["model"]: e["ticket"] for e in await d.events("ticket_queued")}
        [eviction] = await d.events("eviction")
        assert (eviction["model"], eviction["waiting"]) == ("a", asked["c"])
        assert [q["model"] for q in (await d.state())["queue"]] == ["b"]


@pytest.mark.spec("C13")
async def test_above_the_loading_share_that_is_shown_an_equal_request_waits_longer() -> None:
    """One load in ten minutes is above the bound, and would have models stay for the longest; else
    they stay for as long as their load took."""
    both = {"chat": capability(a=model(200, load_seconds=1)), "other": capability(b=model(200))}
    async with live_arbiter(both) as d:
        table = d.table.arbiter.model_copy(update={"loading_most": 0.001})
        made = boot.configuration(d.table.model_copy(update={"arbiter": table}))
        settings = replace(made.settings, min_residency_most=seconds(STAYS_S))
        await call_arbiter("configure", replace(made, settings=settings))
        a, b = d.holder("chat"), d.holder("other")
        assert await a.ask.remote("a") == 200
        [told] = await eventually(lambda: d.events("loading_share"))
        await b.pid.remote()  # it has started, and asks within the time that the model stays
        assert told["fraction"] > told["most"] == 0.001
        await d.unload("a")
        assert await a.ask.remote("a") == 200
        loads = await d.events("model_load")
        grants = await d.events("ticket_granted")
        loading_s = sum(load["took_s"] for load in loads)
        [device] = [x for x in (await d.state())["devices"] if x["loading_fraction"]]
        # From grant to load on the arbiter's clock; the holder's is what took_s says.
        most_s = loads[-1]["unix_s"] - grants[0]["unix_s"] + 0.1
        assert loading_s - 0.5 <= device["loading_fraction"] * 600 <= most_s, (loads, grants)
        waiting = b.ask.remote("b")
        [queued] = (await d.until(lambda s: s["queue"]))["queue"]
        sentences = " ".join((await call_arbiter("explain", queued["ticket"]))["sentences"])
        assert "longer because loads took" in sentences
        assert await waiting == 200
        [evicted_s] = [
            e["unix_s"] for e in await d.events("eviction") if e["waiting"] == queued["ticket"]
        ]
        assert evicted_s - loads[-1]["unix_s"] >= STAYS_S - 2  # of lines written late


async def test_marks_of_a_device_act_only_once_a_ticket_waits_and_free_down_to_the_low() -> None:
    """Four models of 74 MiB each, of 400: one would make room enough for the fifth."""
    chat = capability(**{name: model(50, can_sleep=False) for name in "abcd"})
    table = {"chat": chat, "other": capability(x=model(100))}
    async with live_arbiter(table, device_marks={"high": 0.7, "low": 0.5}) as d:
        h = d.holder()
        for name in "abcd":
            assert await h.ask.remote(name) == 200
        await d.until(lambda s: all((t["idle_s"] or 0) > 2 for t in s["tickets"]))
        assert not await d.events("eviction")
        assert await d.holder("other").ask.remote("x") == 200
        assert len(await d.events("eviction")) == 2
        await d.books_are_true()


async def test_marks_of_a_device_act_once_a_model_grows_and_free_down_to_the_low() -> None:
    """Four models of 74 MiB each, of 400: one that leaves would be room enough to grow by 150."""
    more = {"grow_to": {"kv_cache_memory_bytes": 150 * MIB}}
    sizes = {name: model(50, can_sleep=False) for name in "abcd"}
    chat = capability(**sizes | {"a": sizes["a"] | more})
    own = {"device_marks": {"high": 0.7, "low": 0.5}, "evict": "priority_lru"}
    async with live_arbiter({"chat": chat}, **own) as d:
        h = d.holder()
        for name in "abcd":
            assert await h.ask.remote(name) == 200
        await d.until(lambda s: all((t["idle_s"] or 0) > 2 for t in s["tickets"]))
        assert not await d.events("eviction")
        await h.grow.remote("a")
        assert [e["model"] for e in await d.events("eviction")] == ["b", "c"]
        await d.books_are_true()
