"""Engines that hang, lie, hoard or fail, and clients that go away."""

import asyncio
import os
import signal
from typing import Any

import pytest
import ray

from arbiter.client.admin import call_arbiter
from arbiter.errors import EngineLost, LoadFailed
from arbiter.units import MIB, TicketId
from deployments.replica.lifecycle import watchdog
from deployments.replica.residency import Residency
from tests.support.live_arbiter import CONTEXT, capability, embedded, gone, live_arbiter, model

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.mark.spec("A12", "A19")
async def test_a_load_that_hangs_is_ended_in_time_and_says_so() -> None:
    async with live_arbiter(
        {"chat": capability(a=model(50, fail="hang"))}, load_timeout_s=1.5
    ) as d:
        # The holder and the arbiter have the same bound; either may be the first to say so.
        with pytest.raises(LoadFailed, match=r"not loaded after \d s|the arbiter ended its load"):
            await asyncio.wait_for(d.holder().ask.remote("a"), 90)
        await d.until(lambda s: not s["tickets"])
        assert await d.engines() == {}
        await d.books_are_true()


@pytest.mark.spec("B1")
async def test_a_child_that_declares_nothing_and_holds_200_mb_is_on_the_books_within_2_s() -> None:
    liar = {"source": "fake", "need": {"weights": 0, "host": 0}, "keep_warm_s": -1}
    liar["engine_args"] = {"bytes": 200 * MIB}  # type: ignore[assignment]
    async with live_arbiter({"chat": capability(a=liar)}) as d:
        h = d.holder()
        await h.keep.remote("a")
        state = await d.soon(
            lambda s: s["devices"] and s["devices"][0]["charged_bytes"] >= 200 * MIB, within_s=2
        )
        (ticket,) = state["tickets"]
        assert ticket["need_bytes"] == 0
        device = state["devices"][0]
        assert device["free_bytes"] <= device["budget_bytes"] - 200 * MIB
        await d.books_are_true()


@pytest.mark.spec("A10", "D1")
async def test_a_model_that_only_says_it_sleeps_is_not_believed_and_is_ended() -> None:
    hoarder = capability(a=model(200)) | {"engine": "tests.support.false_sleep_engine:build"}
    async with live_arbiter({"chat": hoarder, "other": capability(b=model(200))}) as d:
        chat, other = d.holder("chat"), d.holder("other")
        await chat.ask.remote("a")
        [(pid, *_)] = (await d.engines()).values()
        assert await asyncio.wait_for(other.ask.remote("b"), 60) == 200
        assert len(await d.events("not_asleep")) == 1
        await gone(pid)
        assert await asyncio.wait_for(chat.ask.remote("a"), 60) == 200
        await d.books_are_true()


@pytest.mark.spec("D6")
@pytest.mark.parametrize("forget", [True, "for good"])
async def test_a_wake_that_does_not_verify_is_reloaded_and_served(forget: bool | str) -> None:
    forgetful = capability(a=model(200, forget=forget))
    async with live_arbiter({"chat": forgetful, "other": capability(b=model(200))}) as d:
        chat, other = d.holder("chat"), d.holder("other")
        await chat.ask.remote("a")
        [first] = (await d.engines()).values()
        await other.ask.remote("b")
        await d.until(
            lambda s: {"asleep"} == {t["state"] for t in s["tickets"] if t["model"] == "a"}
        )
        assert await asyncio.wait_for(chat.ask.remote("a"), 60) == 200
        assert [e["model"] for e in await d.events("wake_unverified")] == ["a"]
        is_the_same = first in (await d.engines()).values()
        assert is_the_same is (forget is True)  # else its answers come from a new engine
        await d.books_are_true()


@pytest.mark.spec("A8", "J8")
async def test_a_client_that_leaves_while_streaming_ends_its_work() -> None:
    slow = model(50, chunks=2_000, chunk_seconds=0.05)
    async with live_arbiter({"chat": capability(a=slow)}) as d:
        h = d.holder()
        streaming = h.stream.remote("a")
        await d.until(lambda s: s["tickets"] and s["tickets"][0]["inflight"] == 1)
        ray.cancel(streaming)
        await d.until(lambda s: s["tickets"][0]["inflight"] == 0)
        assert await h.ask.remote("a") == 200
        await d.books_are_true()


@pytest.mark.spec("A10")
async def test_engine_that_does_not_end_when_it_is_told_to_is_killed() -> None:
    stays = model(50, stays=True)
    async with live_arbiter({"chat": capability(a=stays)}) as d:
        h = d.holder()
        await h.ask.remote("a")
        [(pid, *_)] = (await d.engines()).values()
        os.kill(pid, signal.SIGTERM)
        assert await h.ask.remote("a") == 200
        assert (await d.engines()).popitem()[1][0] == pid
        await h.end.remote("a")  # its lifeline is closed too
        await d.until(lambda s: not s["tickets"])
        await gone(pid)
        assert await d.engines() == {}
        await d.books_are_true()


@pytest.mark.spec("H9", "A10")
async def test_unload_by_hand_kills_an_engine_that_ignores_it_and_gives_its_bytes_back() -> None:
    async with live_arbiter({"chat": capability(a=model(50, stays=True))}) as d:
        h = d.holder()
        before = free_of(await d.state())
        assert await h.ask.remote("a") == 200
        [(ticket, (pid, *_))] = (await d.engines()).items()
        assert free_of(await d.state()) <= before - 50 * MIB
        await d.unload("a")
        await gone(pid)
        await d.until(lambda s: free_of(s) == before)
        [unload] = await d.events("model_unload")
        assert (unload["reason"], unload["to"]) == ("manual", "gone")
        await call_arbiter("unload", TicketId(ticket))  # once more, which changes nothing
        assert await h.ask.remote("a") == 200
        [(again, (other, *_))] = (await d.engines()).items()
        assert again != ticket and other != pid, "no state outlives the unload"
        await d.books_are_true()


def free_of(state: dict[str, Any]) -> int:
    """Of what may be lent, whatever else the machine holds."""
    [cpu] = [device for device in state["devices"] if device["kind"] == "cpu"]
    return int(cpu["budget_bytes"] - cpu["charged_bytes"])


@pytest.mark.spec("A10", "A19")
async def test_engine_that_does_not_end_with_its_dead_holder_is_killed() -> None:
    async with live_arbiter({"chat": capability(a=model(50, stays=True))}) as d:
        h = d.holder()
        await h.ask.remote("a")
        [(pid, *_)] = (await d.engines()).values()
        d.holders.remove(h)
        ray.kill(h)
        await d.until(lambda s: not s["tickets"])
        await gone(pid)
        await d.books_are_true()


@pytest.mark.spec("H9", "A10")
async def test_hanging_engine_is_killed_and_its_request_gets_engine_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchdog, "ASK_S", 0.1)
    async with live_arbiter() as d:
        residency = Residency.start("chat")
        assert (await embedded(residency, "a"))[0].status == 200
        [(pid, *_)] = (await d.engines()).values()
        agent = (await d.pids())["agent"]
        with monkeypatch.context() as impatience:  # an engine that is only slow has the whole time
            impatience.setattr(watchdog, "HUNG_S", 1.0)
            os.kill(pid, signal.SIGSTOP)
            os.kill(agent, signal.SIGSTOP)  # or the engine would be gone before it is seen to end
            try:
                with pytest.raises(EngineLost):
                    await asyncio.wait_for(embedded(residency, "a"), 90)
                await d.until(lambda s: [t["state"] for t in s["tickets"]] == ["reclaiming"])
            finally:
                os.kill(agent, signal.SIGCONT)
        await gone(pid)
        assert (await embedded(residency, "a"))[0].status == 200
        assert "lost" in [e["reason"] for e in await d.events("model_unload")]
        await residency.close()
        await d.books_are_true()


@pytest.mark.spec("A16", "B1")
async def test_an_engine_that_grows_past_its_ticket_makes_others_wait_not_fail() -> None:
    greedy = {"source": "fake", "need": {"weights": 50 * MIB, "context": CONTEXT, "host": 0}}
    greedy |= {"keep_warm_s": -1, "engine_args": {"bytes": 250 * MIB}}
    table = {"chat": capability(a=greedy), "other": capability(b=model(200))}
    async with live_arbiter(table) as d:
        chat, other = d.holder("chat"), d.holder("other")
        await chat.ask.remote("a")
        await d.until(lambda s: s["devices"][0]["charged_bytes"] >= 250 * MIB)
        assert await asyncio.wait_for(other.ask.remote("b"), 90) == 200
        assert [e["model"] for e in await d.events("model_unload")] == ["a"]
        await d.books_are_true()
