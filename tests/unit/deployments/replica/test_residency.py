"""The life of a model on one holder, against a scripted arbiter and a real unix socket."""

import asyncio
import contextvars
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Reason, Tier
from arbiter.errors import (
    ArbiterUnavailable,
    DeadlineUnmet,
    EngineLost,
    LoadFailed,
    ModelCoolingDown,
    NeverFits,
    TicketClosed,
)
from arbiter.protocol import messages
from arbiter.units import Bytes, Span, TicketId, seconds
from deployments.config import load_plan
from deployments.config.load_plan import ModelPlan, Plans, plan
from deployments.replica.engine_client import EngineLink, LoadRefused
from deployments.replica.held_model import HolderState
from deployments.replica.lifecycle import loading, unloading
from tests.support.scripted_holder import (
    MODEL,
    TABLE,
    breaking,
    holder,
    revoke,
    until,
    use,
)


@pytest.mark.spec("A4")
async def test_concurrent_uses_share_one_load() -> None:
    async with holder(loaded=False) as (residency, arbiter, engine):
        uses = [asyncio.ensure_future(use(residency)) for _ in range(20)]
        await until(
            lambda: residency.models.get("a") and len(residency.models["a"].demand.waiters) == 20
        )
        engine.loaded.set()
        assert len(set(await asyncio.gather(*uses))) == 1
        assert len(arbiter.asked) == 1


@pytest.mark.spec("A5")
async def test_a_revoke_between_the_load_and_its_first_use_finds_the_model_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with holder(loaded=False) as (residency, arbiter, engine):
        waiting = asyncio.ensure_future(use(residency))
        await until(lambda: residency.models.get("a") and residency.models["a"].demand.waiters)
        held, serve = residency.models["a"], loading.serve

        def and_revoke(of: Any, held: Any, took_s: float) -> None:
            serve(of, held, took_s)
            revoke(residency, Reason.IDLE)

        monkeypatch.setattr(loading, "serve", and_revoke)
        engine.loaded.set()
        assert await waiting == held.ticket
        assert "Busy" in arbiter.kinds()


@pytest.mark.spec("A6", "A9")
async def test_a_pressure_revoke_of_a_busy_model_is_refused_and_of_an_idle_one_obeyed() -> None:
    async with holder() as (residency, arbiter, _):
        async with residency.use("a"):
            revoke(residency, Reason.PRESSURE)
            assert arbiter.kinds()[-1] == "Busy"
        revoke(residency, Reason.PRESSURE)
        await until(lambda: "a" not in residency.models)
        assert arbiter.told[-1] == ev.Released(arbiter.asked[0], "pressure")


@pytest.mark.spec("J2", "C8")
async def test_a_model_that_is_kept_warm_is_idle_for_others_and_not_for_its_keep_warm() -> None:
    async with holder() as (residency, arbiter, _):
        async with residency.use("a") as use:
            use.stay_warm(60.0)
        revoke(residency, Reason.IDLE)
        assert arbiter.kinds()[-1] == "Busy"
        revoke(residency, Reason.PRESSURE)
        await until(lambda: "a" not in residency.models)


@pytest.mark.spec("A9")
async def test_a_swap_waits_for_what_is_in_flight_and_new_requests_get_a_new_ticket() -> None:
    async with holder() as (residency, arbiter, _):
        async with residency.use("a"):
            revoke(residency, Reason.SWAP)
            late = asyncio.ensure_future(use(residency))
            await until(lambda: residency.models["a"].demand.waiters)
            assert "Released" not in arbiter.kinds()
        assert await late == arbiter.asked[1] != arbiter.asked[0]


@pytest.mark.spec("A9")
async def test_outlived_barrier_drops_and_waiting_requests_keep_the_old_ticket() -> None:
    async with holder() as (residency, arbiter, _):
        async with residency.use("a"):
            revoke(residency, Reason.SWAP, barrier_s=0.05)
            assert await use(residency) == arbiter.asked[0]
        assert "BarrierDropped" in arbiter.kinds()


@pytest.mark.spec("D1")
async def test_sleep_and_wake_keep_the_ticket() -> None:
    async with holder() as (residency, arbiter, engine):
        first = await use(residency)
        revoke(residency, Reason.SWAP, Tier.ASLEEP)
        await until(lambda: "Slept" in arbiter.kinds())
        assert await use(residency) == first
        assert engine.acts == ["/control/sleep", "/control/wake"]


@pytest.mark.spec("A19")
async def test_broken_lifeline_is_engine_lost_for_requests_in_flight() -> None:
    async with holder() as (residency, arbiter, engine):
        async with residency.use("a") as open_use:
            engine.dead.set()
            await until(lambda: "a" not in residency.models)
            with pytest.raises(EngineLost):
                open_use.stream("POST", "/v1/x", {}, b"")
        assert arbiter.told[-1] == ev.Released(arbiter.asked[0], "lost")


@pytest.mark.spec("A8")
async def test_deadline_of_the_last_waiting_request_is_typed_and_withdraws_the_ticket() -> None:
    async with holder(loaded=False) as (residency, arbiter, _):
        with pytest.raises(DeadlineUnmet, match=r"^a-.* was not ready within 0.1 s"):
            async with residency.use("a", deadline_s=0.1):
                pass
        assert arbiter.told[-1] == ev.Withdrawn(arbiter.asked[0])


@pytest.mark.spec("A21")
async def test_ticket_carries_the_latest_deadline_of_its_waiting_requests() -> None:
    async with holder(loaded=False) as (residency, arbiter, _):
        asked: list[ev.Requested] = []
        unanswered = asyncio.Event()

        async def acquire(requested: ev.Requested) -> messages.Granted:
            asked.append(requested)
            await unanswered.wait()
            raise AssertionError("nobody grants it")

        arbiter.acquire = acquire  # type: ignore[method-assign]
        uses = [entered(residency, 30)]
        await until(lambda: asked)
        deadline = asked[0].deadline
        assert deadline is not None and seconds(29) < deadline <= seconds(30)
        uses += [entered(residency, 20), entered(residency, 90), entered(residency, None)]
        await until(lambda: len(arbiter.told) == 2)  # of the two that wait for longer
        later, longest = arbiter.told
        assert seconds(80) < later.deadline <= seconds(90) and longest.deadline is None
        for one in uses:
            one.cancel()
        await asyncio.gather(*uses, return_exceptions=True)


@pytest.mark.spec("A21")
async def test_request_with_a_deadline_below_the_wait_estimate_is_refused_at_once() -> None:
    async with holder(loaded=False) as (residency, arbiter, _):
        arbiter.acquire = never  # type: ignore[method-assign]
        hasty, patient = entered(residency, 30), entered(residency, None)
        await until(
            lambda: "a" in residency.models and len(residency.models["a"].demand.waiters) == 2
        )
        ticket = residency.models["a"].ticket
        residency._on_command(messages.WaitEstimate(ticket, seconds(60)))
        async with asyncio.timeout(60):
            error = (await asyncio.gather(hasty, return_exceptions=True))[0]
            assert isinstance(error, DeadlineUnmet)
            assert error.predicted_s and 59 < error.predicted_s <= 60 and error.retry_after_s > 59
            with pytest.raises(DeadlineUnmet):  # and so does who comes now
                await entered(residency, 30)
        assert not patient.done() and len(residency.models["a"].demand.waiters) == 1
        patient.cancel()
        await asyncio.gather(patient, return_exceptions=True)


@pytest.mark.spec("A21")
async def test_ticket_refused_for_a_deadline_is_requested_anew_for_a_later_deadline() -> None:
    async with holder() as (residency, arbiter, _):
        granted, waits = arbiter.acquire, asyncio.Event()

        async def refused(requested: ev.Requested) -> messages.Granted:
            await waits.wait()
            arbiter.acquire = granted  # type: ignore[method-assign]
            raise DeadlineUnmet(requested.ticket, 0.0, 60.0, 60.0)

        arbiter.acquire = refused  # type: ignore[method-assign]
        hasty, patient = entered(residency, 30), entered(residency, None)
        await until(
            lambda: "a" in residency.models and len(residency.models["a"].demand.waiters) == 2
        )
        waits.set()
        async with asyncio.timeout(60):
            answers = await asyncio.gather(hasty, patient, return_exceptions=True)
        assert isinstance(answers[0], DeadlineUnmet) and answers[1] == arbiter.asked[0]


async def never(requested: ev.Requested) -> messages.Granted:
    await asyncio.Event().wait()
    raise AssertionError("an event that nobody sets")


def entered(residency: Any, deadline_s: float | None) -> asyncio.Future[TicketId]:
    async def enter() -> TicketId:
        async with residency.use("a", deadline_s=deadline_s) as engine:
            return TicketId(engine.ticket)

    return asyncio.ensure_future(enter())


@pytest.mark.spec("A7")
async def test_release_is_idempotent_and_use_after_it_is_typed() -> None:
    async with holder() as (residency, _, _engine):
        async with residency.use("a") as open_use:
            pass
        open_use.release()
        with pytest.raises(TicketClosed):
            open_use.stream("POST", "/v1/x", {}, b"")
        assert residency.models["a"].requests.inflight == 0


@pytest.mark.spec("A12")
async def test_bug_during_a_load_fails_all_waiting_requests_and_the_next_one_retries() -> None:
    async with holder() as (residency, arbiter, _):
        granted = arbiter.acquire

        async def broken(requested: ev.Requested) -> messages.Granted:
            await granted(requested)
            raise KeyError("nobody thought of this")

        arbiter.acquire = broken  # type: ignore[method-assign]
        uses = [asyncio.ensure_future(use(residency)) for _ in range(3)]
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*uses, return_exceptions=True)
        assert [type(answer) for answer in answers] == [LoadFailed] * 3
        assert "KeyError" in str(answers[0])
        arbiter.acquire = granted  # type: ignore[method-assign]
        assert await use(residency) == arbiter.asked[-1]  # one that came late had one of its own


async def test_load_cancelled_from_outside_is_begun_anew() -> None:
    async with holder() as (residency, arbiter, _):
        granted = arbiter.acquire

        async def cancelled(requested: ev.Requested) -> messages.Granted:
            arbiter.acquire = granted  # type: ignore[method-assign]
            raise asyncio.CancelledError

        arbiter.acquire = cancelled  # type: ignore[method-assign]
        async with asyncio.timeout(60):
            assert await use(residency) == arbiter.asked[0]


PINNED_ROW = TABLE["capabilities"]["c"] | {"models": {"a": MODEL | {"pin": True}}}
PINNED = {"capabilities": {"c": PINNED_ROW}}


@pytest.mark.spec("A8", "C8")
async def test_a_client_that_comes_and_goes_does_not_end_the_load_of_a_pinned_model() -> None:
    async with holder(loaded=False) as (residency, arbiter, engine):
        residency._on_command(messages.ConfigChanged(PINNED))
        await until(
            lambda: residency.models.get("a") and residency.models["a"].state is HolderState.LOADING
        )
        with pytest.raises(DeadlineUnmet):
            async with residency.use("a", deadline_s=0.05):
                pass
        assert "Withdrawn" not in arbiter.kinds()
        engine.loaded.set()
        await until(lambda: residency.models["a"].state is HolderState.RESIDENT)


@pytest.mark.spec("A8", "A12")
async def test_client_that_comes_and_goes_does_not_end_a_reload() -> None:
    async with holder() as (residency, arbiter, _):
        granted, may_go_on = arbiter.acquire, asyncio.Event()

        async def queued(requested: ev.Requested) -> messages.Granted:
            await may_go_on.wait()
            return await granted(requested)

        arbiter.acquire = queued  # type: ignore[method-assign]
        residency._on_command(messages.ReloadCommand("a"))
        await until(lambda: "a" in residency.models)
        with pytest.raises(DeadlineUnmet):
            async with residency.use("a", deadline_s=0.05):
                pass
        may_go_on.set()
        await until(lambda: residency.models["a"].state is HolderState.RESIDENT)
        assert not residency.background.running


@pytest.mark.spec("A17", "D7")
async def test_end_of_a_load_says_whether_a_request_waits_for_it() -> None:
    async with holder() as (residency, arbiter, _):
        residency._on_command(messages.ReloadCommand("a"))
        await until(lambda: "Loaded" in arbiter.kinds())
        await use(residency)
        revoke(residency, Reason.PRESSURE)
        await until(lambda: "a" not in residency.models)
        await use(residency)
        loads = [event for event in arbiter.told if isinstance(event, ev.Loaded)]
        assert [load.is_used for load in loads] == [False, True]


@pytest.mark.spec("A12")
async def test_asleep_model_that_made_room_for_a_failed_load_is_woken() -> None:
    async with holder() as (residency, arbiter, engine):
        await use(residency)
        revoke(residency, Reason.SWAP, Tier.ASLEEP)
        await until(lambda: "Slept" in arbiter.kinds())
        residency._on_command(messages.ReloadCommand("a"))
        await until(lambda: residency.models["a"].state is HolderState.RESIDENT)
        assert engine.acts == ["/control/sleep", "/control/wake"]


@pytest.mark.spec("A12", "A15")
@pytest.mark.parametrize("to", Tier)
async def test_model_that_is_just_leaving_comes_back_once_it_has_left(to: Tier) -> None:
    """It made room for a load or a lease that is over before the model has left."""
    async with holder() as (residency, arbiter, _):
        async with residency.use("a"):
            revoke(residency, Reason.SWAP, to)
            residency._on_command(messages.ReloadCommand("a"))
            await until(lambda: residency.models["a"].demand.waiters)
        left = "Slept" if to is Tier.ASLEEP else "Released"
        await until(lambda: left in arbiter.kinds())
        await residency.background.done()
        await until(lambda: residency.models["a"].state is HolderState.RESIDENT)
        assert residency.models["a"].requests.inflight == 0


@pytest.mark.spec("A9", "A12")
async def test_model_that_was_to_leave_and_serves_on_need_not_come_back() -> None:
    async with holder() as (residency, arbiter, _):
        async with residency.use("a"):
            revoke(residency, Reason.SWAP, barrier_s=0.01)
            residency._on_command(messages.ReloadCommand("a"))
            await until(lambda: "BarrierDropped" in arbiter.kinds())
            await residency.background.done()
            assert residency.models["a"].requests.inflight == 1
        assert len(arbiter.asked) == 1 and residency.models["a"].state is HolderState.RESIDENT


@pytest.mark.spec("C5", "E4", "H8")
async def test_caches_are_emptied_of_a_model_that_serves_and_of_no_other() -> None:
    async with holder() as (residency, arbiter, engine):
        ticket = await use(residency)
        residency._on_command(messages.PurgeCommand(TicketId("another")))
        residency._on_command(messages.PurgeCommand(ticket))
        await residency.background.done()
        assert engine.acts == ["/control/purge"]
        residency._on_command(messages.PurgeCommand(ticket, only_slabs=True))
        await residency.background.done()
        assert engine.acts == ["/control/purge", "/control/shrink_slabs"]
        revoke(residency, Reason.SWAP, Tier.ASLEEP)
        await until(lambda: "Slept" in arbiter.kinds())
        residency._on_command(messages.PurgeCommand(ticket))
        residency._on_command(messages.PurgeCommand(ticket, only_slabs=True))
        await residency.background.done()
        assert engine.acts[2:] == ["/control/sleep", "/control/shrink_slabs"], "only its slabs"


@pytest.mark.spec("C8")
async def test_a_pinned_model_whose_engine_died_is_brought_back() -> None:
    async with holder() as (residency, arbiter, engine):
        residency._on_command(messages.ConfigChanged(PINNED))
        await until(lambda: "Loaded" in arbiter.kinds())
        first, engine.dead = engine.dead, asyncio.Event()
        first.set()
        await until(lambda: arbiter.kinds().count("Loaded") == 2)
        assert ev.Released(arbiter.asked[0], "lost") in arbiter.told
        assert residency.models["a"].state is HolderState.RESIDENT


@pytest.mark.spec("C8", "A12")
async def test_a_pinned_model_that_did_not_load_is_tried_again_when_its_refusal_says() -> None:
    async with holder() as (residency, arbiter, _):
        granted = arbiter.acquire

        async def cools_down(requested: ev.Requested) -> messages.Granted:
            arbiter.acquire = granted  # type: ignore[method-assign]
            raise ModelCoolingDown("a", "no such file", 0.01)

        arbiter.acquire = cools_down  # type: ignore[method-assign]
        residency._on_command(messages.ConfigChanged(PINNED))
        await until(lambda: "Loaded" in arbiter.kinds())
        unloading.end(
            residency,
            residency.models["a"],
            Reason.FAILED,
            NeverFits(TicketId("a"), Bytes(9), Bytes(5)),
        )
        await residency.background.done()
        assert "a" not in residency.models


@pytest.mark.spec("D6")
async def test_unverified_wake_is_reported_with_its_ticket() -> None:
    async with holder() as (residency, arbiter, engine):
        await use(residency)
        revoke(residency, Reason.SWAP, Tier.ASLEEP)
        await until(lambda: "Slept" in arbiter.kinds())
        engine.verified = False
        ticket = await use(residency)
        loads = [event for event in arbiter.told if isinstance(event, ev.Loaded)]
        assert [load.verified for load in loads] == [True, False]
        assert {load.ticket for load in loads} == {ticket}


@pytest.mark.spec("D6")
async def test_engine_that_a_reload_did_not_restore_ends_and_a_new_one_answers() -> None:
    async with holder() as (residency, arbiter, engine):
        before = await use(residency)
        revoke(residency, Reason.SWAP, Tier.ASLEEP)
        await until(lambda: "Slept" in arbiter.kinds())
        engine.verified = engine.restored = False
        ticket = await use(residency)
        assert ticket != before
        loads = [event for event in arbiter.told if isinstance(event, ev.Loaded)]
        assert [(load.ticket, load.verified) for load in loads] == [
            (before, True), (before, False), (ticket, True),
        ]  # fmt: skip
        [released] = [event for event in arbiter.told if isinstance(event, ev.Released)]
        assert (released.ticket, released.reason) == (before, Reason.FAILED.value)


@pytest.mark.spec("A17", "C4")
async def test_load_time_counts_from_the_grant_without_waiting_for_a_zygote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = SimpleNamespace(s=100.0)
    clock = SimpleNamespace(
        monotonic=lambda: now.s, monotonic_ns=lambda: int(now.s * 1e9), time=time.time
    )
    for module in ("held_model", "lifecycle.loading"):
        monkeypatch.setattr(f"deployments.replica.{module}.time", clock)
    async with holder(loaded=False) as (residency, arbiter, engine):

        async def spawn(ticket: TicketId, spec: messages.SpawnSpec) -> messages.Spawned:
            now.s += 12.0 + 0.5  # a zygote; the agent's questions, a fork, its answer
            return messages.Spawned(arbiter.path, seconds(12))

        arbiter.spawn = spawn  # type: ignore[method-assign]
        using = asyncio.ensure_future(use(residency))
        await until(lambda: engine.asked_if_ready)
        now.s += 2.0
        engine.loaded.set()
        await using
        [loaded] = [event for event in arbiter.told if isinstance(event, ev.Loaded)]
        assert loaded.took == seconds(2.5)


async def test_a_table_that_comes_while_a_plan_is_made_is_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planning, go_on = threading.Event(), threading.Event()

    def slow(model: str, config: Any) -> ModelPlan:
        planning.set()
        assert go_on.wait(60)
        return plan(model, config)

    monkeypatch.setattr(load_plan, "plan", slow)
    made = Plans("c")
    made.take(TABLE)
    first = asyncio.ensure_future(made.of("a"))
    await asyncio.to_thread(planning.wait, 5)
    bigger = MODEL | {"need": {"weights": 7}}
    made.take({"capabilities": {"c": TABLE["capabilities"]["c"] | {"models": {"a": bigger}}}})
    go_on.set()
    assert (await first).need.weights_bytes == (await made.of("a")).need.weights_bytes == 7


@pytest.mark.spec("A7", "A8")
async def test_every_way_out_of_a_use_leaves_nothing_in_flight() -> None:
    async with holder(loaded=False) as (residency, _, engine):
        engine.answer.clear()

        async def stream(deadline_s: float | None = None) -> None:
            async with residency.use("a", deadline_s=deadline_s) as open_use:
                async for _ in open_use.stream("POST", "/v1/x", {}, b""):
                    pass

        waits, streams = asyncio.ensure_future(stream()), asyncio.ensure_future(stream())
        await until(
            lambda: residency.models.get("a") and len(residency.models["a"].demand.waiters) == 2
        )
        with pytest.raises(DeadlineUnmet):
            await stream(deadline_s=0.01)
        waits.cancel()
        await asyncio.wait({waits})
        engine.loaded.set()
        await until(lambda: engine.acts)
        held = residency.models["a"]
        assert (held.requests.inflight, len(held.demand.waiters)) == (1, 0)
        streams.cancel()  # its client died in the middle of the answer
        await asyncio.wait({streams})
        assert held.requests.inflight == 0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await stream()
        assert held.requests.inflight == 0
        runs, _ = residency.client().request_log.untold()
        assert [run.outcome for run in runs] == ["deadline_unmet", "left", "left", "left"]


@pytest.mark.spec("A4", "A8")
async def test_load_does_not_run_in_the_context_of_the_request_that_began_it() -> None:
    request: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="none")
    async with holder() as (residency, arbiter, _):
        granted, seen = arbiter.acquire, []

        async def looks(requested: ev.Requested) -> messages.Granted:
            seen.append(request.get())
            return await granted(requested)

        arbiter.acquire = looks  # type: ignore[method-assign]
        request.set("the first")
        await use(residency)
        assert seen == ["none"]


@pytest.mark.spec("A12")
async def test_a_load_that_failed_for_memory_is_tried_once_more_under_a_ticket_of_its_own() -> None:
    async with holder() as (residency, arbiter, _):
        breaking(arbiter, LoadRefused("no room", out_of_memory=True))
        assert await use(residency) == arbiter.asked[1] != arbiter.asked[0]
        assert [requested.attempt for requested in arbiter.requests] == [1, 2]
        broke = [event for event in arbiter.told if isinstance(event, ev.LoadBroke)]
        assert [(b.ticket, b.out_of_memory) for b in broke] == [(arbiter.asked[0], True)]


@pytest.mark.spec("A12")
async def test_a_load_that_failed_otherwise_is_not_tried_again() -> None:
    async with holder() as (residency, arbiter, _):
        breaking(arbiter, LoadRefused("no such file", out_of_memory=False))
        with pytest.raises(LoadFailed, match="no such file"):
            await use(residency)
        assert len(arbiter.asked) == 1


@pytest.mark.spec("A12", "A18")
async def test_load_that_no_arbiter_confirms_is_no_fault_of_its_model() -> None:
    async with holder() as (residency, arbiter, _):
        breaking(arbiter, ArbiterUnavailable(10.0))
        with pytest.raises(ArbiterUnavailable):
            await use(residency)
        assert arbiter.kinds() == ["Released"]  # and no LoadBroke, after which a model cools down
        assert await use(residency) == arbiter.asked[1]


@pytest.mark.spec("A7", "A8")
async def test_request_cancelled_as_its_load_completes_is_not_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with holder(loaded=False) as (residency, _, engine):
        waiting = asyncio.ensure_future(use(residency))
        await until(lambda: residency.models.get("a") and residency.models["a"].demand.waiters)
        held, serve = residency.models["a"], loading.serve

        def and_cancel(of: Any, held: Any, took_s: float) -> None:
            serve(of, held, took_s)
            assert held.requests.inflight == 1
            waiting.cancel()

        monkeypatch.setattr(loading, "serve", and_cancel)
        engine.loaded.set()
        await asyncio.wait({waiting})
        assert waiting.cancelled() and held.requests.inflight == 0
        assert await use(residency) == held.ticket


@pytest.mark.spec("A9", "D1")
async def test_request_while_a_model_falls_asleep_wakes_it() -> None:
    async with holder() as (residency, _, engine):
        async with residency.use("a") as open_use:
            ticket = TicketId(open_use.ticket)
            revoke(residency, Reason.SWAP, Tier.ASLEEP)
            late = asyncio.ensure_future(use(residency))
            await until(lambda: residency.models["a"].demand.waiters)
        async with asyncio.timeout(60):
            assert await late == ticket
        assert engine.acts == ["/control/sleep", "/control/wake"]


@pytest.mark.spec("A5")
async def test_requests_waiting_for_a_load_count_as_in_flight() -> None:
    async with holder(loaded=False) as (residency, _, engine):
        uses = [asyncio.ensure_future(use(residency)) for _ in range(2)]
        await until(
            lambda: residency.models.get("a") and residency.models["a"].state is HolderState.LOADING
        )
        await until(lambda: len(residency.models["a"].demand.waiters) == 2)
        [told] = residency.held_tickets()
        assert (told.phase, told.inflight, told.idle) == (types.Phase.LOADING, 2, Span(0))
        engine.loaded.set()
        await asyncio.gather(*uses)


@pytest.mark.spec("A19")
async def test_end_of_a_replaced_engine_does_not_affect_its_successor() -> None:
    async with holder() as (residency, arbiter, _):
        ticket = await use(residency)
        held = residency.models["a"]
        old, held.link = held.link, EngineLink("a", ticket, arbiter.path)
        unloading.on_engine_lost(residency, held, old)
        assert held.state is HolderState.RESIDENT and "Released" not in arbiter.kinds()
        unloading.on_engine_lost(residency, held, held.link)
        assert held.state is HolderState.CLOSED and arbiter.told[-1] == ev.Released(ticket, "lost")
        old.cut()
        await old.closed()


@pytest.mark.spec("E6")
async def test_engines_are_told_of_removed_tenants_and_of_changed_caps() -> None:
    def capped(part: float) -> dict[str, Any]:
        return TABLE | {"arbiter": {"tenants": {"acme": {"slab": part}}}}

    async with holder(loaded=False) as (residency, _, engine):
        waiting = asyncio.ensure_future(use(residency))
        await until(lambda: engine.asked_if_ready)
        residency._on_command(messages.ConfigChanged(capped(0.5)))
        assert not engine.told, "it has no slab yet"
        engine.loaded.set()
        engine.answer.set()
        await waiting
        await until(lambda: engine.told == [{"caps": {"acme": 0.5}}])
        residency._on_command(messages.ConfigChanged(capped(0.25)))
        residency._on_command(messages.ConfigChanged(capped(0.25)))
        residency._on_command(messages.ForgetTenantCommand("acme"))
        await until(lambda: len(engine.told) == 3)
        assert {"caps": {"acme": 0.25}} in engine.told and {"tenant": "acme"} in engine.told
        assert "/control/forget_tenant" in engine.acts
