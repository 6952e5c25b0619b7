"""A place in the batch is never lost, whoever is cancelled when."""

import asyncio
import time
from typing import Any

import pytest

from arbiter.core.types import Priority
from arbiter.errors import QueueFull
from deployments import messages
from deployments.engines.vllm.batching import batch_gate
from deployments.engines.vllm.batching.batch_admission import BASE, WaitingRequest
from deployments.engines.vllm.batching.batch_gate import AdaptersBusy, BatchGate, RequestExpired


async def asking(gate: BatchGate, adapter: str, **more: Any) -> "asyncio.Task[WaitingRequest]":
    """A request that waits, or has entered."""
    task = asyncio.ensure_future(gate.enter(adapter, adapter, **more))
    await asyncio.sleep(0)
    return task


async def ended(*tasks: "asyncio.Task[WaitingRequest]") -> None:
    await asyncio.wait(tasks)


@pytest.mark.spec("F4")
def test_request_cancelled_as_another_leaves_takes_no_place_in_the_batch() -> None:
    async def story() -> None:
        gate = BatchGate(slots=1, window=4, wait_s=30)
        first = await gate.enter("a", "a")
        gone, next_one = await asking(gate, "b"), await asking(gate, "c")
        gone.cancel()  # its future is cancelled; its task has not run yet
        gate.leave(first)
        await ended(gone, next_one)
        assert gone.cancelled() and next_one.exception() is None
        assert gate.running == {"c": 1} and gate.waiting == 0
        gate.leave(next_one.result())
        assert not gate.running

    asyncio.run(story())


@pytest.mark.spec("F4")
def test_request_cancelled_after_admission_gives_its_place_back() -> None:
    async def story() -> None:
        gate = BatchGate(slots=1, window=4, wait_s=30)
        first = await gate.enter("a", "a")
        given, next_one = await asking(gate, "b"), await asking(gate, "c")
        gate.leave(first)
        assert gate.running == {"b": 1}
        given.cancel()
        await ended(given, next_one)
        assert given.cancelled() and next_one.exception() is None
        assert gate.running == {"c": 1} and gate.waiting == 0

    asyncio.run(story())


@pytest.mark.spec("F8")
def test_request_that_waited_in_vain_gets_adapters_busy_and_is_forgotten() -> None:
    async def story() -> None:
        gate = BatchGate(slots=1, window=4, wait_s=0.01)
        await gate.enter("a", "a")
        with pytest.raises(AdaptersBusy, match="all 1 slots"):
            await gate.enter("b", "b")
        assert gate.running == {"a": 1} and gate.waiting == 0

    asyncio.run(story())


@pytest.mark.spec("F8")
def test_request_of_the_base_or_of_an_adapter_in_a_slot_waits_for_a_place_alone() -> None:
    async def story() -> None:
        gate = BatchGate(slots=8, window=2, wait_s=0.05)
        running = [await gate.enter(BASE, "m"), await gate.enter("a", "a")]
        waiting = [await asking(gate, BASE), await asking(gate, "a")]
        other = await asking(gate, "b")
        await ended(other)
        assert isinstance(other.exception(), AdaptersBusy)
        assert not any(task.done() for task in waiting), "they came before it"
        for place in running:
            gate.leave(place)
        await ended(*waiting)
        assert gate.running == {BASE: 1, "a": 1} and gate.waiting == 0

    asyncio.run(story())


@pytest.mark.spec("F6")
def test_expired_request_is_refused_counted_and_never_gets_a_place() -> None:
    async def story() -> None:
        gate = BatchGate(slots=0, window=1)
        first = await gate.enter(BASE, "m")
        late = await asking(gate, BASE, expires_s=time.monotonic() + 0.01)
        await ended(late)
        with pytest.raises(RequestExpired, match="m had not begun with the request"):
            await gate.enter(BASE, "m", expires_s=time.monotonic())
        assert isinstance(late.exception(), RequestExpired)
        assert gate.facts() == {"running": 1, "waiting": 0, "expired": 2, "served": {"": 1}}
        head, body = messages.refusal(RequestExpired("m", 0.5, 1.0))
        assert head.status == 503 and b"deadline_unmet" in body
        gate.leave(first)
        assert not gate.running and gate.shares.tenants.waiting == {}

    asyncio.run(story())


@pytest.mark.spec("F6")
def test_deadline_that_passes_while_an_adapter_loads_ends_the_request() -> None:
    async def story() -> None:
        gate = BatchGate(slots=1, window=1)
        place = WaitingRequest(0, "a", 0.0, expires_s=time.monotonic())
        with pytest.raises(RequestExpired):
            gate.check_deadline(place, "a")
        gate.check_deadline(await gate.enter("a", "a"), "a")
        assert gate.expired == 1

    asyncio.run(story())


@pytest.mark.spec("F6")
def test_single_request_of_another_tenant_enters_before_the_flood_of_one() -> None:
    async def story() -> None:
        gate = BatchGate(slots=0, window=2)
        running = [await gate.enter(BASE, "m", tenant="flood", tokens=10) for _ in range(2)]
        flood = [await asking(gate, BASE, tenant="flood", tokens=10) for _ in range(20)]
        single = await asking(gate, BASE, tenant="single", tokens=10)
        gate.answered(running[0], 5)
        gate.leave(running[0])
        await asyncio.sleep(0)
        assert single.done() and not any(task.done() for task in flood)
        gate.leave(single.result())
        await asyncio.sleep(0)
        assert flood[0].done() and gate.waiting == 19
        for task in flood:
            task.cancel()
        await ended(*flood)
        assert gate.shares.tenants.waiting == {} and gate.waiting == 0
        assert gate.shares.tenants.served == {"flood": 40, "single": 30}

    asyncio.run(story())


@pytest.mark.spec("F6")
def test_more_urgent_request_enters_first() -> None:
    async def story() -> None:
        gate = BatchGate(slots=0, window=1)
        first = await gate.enter(BASE, "m")
        normal = await asking(gate, BASE)
        urgent = await asking(gate, BASE, priority=Priority.URGENT)
        gate.leave(first)
        await asyncio.sleep(0)
        assert urgent.done() and not normal.done()
        normal.cancel()
        await ended(normal)

    asyncio.run(story())


@pytest.mark.spec("F6")
@pytest.mark.parametrize(
    ("comes", "gives_way"),
    [
        ({"tenant": "b"}, "newest"),
        ({"tenant": "a", "priority": Priority.URGENT}, "newest"),
        ({"tenant": "b", "priority": Priority.BATCH}, "newest"),
        ({"tenant": "a", "priority": Priority.BATCH}, "comer"),
    ],
)
def test_full_queue_refuses_the_newest_of_the_least_urgent_and_of_the_largest_tenant(
    comes: dict[str, Any], gives_way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        monkeypatch.setattr(batch_gate, "MAX_WAITING", 7)
        gate = BatchGate(slots=0, window=1)
        await gate.enter(BASE, "m")
        normal = [await asking(gate, BASE, tenant="a") for _ in range(3)]
        batch = [
            await asking(gate, BASE, tenant=tenant, priority=Priority.BATCH) for tenant in "aaac"
        ]
        comer = await asking(gate, BASE, **comes)
        refused = comer if gives_way == "comer" else batch[2]
        async with asyncio.timeout(60):
            await ended(refused)
        assert isinstance(refused.exception(), QueueFull)
        stay = {*normal, *batch, comer} - {refused}
        assert not any(task.done() for task in stay) and gate.waiting == 7
        for task in stay:
            task.cancel()
        await ended(*stay)
        assert gate.waiting == 0 and gate.shares.tenants.waiting == {}

    asyncio.run(story())


@pytest.mark.spec("F6")
@pytest.mark.parametrize("comes", [{"tenant": "b", "priority": Priority.BATCH}, {"tenant": "b"}])
def test_full_queue_of_more_urgent_requests_or_of_as_many_tenants_refuses_the_comer(
    comes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        monkeypatch.setattr(batch_gate, "MAX_WAITING", 2)
        gate = BatchGate(slots=0, window=1)
        await gate.enter(BASE, "m")
        waiting = [await asking(gate, BASE, tenant=tenant) for tenant in "ac"]
        with pytest.raises(QueueFull):
            await gate.enter(BASE, "m", **comes)
        for task in waiting:
            task.cancel()
        await ended(*waiting)

    asyncio.run(story())


@pytest.mark.spec("F4")
def test_place_is_given_back_once() -> None:
    async def story() -> None:
        gate = BatchGate(slots=0, window=2)
        first, other = await gate.enter(BASE, "m"), await gate.enter(BASE, "m")
        gate.leave(first)
        gate.leave(first)
        assert gate.running == {BASE: 1}
        gate.leave(other)
        assert not gate.running

    asyncio.run(story())


def test_queue_of_an_engine_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        monkeypatch.setattr(batch_gate, "MAX_WAITING", 1)
        gate = BatchGate(slots=0, window=1)
        await gate.enter(BASE, "m")
        waiting = await asking(gate, BASE)
        with pytest.raises(QueueFull):
            await gate.enter(BASE, "m")
        waiting.cancel()
        await ended(waiting)

    asyncio.run(story())
