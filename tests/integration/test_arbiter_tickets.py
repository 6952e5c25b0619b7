"""Tickets between real processes: single flight, swaps, refusals, cancellation, ends."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from arbiter.client.admin import (
    call_arbiter,
    find_arbiter,
    record_arbiter,
    start_arbiter,
    stop_arbiter,
)
from arbiter.client.holder import UNREACHABLE_S
from arbiter.core.types import CapabilitySpec, Priority
from arbiter.errors import (
    ArbiterUnavailable,
    CapabilityConflict,
    DeadlineUnmet,
    LoadFailed,
    ModelCoolingDown,
    NeverFits,
    QueueFull,
    TicketClosed,
    UnknownModel,
    UnknownTicket,
)
from arbiter.units import MIB, Span, TicketId, seconds
from deployments.cli.replay import compared
from deployments.config import boot
from deployments.config.schema import parse_table
from deployments.messages import refusal
from deployments.replica.residency import Residency
from tests.support.live_arbiter import capability, embedded, gone, live_arbiter, model, two
from tests.support.waits import eventually

pytestmark = pytest.mark.usefixtures("cluster")


def idle(s: dict[str, Any], name: str) -> bool:
    return any(t["model"] == name and t["idle_s"] is not None for t in s["tickets"])


@pytest.mark.spec("A1")
async def test_starting_the_arbiter_twice_yields_one_actor() -> None:
    async with live_arbiter() as d:
        again = await start_arbiter(boot.boot(d.table))
        assert await again.pid.remote() == await d.arbiter_pid()


@ray.remote(num_cpus=0)
class Starter:
    """A process of its own that starts the arbiter."""

    async def start(self, made: Any) -> int:
        handle = await start_arbiter(made)
        return int(await handle.pid.remote())


@pytest.mark.spec("A1")
async def test_concurrent_starts_from_several_processes_yield_one_arbiter(tmp_path: Path) -> None:
    table = parse_table({
        "arbiter": {"state_file": str(tmp_path / "arbiter.sqlite")},
        "capabilities": {"chat": capability(a=model(10))},
    })  # fmt: skip
    starters = [Starter.remote() for _ in range(4)]  # type: ignore[attr-defined]
    try:
        made = boot.boot(table)
        pids = await asyncio.gather(*(s.start.remote(made) for s in starters for _ in range(4)))
        assert len(pids) == 16
        assert set(pids) == {pid := await call_arbiter("pid")}
        for starter in starters:
            ray.kill(starter)
        await asyncio.gather(*(_ended(starter) for starter in starters))
        assert await call_arbiter("pid") == pid
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
    finally:
        for starter in starters:
            ray.kill(starter)
        await asyncio.to_thread(stop_arbiter, 5.0)


async def _ended(starter: Any) -> None:
    """A kill is under way for a moment, in which the actor still answers."""

    async def is_gone() -> bool:
        try:
            await starter.__ray_ready__.remote()
        except ray.exceptions.RayActorError:
            return True
        return False

    await eventually(is_gone)


@pytest.mark.spec("C7", "J8")
async def test_full_queue_refuses_with_retry_after() -> None:
    async with live_arbiter(two(), queue_per_model=2) as d:
        other, holders = d.holder("other"), [d.holder("chat") for _ in range(3)]
        await other.keep.remote("b")
        waiting = [asyncio.ensure_future(h.ask.remote("a")) for h in holders]
        refused, queued = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        (error,) = (one.exception() for one in refused)
        assert isinstance(error, ray.exceptions.RayTaskError)
        assert isinstance(error.cause, QueueFull)
        head, body = refusal(error.cause)
        assert head.status == 429 and int(head.headers["retry-after"]) >= 1
        assert b"bound 2" in body
        await other.let_go.remote("b")
        assert await asyncio.gather(*queued) == [200, 200]
        await d.books_are_true()


@pytest.mark.spec("A2")
async def test_unknown_model_is_refused_with_the_known_models() -> None:
    async with live_arbiter() as d:
        with pytest.raises(UnknownModel) as caught:
            await d.holder().ask.remote("nope")
        assert caught.value.cause.known == ("a",)
        with pytest.raises(CapabilityConflict):
            await call_arbiter("register", CapabilitySpec("chat", "vad", "m:f", (), Span(1)))


@pytest.mark.spec("A4")
async def test_a_hundred_requests_for_one_model_cause_one_load() -> None:
    async with live_arbiter({"chat": capability(a=model(50, load_seconds=0.3))}) as d:
        h = d.holder()
        assert await asyncio.gather(*(h.ask.remote("a") for _ in range(100))) == [200] * 100
        assert len(await d.events("model_load")) == 1
        await d.books_are_true()


@pytest.mark.spec("A4")
async def test_different_models_load_at_the_same_time() -> None:
    models = {n: model(50, load_seconds=1) for n in "abc"}
    async with live_arbiter({"chat": capability(**models)}) as d:
        h = d.holder()
        await h.pid.remote()
        asked = [h.ask.remote(n) for n in "abc"]
        state = await d.until(lambda s: [t["state"] for t in s["tickets"]] == ["loading"] * 3)
        [cpu] = [x for x in state["devices"] if x["kind"] == "cpu"]
        assert cpu["charged_bytes"] >= 3 * 50 * MIB  # before an engine has any of it
        assert await asyncio.gather(*asked) == [200] * 3


@pytest.mark.spec("A9", "A10", "D1")
async def test_an_idle_model_sleeps_for_another_and_wakes_with_its_process() -> None:
    async with live_arbiter(two()) as d:
        chat, other = d.holder("chat"), d.holder("other")
        assert await chat.ask.remote("a") == 200
        ticket, before = (await d.engines()).popitem()
        assert await other.ask.remote("b") == 200
        state = await d.until(lambda s: any(t["state"] == "asleep" for t in s["tickets"]))
        asleep = next(t for t in state["tickets"] if t["state"] == "asleep")
        measured = asleep["measured_bytes"]
        assert sum(b for k, b in measured.items() if k.endswith("/host")) == 200 * MIB
        assert sum(b for k, b in measured.items() if k.endswith("cpu:0")) < 20 * MIB
        await d.books_are_true()
        assert await chat.ask.remote("a") == 200
        assert (await d.engines())[ticket] == before
        assert len(await d.events("model_wake")) == 1
        await d.books_are_true()


@pytest.mark.spec("A9", "A10")
async def test_a_model_that_cannot_sleep_goes_and_its_bytes_are_seen_back_first() -> None:
    async with live_arbiter(two(can_sleep=False)) as d:
        chat, other = d.holder("chat"), d.holder("other")
        await chat.ask.remote("a")
        await other.ask.remote("b")
        unloads = await d.events("model_unload")
        assert [(e["reason"], e["to"]) for e in unloads] == [("swap", "gone")]
        granted = (await d.events("ticket_granted"))[-1]
        assert granted["model"] == "b" and granted["seq"] > unloads[0]["seq"]
        await d.books_are_true()


@pytest.mark.spec("A6", "A9")
async def test_model_in_use_is_not_evicted_and_the_queued_ticket_keeps_its_place() -> None:
    async with live_arbiter(two(), barrier_s=0.5) as d:
        chat, other = d.holder("chat"), d.holder("other")
        await chat.keep.remote("a")
        waiting = other.ask.remote("b")
        await d.until(lambda s: s["queue"])
        await eventually(lambda: d.events("barrier_dropped"))
        assert await chat.ask.remote("a") == 200
        await chat.let_go.remote("a")
        assert await asyncio.wait_for(waiting, 90) == 200
        await d.books_are_true()


@pytest.mark.spec("A8", "K1")
async def test_cancelled_request_leaves_the_queue_and_loads_nothing() -> None:
    async with live_arbiter(two(), barrier_s=60) as d:
        chat, other = d.holder("chat"), d.holder("other")
        await chat.keep.remote("a")
        waiting = other.ask.remote("b")
        [queued] = (await d.until(lambda s: s["queue"]))["queue"]
        ray.cancel(waiting)
        await d.until(lambda s: not s["queue"])
        [closed] = await d.events("ticket_closed")
        assert (closed["ticket"], closed["reason"]) == (queued["ticket"], "withdrawn")
        await chat.let_go.remote("a")
        await d.books_are_true()
        assert "b" not in await d.states()
        assert [e["model"] for e in await d.events("ticket_granted")] == ["a"]


@pytest.mark.spec("A8")
async def test_a_load_whose_caller_left_stops_and_gives_everything_back() -> None:
    async with live_arbiter({"chat": capability(a=model(50, load_seconds=60))}) as d:
        h = d.holder()
        asked = h.ask.remote("a")
        await d.until(lambda s: s["tickets"] and s["tickets"][0]["state"] == "loading")
        ray.cancel(asked)
        await d.until(lambda s: not s["tickets"])
        assert await d.engines() == {}
        await d.books_are_true()


@pytest.mark.spec("A8")
async def test_queued_request_is_served_when_another_for_the_same_model_is_cancelled() -> None:
    async with live_arbiter({"chat": capability(a=model(50, load_seconds=3))}) as d:
        h = d.holder()
        first, second = h.ask.remote("a"), h.ask.remote("a")

        async def both_wait() -> bool:
            return int(await h.waiting.remote("a")) == 2

        await eventually(both_wait)
        ray.cancel(first)
        assert await second == 200
        assert len(await d.events("model_load")) == 1


@pytest.mark.spec("A21")
async def test_a_deadline_that_cannot_be_met_is_a_typed_refusal() -> None:
    async with live_arbiter(two(), barrier_s=60) as d:
        chat, other = d.holder("chat"), d.holder("other")
        await chat.keep.remote("a")
        with pytest.raises(DeadlineUnmet):
            await other.ask.remote("b", deadline_s=0.5)
        await d.until(lambda s: not s["queue"])


@pytest.mark.spec("A21")
async def test_predicted_wait_counts_the_loads_of_the_tickets_before_it() -> None:
    slow = {name: model(200, load_seconds=0.5, can_sleep=False) for name in "abc"}
    async with live_arbiter({name: capability(**{name: slow[name]}) for name in slow}) as d:
        a, b, c = (d.holder(name) for name in "abc")
        for name, holder in (("c", c), ("b", b)):
            assert await holder.ask.remote(name) == 200  # its seconds are known
        await a.keep.remote("a")
        await d.until(lambda s: any(t["in_state_s"] > 2 and t["inflight"] for t in s["tickets"]))
        seen = (await d.state())["sequence"]
        second = b.ask.remote("b")
        await d.until(lambda s: len(s["queue"]) == 1)
        third = c.ask.remote("c")
        await d.until(lambda s: len(s["queue"]) == 2)
        told = [e for e in await d.events("ticket_waits") if e["seq"] > seen]
        predicted_s = {e["model"]: e["took_s"] for e in told}
        assert predicted_s["b"] >= 0.5 and predicted_s["c"] >= predicted_s["b"] + 0.5
        await a.let_go.remote("a")
        assert await asyncio.gather(second, third) == [200, 200]


@pytest.mark.spec("A12")
async def test_failed_load_answers_every_waiting_request_and_cools_the_model_down() -> None:
    async with live_arbiter({"chat": capability(a=model(50, fail="error", load_seconds=0.2))}) as d:
        h = d.holder()
        asked = [h.ask.remote("a") for _ in range(5)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(a, LoadFailed) for a in answers)
        assert "told to fail" in str(answers[0])
        with pytest.raises(ModelCoolingDown):
            await h.ask.remote("a")
        await d.until(lambda s: not s["tickets"])
        await d.books_are_true()


@pytest.mark.spec("A12")
async def test_a_load_that_fails_for_memory_is_tried_once_more_and_asks_for_more() -> None:
    async with live_arbiter({"chat": capability(a=model(50, fail="memory"))}) as d:
        with pytest.raises(LoadFailed) as caught:
            await d.holder().ask.remote("a")
        assert caught.value.cause.out_of_memory
        first, second = await d.events("ticket_granted")
        assert second["size_bytes"] > first["size_bytes"]
        await d.until(lambda s: not s["tickets"])
        await d.books_are_true()


@pytest.mark.spec("B6", "K1")
async def test_a_model_larger_than_the_whole_budget_is_refused_with_the_numbers() -> None:
    async with live_arbiter({"chat": capability(a=model(1000))}, mib=200) as d:
        with pytest.raises(NeverFits) as caught:
            await d.holder().ask.remote("a")
        assert caught.value.cause.budget_bytes // MIB in (199, 200)
        [refused] = await d.events("ticket_refused")
        assert (refused["ticket"], refused["code"]) == (caught.value.cause.ticket, "never_fits")


@pytest.mark.spec("C8", "H0")
async def test_idle_model_is_unloaded_after_keep_warm_without_a_request() -> None:
    async with live_arbiter({"chat": capability(a=model(50, keep_warm_s=0.5))}) as d:
        await d.holder().ask.remote("a")
        await d.until(lambda s: not s["tickets"])
        (unload,) = await d.events("model_unload")
        assert (unload["reason"], unload["to"]) == ("idle", "gone")
        assert await d.engines() == {}


@pytest.mark.spec("C8")
async def test_pinned_model_is_loaded_without_a_request() -> None:
    async with live_arbiter({"chat": capability(a=model(50, pin=True))}) as d:
        d.holder()
        await d.until(lambda s: s["tickets"] and s["tickets"][0]["state"] == "resident")


@pytest.mark.spec("A7", "J7")
async def test_a_driver_holds_a_model_too_and_use_after_release_is_typed() -> None:
    async with live_arbiter() as d:
        residency = Residency.start("chat")
        use = residency.use("a")
        async with use as engine:
            head, *_ = [p async for p in engine.stream("POST", "/v1/embeddings", {}, b"{}")]
            assert head.status == 200
        use.release()
        with pytest.raises(TicketClosed):
            use.stream("POST", "/v1/embeddings", {}, b"{}")
        with pytest.raises(ZeroDivisionError):
            async with residency.use("a"):
                await d.until(lambda s: s["tickets"][0]["inflight"] == 1)
                raise ZeroDivisionError
        await d.until(lambda s: s["tickets"][0]["inflight"] == 0)
        head, body = await embedded(residency, "a")
        assert head.status == 200 and b"embedding" in body
        await residency.close()
        await d.until(lambda s: not s["tickets"] and not s["holders"])
        await d.books_are_true()


@pytest.mark.spec("K1")
async def test_unload_by_hand_is_reported_as_manual() -> None:
    async with live_arbiter() as d:
        await d.holder().ask.remote("a")
        state = await d.until(lambda s: idle(s, "a"))
        await call_arbiter("unload", TicketId(state["tickets"][0]["ticket"]))
        await d.until(lambda s: not s["tickets"])
        assert [e["reason"] for e in await d.events("model_unload")] == ["manual"]


@pytest.mark.spec("K1", "J7")
async def test_a_subscriber_hears_the_next_event_at_once_and_misses_none() -> None:
    async with live_arbiter() as d:
        seen = (await d.state())["sequence"]
        waiting = asyncio.ensure_future(call_arbiter("events", seen, 20.0))
        await d.holder().ask.remote("a")
        heard = await waiting
        assert heard[0]["seq"] == seen + 1
        rest = await call_arbiter("events", heard[-1]["seq"], 0.1)
        numbers = [e["seq"] for e in (*heard, *rest)]
        assert numbers == list(range(seen + 1, seen + 1 + len(numbers)))


@pytest.mark.spec("A20")
async def test_shutdown_leaves_no_process_and_later_requests_get_a_typed_error() -> None:
    async with live_arbiter() as d:
        h = d.holder()
        await h.ask.remote("a")
        pids = [pid for tree in (await d.engines()).values() for pid in tree]
        pids.append((await d.pids())["zygote"])
        report = await asyncio.to_thread(stop_arbiter, 10.0)
        assert report["tickets_cut_off"] == 0 and find_arbiter() is None
        for pid in pids:
            await gone(pid)
        await h.wait_for_an_arbiter.remote(UNREACHABLE_S)
        with pytest.raises(ArbiterUnavailable):
            await h.ask.remote("a")


@pytest.mark.spec("A3", "C2", "C6")
async def test_ticket_carries_the_priority_of_its_request_in_the_queue_and_while_warm() -> None:
    three = {name: capability(**{name: model(200)}) for name in "abc"}
    async with live_arbiter(three, barrier_s=60) as d:
        a, b, c = (d.holder(name) for name in "abc")
        await a.keep.remote("a")
        normal = b.ask.remote("b")
        await d.until(lambda s: [q["model"] for q in s["queue"]] == ["b"])
        urgent = c.ask.remote("c", priority=Priority.URGENT)
        await d.until(lambda s: [q["model"] for q in s["queue"]] == ["c", "b"])
        told = {e["model"]: e["priority"] for e in await d.events("ticket_queued")}
        assert told == {"a": "normal", "b": "normal", "c": "urgent"}
        await a.let_go.remote("a")
        assert await asyncio.wait_for(urgent, 90) == 200
        state = await d.until(lambda s: any((t["idle_s"] or 0) > 2 for t in s["tickets"]))
        assert [q["model"] for q in state["queue"]] == ["b"]  # c is idle and still urgent
        assert await c.ask.remote("c") == 200  # it is as urgent as its last request
        assert await asyncio.wait_for(normal, 90) == 200
        assert [e["model"] for e in await d.events("ticket_granted")] == ["a", "c", "b"]
        await d.books_are_true()


@pytest.mark.spec("C2")
async def test_model_counts_as_batch_once_its_priority_has_been_carried_for_long_enough() -> None:
    """After 3 s in place of 900: with unlimited keep-warm it would not leave by itself."""
    async with live_arbiter(two()) as d:
        table = d.table.arbiter.model_copy(update={"barrier_s": 30.0})  # unchanged, nothing happens
        made = boot.configuration(d.table.model_copy(update={"arbiter": table}))
        shorter = replace(made.settings, carry_most=seconds(3))
        await call_arbiter("configure", replace(made, settings=shorter))
        a, b = d.holder("chat"), d.holder("other")
        assert await a.ask.remote("a") == 200
        batch = b.ask.remote("b", priority=Priority.BATCH)
        [queued] = (await d.until(lambda s: s["queue"]))["queue"]
        why = (await call_arbiter("explain", queued["ticket"]))["sentences"]
        assert any("more urgent (normal before batch)" in line for line in why), why
        assert await asyncio.wait_for(batch, 90) == 200
        [eviction] = await d.events("eviction")
        asked = (eviction["model"], eviction["waiting"], eviction["reason"])
        assert asked == ("a", queued["ticket"], "swap")
        await d.books_are_true()


@pytest.mark.spec("A20")
async def test_shutdown_waits_for_a_model_in_use() -> None:
    async with live_arbiter() as d:
        h = d.holder()
        await h.keep.remote("a")
        stopping = asyncio.create_task(asyncio.to_thread(stop_arbiter, 30.0))
        state = await d.until(lambda s: s["is_closing"])
        assert [t["state"] for t in state["tickets"]] == ["resident"] and not stopping.done()
        await h.let_go.remote("a")
        assert (await stopping)["tickets_cut_off"] == 0


@pytest.mark.spec("A20")
async def test_shutdown_ends_a_model_that_stays_in_use_for_longer_than_it_waits() -> None:
    async with live_arbiter() as d:
        await d.holder().keep.remote("a")
        [(pid, *_)] = (await d.engines()).values()
        report = await asyncio.to_thread(stop_arbiter, 1.0)
        assert report["tickets_cut_off"] == 1
        await gone(pid)


@pytest.mark.spec("C12")
async def test_changed_settings_begin_a_new_epoch_and_keep_resident_models() -> None:
    async with live_arbiter(two()) as d:
        chat, other = d.holder("chat"), d.holder("other")
        await chat.ask.remote("a")
        before, epoch = await d.engines(), (await d.state())["epoch"]
        arbiter = d.table.arbiter.model_copy(update={"barrier_s": 3.0})
        changed = d.table.model_copy(update={"arbiter": arbiter})
        await call_arbiter("configure", boot.configuration(changed))
        state = await d.until(lambda s: s["epoch"] > epoch and s["tickets"])
        assert state["tickets"][0]["state"] == "resident" and await d.engines() == before
        assert await other.ask.remote("b") == 200
        await d.books_are_true()


@pytest.mark.spec("K3")
async def test_explain_answers_and_a_recording_replays_to_the_same_decisions(
    tmp_path: Path,
) -> None:
    async with live_arbiter(two()) as d:
        first = (await d.state())["epoch"]
        log = tmp_path / "log.jsonl"
        assert await asyncio.to_thread(record_arbiter, str(log)) == {"recording": str(log)}
        await d.until(lambda s: s["epoch"] > first)
        h, other = d.holder("chat"), d.holder("other")
        await other.keep.remote("b")
        waiting = asyncio.ensure_future(h.ask.remote("a"))
        s = await d.until(lambda s: s["queue"])
        asked = s["queue"][0]["ticket"]
        why = await call_arbiter("explain", asked)
        (shortage,) = why["shortages"]
        assert shortage["need_bytes"] > shortage["free_bytes"] > 0
        assert [x["model"] for x in shortage["charged_tickets"]] == ["b"]
        (victim,) = (t["ticket"] for t in s["tickets"] if t["model"] == "b")
        await other.let_go.remote("b")
        assert await waiting == 200
        then = await call_arbiter("explain", victim)
        (past,) = then["past"]
        assert (past["part"], past["waiting"]) == ("went", asked)
        assert "it was asked to leave" in then["sentences"][-1]
        with pytest.raises(UnknownTicket):
            await call_arbiter("explain", TicketId("nobody"))
    found = compared(log, ["time_of_day"])
    assert found["decided_as_recorded"] == found["events"] > 10
    assert found["policies"]["time_of_day"]["loads_count"] >= 1
