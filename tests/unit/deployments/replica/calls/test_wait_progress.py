"""A waiting request hears of its model from the held of its holder, and no message is sent."""

import asyncio
import time
from contextlib import aclosing

import pytest

from arbiter.client.request_log import RequestLog
from arbiter.core.types import Need, Phase
from arbiter.protocol.messages import Granted
from arbiter.units import Bytes, HolderId, TicketId, seconds
from deployments.config.load_plan import ModelPlan
from deployments.messages import Progress
from deployments.replica.calls import wait_progress
from deployments.replica.held_model import HeldModel, HolderState
from deployments.replica.use import Use

NEED = Need(Bytes(1), Bytes(1), Bytes(1), Bytes(0))


def held(model: str, life: HolderState = HolderState.QUEUED) -> HeldModel:
    made = HeldModel(ModelPlan(model, "m:f", {}, NEED, False, "k"), TicketId(model))
    made.state = life
    return made


class Holder:
    """Stands for Residency: `begin_request` waits until the test lets it."""

    def __init__(self, *held: HeldModel) -> None:
        self.models = {s.model: s for s in held}
        self.go_on = asyncio.Event()
        self.request_log = RequestLog()

    def client(self) -> "Holder":
        return self

    async def begin_request(self, model: str, *how: object) -> HeldModel:
        await self.go_on.wait()
        self.models[model].requests.inflight += 1
        return self.models[model]


@pytest.fixture(autouse=True)
def _poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_progress, "LOOK_S", 0.001)


@pytest.mark.spec("J3")
async def test_progress_gives_the_queue_position_and_then_the_load_estimate() -> None:
    mine = held("b")
    holder = Holder(held("a"), held("r", HolderState.RESIDENT), mine)
    use = Use(holder, "b", None, None)  # type: ignore[arg-type]
    async with aclosing(wait_progress.with_progress(use, holder.models, "b")) as steps:
        assert await anext(steps) == Progress("queued", 1, None)
        mine.on_grant(Granted(mine.ticket, (), seconds(60), seconds(20), None))  # type: ignore[arg-type]
        loading = await anext(steps)
        assert (loading.phase, loading.position) == ("loading", 0)
        assert loading.estimate_s is not None
        assert 10 < loading.estimate_s <= 20
        holder.go_on.set()
        assert [step async for step in steps] == []
    assert mine.requests.inflight == 1
    use.release()
    assert mine.requests.inflight == 0


async def test_abandoned_wait_leaves_no_request_in_flight() -> None:
    mine = held("b")
    holder = Holder(mine)
    use = Use(holder, "b", None, None)  # type: ignore[arg-type]
    steps = wait_progress.with_progress(use, holder.models, "b")
    await anext(steps)
    await steps.aclose()
    holder.go_on.set()
    await asyncio.sleep(0)
    assert mine.requests.inflight == 0


async def test_wait_that_is_cancelled_again_as_its_model_serves_leaves_no_request_in_flight() -> (
    None
):
    mine, loop, waits = held("b"), asyncio.get_running_loop(), asyncio.Event()
    holder = Holder(mine)
    use = Use(holder, "b", None, None)  # type: ignore[arg-type]

    async def follow() -> None:
        async for _ in wait_progress.with_progress(use, holder.models, "b"):
            waits.set()

    following = asyncio.ensure_future(follow())
    await waits.wait()
    holder.go_on.set()
    following.cancel()
    loop.call_soon(following.cancel)  # when it has heard of the first, and the use has begun
    await asyncio.wait({following})
    assert following.cancelled() and mine.requests.inflight == 0


async def test_load_without_history_has_no_estimate() -> None:
    mine = held("b")
    mine.on_grant(Granted(mine.ticket, (), seconds(60), seconds(0), None))  # type: ignore[arg-type]
    assert wait_progress.progress_of({"b": mine}, "b") == Progress("loading", 0, None)


@pytest.mark.spec("J2")
def test_a_model_that_is_to_stay_warm_does_not_count_as_idle() -> None:
    mine = held("b", HolderState.RESIDENT)
    mine.requests.last_end_ns = time.monotonic_ns() - 10**10
    assert mine.heartbeat_entry().idle >= seconds(10) and mine.heartbeat_entry().stay_warm == 0
    mine.requests.warm_until_ns = time.monotonic_ns() + 10**10
    account = mine.heartbeat_entry()
    assert (account.idle, account.phase, account.inflight) == (0, Phase.RESIDENT, 0)
    assert 0 < account.stay_warm <= 10**10
    assert mine.ticket_request(HolderId("h"), "c").model == "b"


@pytest.mark.spec("A7", "A8")
async def test_client_that_leaves_as_its_model_becomes_resident_is_not_in_flight() -> None:
    mine = held("b")
    holder = Holder(mine)
    use = Use(holder, "b", None, None)  # type: ignore[arg-type]
    steps = wait_progress.with_progress(use, holder.models, "b")
    await anext(steps)  # its client has this word now, and asks for the next or leaves
    holder.go_on.set()
    async with asyncio.timeout(60):
        while not mine.requests.inflight:
            await asyncio.sleep(0)
    await steps.aclose()
    assert mine.requests.inflight == 0
    runs, _ = holder.request_log.untold()
    assert [run.outcome for run in runs] == ["left"]


@pytest.mark.spec("A7", "A8")
async def test_request_cancelled_as_its_model_becomes_resident_is_not_in_flight() -> None:
    mine = held("b")

    class Cancelling(Holder):
        async def begin_request(self, model: str, *how: object) -> HeldModel:
            found = await super().begin_request(model, *how)
            task.cancel()
            return found

    async def follow() -> None:
        async with aclosing(wait_progress.with_progress(use, holder.models, "b")) as steps:
            async for _ in steps:
                holder.go_on.set()

    holder = Cancelling(mine)
    use = Use(holder, "b", None, None)  # type: ignore[arg-type]
    task = asyncio.ensure_future(follow())
    await asyncio.wait({task}, timeout=60)
    assert task.cancelled() and mine.requests.inflight == 0
