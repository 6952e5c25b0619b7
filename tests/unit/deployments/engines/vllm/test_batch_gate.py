"""A place in the batch is never lost, whoever is cancelled when."""

import asyncio

import pytest

from deployments.engines.vllm.batch_gate import AdaptersBusy, BatchGate


async def asking(gate: BatchGate, adapter: str) -> "asyncio.Task[None]":
    """A request that waits, or has entered."""
    task = asyncio.ensure_future(gate.enter(adapter, adapter))
    await asyncio.sleep(0)
    return task


async def ended(*tasks: "asyncio.Task[None]") -> None:
    await asyncio.wait(tasks)


@pytest.mark.spec("F4")
def test_request_cancelled_as_another_leaves_takes_no_place_in_the_batch() -> None:
    async def story() -> None:
        gate = BatchGate(slots=1, window=4, wait_s=30)
        await gate.enter("a", "a")
        gone, next_one = await asking(gate, "b"), await asking(gate, "c")
        gone.cancel()  # its future is cancelled; its task has not run yet
        gate.leave("a")
        await ended(gone, next_one)
        assert gone.cancelled() and next_one.exception() is None
        assert gate.running == {"c": 1} and gate.waiting == 0
        gate.leave("c")
        assert not gate.running

    asyncio.run(story())


@pytest.mark.spec("F4")
def test_request_cancelled_after_admission_gives_its_place_back() -> None:
    async def story() -> None:
        gate = BatchGate(slots=1, window=4, wait_s=30)
        await gate.enter("a", "a")
        given, next_one = await asking(gate, "b"), await asking(gate, "c")
        gate.leave("a")
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
