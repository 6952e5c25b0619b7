"""Turns in the one thread of a model."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from deployments.engines import one_thread
from deployments.engines.one_thread import OneThread


async def test_iterators_take_turns_by_item() -> None:
    worker = OneThread("turns")
    order: list[str] = []

    def items(name: str) -> Iterator[str]:
        for number in range(3):
            order.append(f"{name}{number}")
            yield name

    async def all_of(name: str) -> list[str]:
        return [item async for item in worker.each(items(name))]

    assert await asyncio.gather(all_of("a"), all_of("b")) == [["a"] * 3, ["b"] * 3]
    assert order == ["a0", "b0", "a1", "b1", "a2", "b2"]


@pytest.mark.spec("J8")
async def test_iterator_that_is_left_makes_no_further_item() -> None:
    worker = OneThread("left")
    made: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        for number in range(9):
            made.append(number)
            begun.set()
            assert go_on.wait(60)
            yield number

    async def read() -> None:
        async for _ in worker.each(items()):
            continue

    reading = asyncio.ensure_future(read())
    await asyncio.to_thread(begun.wait, 10)
    reading.cancel()
    await asyncio.wait({reading})
    go_on.set()
    await worker.run(int)  # after what was left of it
    assert made == [0]


@pytest.mark.spec("J8")
async def test_call_that_is_cancelled_before_its_turn_never_runs() -> None:
    worker = OneThread("waits")
    go_on, ran = threading.Event(), threading.Event()
    first = asyncio.ensure_future(worker.run(go_on.wait, 10))
    second = asyncio.ensure_future(worker.run(ran.set))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait({second})
    go_on.set()
    assert await first is True
    await worker.run(int)
    assert not ran.is_set()


async def test_errors_of_a_step_reach_its_caller() -> None:
    worker = OneThread("fails")
    with pytest.raises(ZeroDivisionError):
        await worker.run(divmod, 1, 0)
    assert await worker.run(divmod, 7, 2) == (3, 1)


@pytest.mark.spec("H9")
async def test_step_that_hangs_is_unhealthy() -> None:
    worker = OneThread("hangs")
    begun, go_on = threading.Event(), threading.Event()

    def step() -> bool:
        begun.set()
        return go_on.wait(60)

    hanging = asyncio.ensure_future(worker.run(step))
    await asyncio.to_thread(begun.wait, 10)
    worker.check()  # as every step is, for a while
    worker.most_s = 0.0
    with pytest.raises(RuntimeError, match="has run for more than"):
        worker.check()
    go_on.set()
    await hanging
    worker.check()


class Steps:
    """A call of two steps, and the turn that it waits for; a test lets each go on."""

    def __init__(self, worker: OneThread) -> None:
        self._worker = worker
        self.waits, self.turn = threading.Event(), threading.Event()
        self.stepped, self.go_on = threading.Event(), threading.Event()

    @contextmanager
    def _its_turn(self) -> Iterator[None]:
        self.waits.set()
        assert self.turn.wait(60)
        yield

    def run(self) -> None:
        with self._worker.holding(self._its_turn()):
            self._worker.note_step()
            self.stepped.set()
            assert self.go_on.wait(60)


@pytest.mark.spec("H9", "B2")
async def test_call_hangs_by_its_last_step_and_not_while_it_waits_for_another_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0
    monkeypatch.setattr(one_thread, "time", SimpleNamespace(monotonic=lambda: now_s))
    worker = OneThread("steps", 10.0)
    steps = Steps(worker)
    running = asyncio.ensure_future(worker.run(steps.run))
    await asyncio.to_thread(steps.waits.wait, 10)
    now_s = 100.0
    worker.check()
    steps.turn.set()
    await asyncio.to_thread(steps.stepped.wait, 10)
    now_s = 109.0
    worker.check()
    now_s = 111.0
    with pytest.raises(RuntimeError, match="has run for more than 10 s"):
        worker.check()
    steps.go_on.set()
    await running
