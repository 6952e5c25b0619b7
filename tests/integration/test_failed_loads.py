"""Loads that break or are abandoned (A8, A12): what is tried again, comes back or goes on."""

import time
from pathlib import Path
from typing import Any

import pytest
import ray

from arbiter.errors import LoadFailed
from arbiter.protocol import messages
from tests.support.live_arbiter import LiveArbiter, capability, kill, live_arbiter, model
from tests.support.waits import eventually

pytestmark = pytest.mark.usefixtures("cluster")


async def order(d: LiveArbiter, *kinds: str) -> list[tuple[str, str]]:
    """Kind and model of each event of these kinds, in their order."""
    return [(e["kind"], e["model"]) for e in await d.events() if e["kind"] in kinds]


@pytest.mark.spec("A12")
async def test_cool_down_doubles_with_each_failure_and_a_success_clears_it(tmp_path: Path) -> None:
    told = tmp_path / "told"
    async with live_arbiter({"chat": capability(a=model(50, told=str(told)))}) as d:
        h = d.holder()

        async def fails() -> None:
            told.write_text("error")
            with pytest.raises(LoadFailed):
                await h.ask.remote("a")
            await d.until(lambda s: s["cooldowns"])
            await d.until(lambda s: not s["cooldowns"])

        await fails()
        await fails()
        told.write_text("")
        assert await h.ask.remote("a") == 200
        await d.unload("a")
        await fails()
        paused = [(e["times"], e["took_s"]) for e in await d.events("cool_down")]
        assert paused == [(1, 2.0), (2, 4.0), (1, 2.0)]


@pytest.mark.spec("A12")
async def test_second_try_for_memory_evicts_first_and_its_failure_brings_the_victim_back() -> None:
    failing = capability(a=model(140, fail="memory"))
    other = capability(b=model(200, can_sleep=False))
    async with live_arbiter({"chat": failing, "other": other}) as d:
        chat, holder = d.holder("chat"), d.holder("other")
        assert await holder.ask.remote("b") == 200
        await d.until(lambda s: s["tickets"][0]["idle_s"] is not None)
        with pytest.raises(LoadFailed):
            await chat.ask.remote("a")
        await d.until(lambda s: [(t["model"], t["state"]) for t in s["tickets"]] == [
            ("b", "resident")
        ])  # fmt: skip
        assert await order(d, "load_failed", "eviction", "ticket_granted") == [
            ("ticket_granted", "b"),
            ("ticket_granted", "a"),
            ("load_failed", "a"),
            ("eviction", "b"),
            ("ticket_granted", "a"),
            ("load_failed", "a"),
            ("ticket_granted", "b"),
        ]
        assert await holder.ask.remote("b") == 200
        await d.books_are_true()


@pytest.mark.spec("A12")
@pytest.mark.parametrize("can_sleep", [False, True])
async def test_failed_swap_brings_the_model_back_that_made_room(can_sleep: bool) -> None:
    """Without a request for it, whether it had left or slept."""
    failing = capability(a=model(200, fail="error"))
    other = capability(b=model(200, can_sleep=can_sleep))
    async with live_arbiter({"chat": failing, "other": other}) as d:
        chat, holder = d.holder("chat"), d.holder("other")
        assert await holder.ask.remote("b") == 200
        with pytest.raises(LoadFailed):
            await chat.ask.remote("a")
        await d.until(lambda s: [(t["model"], t["state"]) for t in s["tickets"]] == [
            ("b", "resident")
        ])  # fmt: skip
        assert [e["model"] for e in await d.events("eviction")] == ["b"]
        runs = [e["model"] for e in await d.events("capability_run")]
        assert runs.count("b") <= 1, "its own request, before the swap"
        await d.books_are_true()


@pytest.mark.spec("A12")
async def test_engine_killed_from_outside_while_it_loads_is_loaded_once_more(
    tmp_path: Path,
) -> None:
    gate = tmp_path / "gate"
    async with live_arbiter({"chat": capability(a=model(50, gate=str(gate)))}) as d:
        asked = d.holder().ask.remote("a")
        await eventually(gate.with_suffix(".reached").exists)
        [(pid, *_)] = (await d.engines()).values()
        gate.touch()
        kill(pid)
        assert await asked == 200
        loads = await order(d, "ticket_granted", "load_failed", "model_load")
        assert [kind for kind, _ in loads][:1] == ["ticket_granted"]
        assert [kind for kind, _ in loads][-2:] == ["ticket_granted", "model_load"]
        await d.books_are_true()


@pytest.mark.spec("A8")
async def test_abandoned_load_stops_early_and_goes_on_when_it_is_nearly_done(
    tmp_path: Path,
) -> None:
    gate = tmp_path / "gate"
    reached = gate.with_suffix(".reached")
    gate.touch()
    slow = model(50, load_seconds=8, gate=str(gate))
    async with live_arbiter({"chat": capability(a=slow)}) as d:
        h = d.holder()
        assert await h.ask.remote("a") == 200  # and its seconds are known
        await d.unload("a")

        asked = h.ask.remote("a")
        granted = (await eventually(lambda: grants(d, 2)))[-1]
        await eventually(lambda: time.time() - granted["unix_s"] > 2.5)  # of eight and more
        ray.cancel(asked)
        await d.until(lambda s: not s["tickets"])
        assert (await d.events("model_unload"))[-1]["reason"] == "withdrawn"

        gate.unlink()
        reached.unlink()
        asked = h.ask.remote("a")
        await is_loading(d)
        await eventually(reached.exists)
        ray.cancel(asked)
        await has_left(h)
        gate.touch()
        await d.until(lambda s: [t["state"] for t in s["tickets"]] == ["resident"])
        loads = await order(d, "model_load")
        assert await h.ask.remote("a") == 200
        assert await order(d, "model_load") == loads == [("model_load", "a")] * 2
        await d.books_are_true()


async def grants(d: LiveArbiter, count: int) -> list[messages.Plain]:
    """All of them, once there are so many."""
    granted = await d.events("ticket_granted")
    return granted if len(granted) >= count else []


async def is_loading(d: LiveArbiter) -> None:
    await d.until(lambda s: [t["state"] for t in s["tickets"]] == ["loading"])


async def has_left(holder: Any) -> None:
    async def no_caller_waits() -> bool:
        return int(await holder.waiting.remote("a")) == 0

    await eventually(no_caller_waits)
