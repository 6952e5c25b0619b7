"""The arbiter dies at any moment: warm requests do not notice, its books come back exactly, waiters
are answered under the ticket they asked with.
"""

import asyncio
import os
import signal
from typing import Any

import pytest

from arbiter.client.admin import call_arbiter
from arbiter.core.events import Loaded, Renewed
from arbiter.core.types import LeaseConditions
from arbiter.errors import StaleEpoch
from arbiter.protocol.messages import LeaseCall
from arbiter.units import MIB, Bytes, Epoch, HolderId, Span, TicketId, seconds
from tests.support.live_arbiter import LiveArbiter, capability, gone, kill, live_arbiter, model, two
from tests.support.waits import WITHIN_S, eventually

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.spec("A18")]


def charges(state: dict[str, Any]) -> dict[str, Any]:
    return {t["ticket"]: (t["state"], t["charged_bytes"]) for t in state["tickets"]}


@pytest.mark.spec("K1")
async def test_a_restarted_arbiter_rebuilds_its_books_exactly() -> None:
    async with live_arbiter({"chat": capability(a=model(50), b=model(60))}) as d:
        h = d.holder()
        await h.ask.remote("a")
        await h.ask.remote("b")
        before = await d.until(lambda s: all(t["measured_bytes"] for t in s["tickets"]))
        kill(await d.arbiter_pid())
        after = await d.until(lambda s: s["epoch"] > before["epoch"] and len(s["tickets"]) == 2)
        assert charges(after) == charges(before)
        assert after["is_settled"]
        told = {e["ticket"]: e["phase"] for e in await d.events("ticket_rejoined")}
        assert told == dict.fromkeys(charges(before), "resident")
        await d.books_are_true()


async def test_queued_ticket_is_granted_by_the_next_epoch_under_the_same_id() -> None:
    async with live_arbiter(two(), barrier_s=60) as d:
        chat, other = d.holder("chat"), d.holder("other")
        await chat.keep.remote("a")
        waiting = other.ask.remote("b")
        before = await d.until(lambda s: s["queue"])
        kill(await d.arbiter_pid())
        after = await d.until(lambda s: s["epoch"] > before["epoch"] and s["queue"])
        assert after["queue"][0]["ticket"] == before["queue"][0]["ticket"]
        await chat.let_go.remote("a")
        assert await asyncio.wait_for(waiting, 60) == 200
        await d.books_are_true()


async def test_warm_requests_in_an_outage_neither_fail_nor_wait() -> None:
    async with live_arbiter() as d:
        h = d.holder()
        await h.ask.remote("a")
        epoch, pid = (await d.state())["epoch"], await d.arbiter_pid()
        kill(pid)
        await gone(pid)
        await eventually(h.unreachable_s.remote)
        served_meanwhile = 0
        while away_s := await h.unreachable_s.remote():
            assert await h.ask.remote("a") == 200
            served_meanwhile += await h.unreachable_s.remote() > away_s  # of the same outage
        assert served_meanwhile
        await d.until(lambda s: s["epoch"] > epoch)
        await d.books_are_true()


@pytest.mark.spec("A15")
async def test_memory_held_for_a_term_alone_stays_held_and_what_left_returns_after_it() -> None:
    terms = LeaseConditions("default", seconds(600), Span(0), frees=True)
    call = LeaseCall("hold", Bytes(1 << 40), terms, "hold", seen="queued", wait=seconds(3))
    async with live_arbiter({"chat": capability(a=model(50))}) as d:
        await d.holder().ask.remote("a")
        await d.until(lambda s: s["tickets"][0]["idle_s"] is not None)
        answer = await call_arbiter("free", call, True)
        assert answer["lease"]["state"] == "held" and answer["plan"]["victims"]
        before = await d.until(lambda s: len(s["tickets"]) == 1)
        kill(await d.arbiter_pid())
        after = await d.until(lambda s: s["epoch"] > before["epoch"] and s["is_settled"])
        assert charges(after) == charges(before)
        await call_arbiter("end_lease", "hold", "default")
        await d.until(lambda s: {t["model"]: t["state"] for t in s["tickets"]} == {"a": "resident"})
        assert [e["models"] for e in await d.events("freed_return")] == ["chat/a"]
        await d.books_are_true()


@pytest.mark.spec("A19")
async def test_arbiter_and_holder_killed_together_leave_no_engine() -> None:
    async with live_arbiter() as d:
        h = d.holder()
        pid = await h.pid.remote()
        await h.ask.remote("a")
        (pids,) = (await d.engines()).values()
        kill(await d.arbiter_pid())
        kill(pid)
        for engine in pids:
            await gone(engine)
        await d.until(lambda s: s["is_settled"] and not s["tickets"])
        assert await asyncio.wait_for(d.holder().ask.remote("a"), 90) == 200
        await d.books_are_true()


def is_read(state: dict[str, Any]) -> bool:
    """What is free is known, so nothing else is waited for."""
    return any(device["physical_free_bytes"] for device in state["devices"])


async def test_restarted_arbiter_grants_nothing_before_known_living_holders_rejoin() -> None:
    """Though there is room enough: what it holds is not on the books yet."""
    both = {"chat": capability(a=model(50)), "other": capability(b=model(50))}
    # A busy machine may take all of the five seconds that are usual until another one asks.
    async with live_arbiter(both, timeouts={"rejoin": WITHIN_S}) as d:
        chat, other = d.holder("chat"), d.holder("other")
        pid = await chat.pid.remote()
        await other.pid.remote()
        await chat.ask.remote("a")
        epoch = (await d.state())["epoch"]
        os.kill(pid, signal.SIGSTOP)
        try:
            kill(await d.arbiter_pid())
            asked = other.ask.remote("b")
            waiting = await d.until(lambda s: s["epoch"] > epoch and s["queue"] and is_read(s))
        finally:
            os.kill(pid, signal.SIGCONT)
        assert not waiting["is_settled"]
        assert await asyncio.wait_for(asked, 60) == 200
        joined = [e for e in await d.events("holder_joined") if e["tickets"]]
        (granted,) = await d.events("ticket_granted")
        assert joined and joined[0]["seq"] < granted["seq"]
        await d.books_are_true()


@pytest.mark.spec("B7")
async def test_silent_holder_delays_a_restarted_arbiter_and_its_bytes_are_foreign() -> None:
    both = {"chat": capability(a=model(50)), "other": capability(b=model(50))}
    async with live_arbiter(both) as d:
        chat, other = d.holder("chat"), d.holder("other")
        pid = await chat.pid.remote()
        await other.pid.remote()
        await chat.ask.remote("a")
        epoch = (await d.state())["epoch"]
        os.kill(pid, signal.SIGSTOP)
        try:
            kill(await d.arbiter_pid())
            asked = other.ask.remote("b")
            await d.until(lambda s: s["epoch"] > epoch and s["queue"] and not s["is_settled"])
            assert await asyncio.wait_for(asked, 90) == 200
            waited_s = await seconds_to_grant(d, "b")
            # Five from the birth of its core, a moment before it says that it has started; of a
            # replica, silence counts as death after 60.
            assert 4.5 <= waited_s < 55
            state = await d.until(lambda s: foreign_bytes(s) >= 50 * MIB)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert [t["model"] for t in state["tickets"]] == ["b"]
        await d.until(lambda s: len(s["tickets"]) == 2 and foreign_bytes(s) == 0)
        assert await chat.ask.remote("a") == 200
        await d.books_are_true()


async def seconds_to_grant(d: LiveArbiter, model: str) -> float:
    """From the start of the arbiter of this epoch."""
    [started] = await d.events("arbiter_started")
    [granted] = [e for e in await d.events("ticket_granted") if e["model"] == model]
    return float(granted["unix_s"] - started["unix_s"])


def foreign_bytes(state: dict[str, Any]) -> int:
    """On the device that computes."""
    [found] = [x["foreign_bytes"] for x in state["devices"] if x["kind"] == "cpu"]
    return int(found)


async def test_messages_of_another_epoch_are_refused() -> None:
    async with live_arbiter() as d:
        h = d.holder()
        await h.ask.remote("a")
        state = await d.state()
        old, holder = Epoch(state["epoch"] - 1), HolderId(state["holders"][0]["holder"])
        with pytest.raises(StaleEpoch):
            await call_arbiter("tell", old, holder, Loaded(TicketId("x"), Span(1)))
        with pytest.raises(StaleEpoch):
            await call_arbiter("renew", old, Renewed(holder, ()))
        with pytest.raises(StaleEpoch):
            await call_arbiter("listen", HolderId("stranger"), Epoch(state["epoch"]), 0)


async def test_a_load_under_way_survives_the_arbiter() -> None:
    async with live_arbiter({"chat": capability(a=model(50, load_seconds=3))}) as d:
        asked = d.holder().ask.remote("a")
        await d.until(lambda s: s["tickets"] and s["tickets"][0]["state"] == "loading")
        engine = await eventually(d.engines)  # granted a moment before it is forked
        kill(await d.arbiter_pid())
        assert await asyncio.wait_for(asked, 90) == 200
        await d.books_are_true()
        assert (await d.engines()).keys() == engine.keys()


async def test_repeated_arbiter_kills_lose_and_double_nothing() -> None:
    async with live_arbiter({"chat": capability(a=model(50), b=model(60))}) as d:
        h = d.holder()
        for round_number in range(3):
            assert await asyncio.wait_for(h.ask.remote("ab"[round_number % 2]), 90) == 200
            kill(await d.arbiter_pid())
        assert await asyncio.wait_for(h.ask.remote("a"), 90) == 200
        await d.until(lambda s: len(s["tickets"]) == 2)
        await d.books_are_true()
