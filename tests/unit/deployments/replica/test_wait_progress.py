"""A waiting request hears of its model from the slot of its holder, and no message is sent."""

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
from deployments.replica import wait_progress
from deployments.replica.held_model import HeldModel, HolderState
from deployments.replica.use import Use

NEED = Need(Bytes(1), Bytes(1), Bytes(1), Bytes(0))


def slot(model: str, life: HolderState = HolderState.QUEUED) -> HeldModel:
    made = HeldModel(ModelPlan(model, "m:f", {}, NEED, False, "k"), TicketId(model))
    made.life = life
    return made


class Holder:
    """Stands for Residency: `enter` waits until the test lets it."""

    def __init__(self, *slots: HeldModel) -> None:
        self.slots = {s.model: s for s in slots}
        self.go_on = asyncio.Event()
        self.runs = RequestLog()

    def client(self) -> "Holder":
        return self

    async def enter(self, model: str, *how: object) -> HeldModel:
        await self.go_on.wait()
        self.slots[model].inflight += 1
        return self.slots[model]


@pytest.fixture(autouse=True)
def _poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_progress, "LOOK_S", 0.001)


@pytest.mark.spec("J3")
async def test_progress_gives_the_queue_position_and_then_the_load_estimate() -> None:
    mine = slot("b")
    holder = Holder(slot("a"), slot("r", HolderState.RESIDENT), mine)
    use = Use(holder, "b", None, None)  # type: ignore[arg-type]
    async with aclosing(wait_progress.with_progress(use, holder.slots, "b")) as steps:
        assert await anext(steps) == Progress("queued", 1, None)
        mine.granted(Granted(mine.ticket, (), seconds(60), seconds(20), None))  # type: ignore[arg-type]
        loading = await anext(steps)
        assert (loading.phase, loading.position) == ("loading", 0)
        assert loading.estimate_s is not None
        assert 10 < loading.estimate_s <= 20
        holder.go_on.set()
        assert [step async for step in steps] == []
    assert mine.inflight == 1
    use.release()
    assert mine.inflight == 0


async def test_abandoned_wait_leaves_no_request_in_flight() -> None:
    mine = slot("b")
    holder = Holder(mine)
    use = Use(holder, "b", None, None)  # type: ignore[arg-type]
    steps = wait_progress.with_progress(use, holder.slots, "b")
    await anext(steps)
    await steps.aclose()
    holder.go_on.set()
    await asyncio.sleep(0)
    assert mine.inflight == 0


async def test_load_without_history_has_no_estimate() -> None:
    mine = slot("b")
    mine.granted(Granted(mine.ticket, (), seconds(60), seconds(0), None))  # type: ignore[arg-type]
    assert wait_progress.look({"b": mine}, "b") == Progress("loading", 0, None)


@pytest.mark.spec("J2")
def test_a_model_that_is_to_stay_warm_does_not_count_as_idle() -> None:
    mine = slot("b", HolderState.RESIDENT)
    mine.last_end_ns = time.monotonic_ns() - 10**12
    assert mine.account().idle > seconds(900)
    mine.warm_until_ns = time.monotonic_ns() + 10**10
    account = mine.account()
    assert (account.idle, account.phase, account.inflight) == (0, Phase.RESIDENT, 0)
    assert mine.asks(HolderId("h"), "c").model == "b"


@pytest.mark.spec("A7", "A8")
async def test_client_that_leaves_as_its_model_becomes_resident_is_not_in_flight() -> None:
    mine = slot("b")
    holder = Holder(mine)
    use = Use(holder, "b", None, None)  # type: ignore[arg-type]
    steps = wait_progress.with_progress(use, holder.slots, "b")
    await anext(steps)  # its client has this word now, and asks for the next or leaves
    holder.go_on.set()
    async with asyncio.timeout(5):
        while not mine.inflight:
            await asyncio.sleep(0)
    await steps.aclose()
    assert mine.inflight == 0
    runs, _ = holder.runs.waiting()
    assert [run.outcome for run in runs] == ["left"]


@pytest.mark.spec("A7", "A8")
async def test_request_cancelled_as_its_model_becomes_resident_is_not_in_flight() -> None:
    mine = slot("b")

    class Cancelling(Holder):
        async def enter(self, model: str, *how: object) -> HeldModel:
            found = await super().enter(model, *how)
            task.cancel()
            return found

    async def follow() -> None:
        async with aclosing(wait_progress.with_progress(use, holder.slots, "b")) as steps:
            async for _ in steps:
                holder.go_on.set()

    holder = Cancelling(mine)
    use = Use(holder, "b", None, None)  # type: ignore[arg-type]
    task = asyncio.ensure_future(follow())
    await asyncio.wait({task}, timeout=5)
    assert task.cancelled() and mine.inflight == 0
