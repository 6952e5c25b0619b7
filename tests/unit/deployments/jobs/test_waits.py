"""Waits: which calls give their places to those of other models."""

import asyncio
from contextlib import suppress

import pytest

from deployments.jobs.calls import AGAIN_LEAST_S, AGAIN_MOST_S, RetryLater
from deployments.jobs.waits import CallsInFlight
from deployments.messages import Progress
from tests.support.waits import eventually

pytestmark = pytest.mark.spec("J4", "J8")
QUEUED, LOADING = Progress("queued", 0, None), Progress("loading", 0, 3.0)


class HeardCalls:
    """Calls that hear what a test says and last until they are ended."""

    def __init__(self) -> None:
        self.waits = CallsInFlight()
        self.tasks: list[asyncio.Task[RetryLater | None]] = []

    async def begin(self, model: str, *heard: Progress | None) -> asyncio.Task[RetryLater | None]:
        has_begun = asyncio.Event()

        async def carry() -> RetryLater | None:
            try:
                async with self.waits.call(model) as call:
                    for progress in heard:
                        call.note(progress)
                    has_begun.set()
                    await asyncio.Event().wait()
            except RetryLater as again:
                return again

        self.tasks.append(asyncio.create_task(carry()))
        await has_begun.wait()
        return self.tasks[-1]

    @property
    def left(self) -> list[int]:
        return [number for number, task in enumerate(self.tasks) if not task.done()]

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*self.tasks)


async def test_call_waits_long_while_its_model_is_queued_and_no_longer() -> None:
    calls = HeardCalls()
    await calls.begin("silent")
    await calls.begin("loads", QUEUED, LOADING)
    await calls.begin("answers", QUEUED, None)
    await calls.begin("waits", LOADING, QUEUED)
    assert calls.waits.models(0.0) == {"waits"}
    assert not calls.waits.models(60.0)
    await calls.close()
    assert not calls.waits.models(0.0)


async def test_all_but_one_call_of_a_model_give_way_and_are_tried_again_soon() -> None:
    calls = HeardCalls()
    ones = [await calls.begin("one", QUEUED) for _ in range(3)]
    await calls.begin("two")
    for _ in range(3):
        left = len(calls.left)
        calls.waits.give_way(0.0, 4)
        calls.waits.give_way(0.0, 4)  # one after the other
        await eventually(lambda: len(calls.left) == max(2, left - 1))  # noqa: B023
    again = [call.result() for call in ones if call.done()]
    assert [one.after_s for one in again if one] == [AGAIN_LEAST_S] * 2
    assert calls.waits.models(0.0) == {"one"}
    await calls.close()


async def test_last_call_of_a_model_gives_way_where_all_places_wait_and_it_is_not_next() -> None:
    calls = HeardCalls()
    first, second = [await calls.begin(model, QUEUED) for model in ("one", "two")]
    calls.waits.give_way(0.0, 3)
    calls.waits.give_way(0.0, 2)
    await eventually(first.done)
    again = first.result()
    assert again is not None and again.after_s == AGAIN_MOST_S and "one waits" in again.why
    calls.waits.give_way(0.0, 2)  # the place of the first serves others now
    assert not second.done() and calls.waits.models(0.0) == {"one", "two"}
    assert calls.waits.models(60.0) == {"one"}
    await calls.close()


async def test_timeout_of_the_call_itself_is_its_own() -> None:
    with pytest.raises(TimeoutError):
        async with CallsInFlight().call("one"):
            raise TimeoutError
