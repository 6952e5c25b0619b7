"""Which pictures share a batch, and what becomes of those whose clients leave."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from PIL import Image

from deployments.engines.diffusers.batches import (
    BatchAbandoned,
    Batches,
    DrawingFailed,
    DrawnPicture,
    DrawRequest,
    Event,
    OnStep,
    Picture,
    Preview,
    Step,
)
from deployments.engines.diffusers.requests import Setting

STEPS = 4
BASE = Setting(64, 64, STEPS, None, "")
OTHER = Setting(64, 64, 8, None, "")
WITHIN_S = 60.0


class Painter:
    """Paints each picture in the colour of its seed, when it may."""

    def __init__(self, fails: Exception | None = None) -> None:
        self.batches: list[list[int]] = []
        self.steps = 0
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.fails, self.error = fails, None

    def draw(self, batch: Sequence[Picture], on_step: OnStep) -> list[Image.Image]:
        self.batches.append([picture.seed for picture in batch])
        images = [Image.new("RGB", (1, 1), (p.seed, 0, 0)) for p in batch]
        self.begun.set()
        assert self.go_on.wait(WITHIN_S)
        if self.fails and len(self.batches) == 1:
            raise self.fails
        for step in range(1, batch[0].request.setting.steps + 1):
            on_step(step, batch[0].request.setting.steps, lambda: images)
            self.steps += 1
        return images


def draw_request(*seeds: int, setting: Setting = BASE, previews: int = 0) -> DrawRequest:
    return DrawRequest(setting, "a picture", "", seeds, previews)


@asynccontextmanager
async def running(painter: Painter, most: int = 4) -> AsyncIterator[Batches]:
    batches = Batches(painter.draw, most)
    task = asyncio.create_task(batches.run())
    try:
        async with asyncio.timeout(WITHIN_S):
            yield batches
    finally:
        painter.go_on.set()
        task.cancel()


async def drawn(batches: Batches, asked: DrawRequest) -> list[Event]:
    async with aclosing(batches.events(asked)) as events:
        return [event async for event in events]


async def begun(painter: Painter) -> None:
    await asyncio.to_thread(painter.begun.wait, WITHIN_S)


async def queued(*asked: Callable[[], Any]) -> list[asyncio.Task[Any]]:
    """Tasks that have begun: their pictures are in the queue."""
    tasks = [asyncio.ensure_future(one()) for one in asked]
    await asyncio.sleep(0)
    return tasks


@pytest.mark.spec("H5")
async def test_pictures_that_wait_and_agree_share_the_next_batch() -> None:
    painter = Painter()
    async with running(painter) as batches:
        first = await queued(lambda: drawn(batches, draw_request(1)))
        await begun(painter)
        rest = await queued(
            lambda: drawn(batches, draw_request(2, 3)),
            lambda: drawn(batches, draw_request(7, setting=OTHER)),
            lambda: drawn(batches, draw_request(4, 5, 6)),
        )
        painter.go_on.set()
        answers = await asyncio.gather(*first, *rest)
    assert painter.batches == [[1], [2, 3, 4, 5], [7], [6]]
    seen = [[e.image.getpixel((0, 0)) for e in a if isinstance(e, DrawnPicture)] for a in answers]
    assert seen == [
        [(1, 0, 0)],
        [(2, 0, 0), (3, 0, 0)],
        [(7, 0, 0)],
        [(n, 0, 0) for n in (4, 5, 6)],
    ]


@pytest.mark.spec("H5")
async def test_each_step_is_told_and_previews_divide_the_steps() -> None:
    painter = Painter()
    painter.go_on.set()
    async with running(painter) as batches:
        events = await drawn(batches, draw_request(1, previews=3))
    assert [e.step for e in events if isinstance(e, Step)] == [1, 2, 3, 4]
    assert [e.index for e in events if isinstance(e, Preview)] == [0, 1, 2]
    assert isinstance(events[-1], DrawnPicture)
    at = [draw_request(1, previews=2).preview_at(step, 10) for step in range(1, 11)]
    assert at == [None, None, 0, None, None, None, 1, None, None, None]


@pytest.mark.spec("H5", "A8")
async def test_a_batch_without_clients_ends_before_its_next_step() -> None:
    painter = Painter()
    async with running(painter) as batches:
        [gone] = await queued(lambda: drawn(batches, draw_request(1)))
        await begun(painter)
        gone.cancel()
        await asyncio.wait({gone})
        painter.go_on.set()
        assert isinstance((await drawn(batches, draw_request(2)))[-1], DrawnPicture)
    assert painter.batches == [[1], [2]]
    assert painter.steps == STEPS  # those of the second


@pytest.mark.spec("A8", "L3")
async def test_a_client_that_leaves_takes_only_its_own_pictures_along() -> None:
    painter = Painter()
    async with running(painter) as batches:
        [both, stays] = await queued(
            lambda: drawn(batches, draw_request(1)), lambda: drawn(batches, draw_request(2))
        )
        [waits] = await queued(lambda: drawn(batches, draw_request(3, setting=OTHER)))
        await begun(painter)
        for task in (both, waits):
            task.cancel()
        await asyncio.wait({both, waits})
        painter.go_on.set()
        assert isinstance((await stays)[-1], DrawnPicture)
    assert painter.batches == [[1, 2]]


@pytest.mark.spec("L3")
async def test_an_error_of_the_library_is_the_answer_and_the_next_batch_is_drawn() -> None:
    painter = Painter(fails=RuntimeError("no such kernel"))
    painter.go_on.set()
    async with running(painter) as batches:
        with pytest.raises(DrawingFailed, match="RuntimeError: no such kernel"):
            await drawn(batches, draw_request(1))
        assert isinstance((await drawn(batches, draw_request(2)))[-1], DrawnPicture)


@pytest.mark.spec("H9")
async def test_step_of_a_picture_that_hangs_is_noticed() -> None:
    painter = Painter()
    async with running(painter) as batches:
        [drawing] = await queued(lambda: drawn(batches, draw_request(1)))
        await begun(painter)
        batches.worker.check()
        batches.worker.most_s = 0.0
        with pytest.raises(RuntimeError, match="has run for more than"):
            batches.worker.check()
        painter.go_on.set()
        await drawing
        batches.worker.check()


def test_abandoned_is_no_answer() -> None:
    assert not issubclass(BatchAbandoned, DrawingFailed)
