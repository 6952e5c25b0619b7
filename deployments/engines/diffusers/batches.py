"""Batches: pictures of many requests, drawn several at a time.

    batches = Batches(draw, most=4)
    task = asyncio.create_task(batches.run())
    async with aclosing(batches.events(request)) as events:  # leaving it early withdraws it
        async for event in events: ...                     # Step, Preview, DrawnPicture

Pictures that wait while a batch is drawn and agree in their setting become the next batch. There
is no timer: a lone request never waits for others. Each picture has its own seed, so the others of
its batch do not change it (docs/models.md has by how much rounding does). A batch whose clients
have all left ends before its next step.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from arbiter.errors import RequestError
from deployments.engines.diffusers.requests import Setting
from deployments.engines.one_thread import PASS_MOST_S, OneThread


class BatchAbandoned(Exception):
    """No client waits for any picture of the batch."""


class DrawingFailed(RequestError):
    """The library raised an error while it drew."""

    status_code, code = 500, "drawing_failed"

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause

    def __str__(self) -> str:
        return f"the picture could not be drawn: {self.cause}"


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a picture is done."""

    number: int  # of the picture in its request, from 0
    step: int  # from 1
    of: int


@dataclass(frozen=True, slots=True)
class Preview:
    """A picture as it is between two steps: noisy."""

    number: int
    index: int  # of the previews of this picture, from 0
    image: Image.Image


@dataclass(frozen=True, slots=True)
class DrawnPicture:
    """A picture is ready."""

    number: int
    image: Image.Image


Event = Step | Preview | DrawnPicture


@dataclass(slots=True, eq=False)
class DrawRequest:
    """One request: as many pictures as it has seeds."""

    setting: Setting
    prompt: str
    negative: str
    seeds: Sequence[int]
    previews: int = 0  # of each picture
    events: asyncio.Queue[Event | RequestError] = field(default_factory=asyncio.Queue)
    has_left: bool = False  # its client; read by the worker thread

    def preview_at(self, step: int, of: int) -> int | None:
        """The index of the preview after `step`, where there is one: they divide the steps."""
        at = [round(of * (index + 1) / (self.previews + 1)) for index in range(self.previews)]
        return at.index(step) if step in at and step < of else None


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """One picture of a request."""

    request: DrawRequest
    number: int

    @property
    def seed(self) -> int:
        return self.request.seeds[self.number]


# Called after each step with its number, from 1, and the number of steps; and with what decodes the
# previews, one for each picture of the batch, or None where the pipeline has no way to.
OnStep = Callable[[int, int, Callable[[], list[Image.Image] | None]], None]
# Runs in the worker thread. Raises what `OnStep` raises, and what the library does.
Draw = Callable[[Sequence[Picture], OnStep], list[Image.Image]]


class Batches:
    """One queue, one worker thread."""

    def __init__(self, draw: Draw, most: int) -> None:
        self.worker = OneThread("draw", PASS_MOST_S)
        self._draw, self._most = draw, most
        self._waiting: list[Picture] = []
        self._arrived = asyncio.Event()

    async def events(self, request: DrawRequest) -> AsyncGenerator[Event, None]:
        """Yields events until all pictures of the request are drawn. Raises DrawingFailed."""
        self._waiting += [Picture(request, number) for number in range(len(request.seeds))]
        self._arrived.set()
        missing = len(request.seeds)
        try:
            while missing:
                event = await request.events.get()
                if isinstance(event, RequestError):
                    raise event
                missing -= isinstance(event, DrawnPicture)
                yield event
        finally:
            request.has_left = True
            self._waiting = [p for p in self._waiting if p.request is not request]

    async def work(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs `function` in the one thread that touches the model."""
        return await self.worker.run(function, *args)

    async def run(self) -> None:
        """Draws batch after batch, for ever."""
        while True:
            batch = await self._next()
            work = asyncio.ensure_future(self.work(self._draw, batch, self._step_callback(batch)))
            await asyncio.wait({work})
            if error := work.exception():
                cause = DrawingFailed(f"{type(error).__name__}: {error}")
                for request in {picture.request for picture in batch}:
                    request.events.put_nowait(cause)
            else:
                for picture, image in zip(batch, work.result(), strict=True):
                    picture.request.events.put_nowait(DrawnPicture(picture.number, image))

    async def _next(self) -> list[Picture]:
        """Waits for a picture, and takes all others that fit into its batch."""
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()
        setting = self._waiting[0].request.setting
        batch = [p for p in self._waiting if p.request.setting == setting][: self._most]
        self._waiting = [p for p in self._waiting if p not in batch]
        return batch

    def _step_callback(self, batch: Sequence[Picture]) -> OnStep:
        """What the worker thread calls after each step. Raises BatchAbandoned."""
        loop = asyncio.get_running_loop()

        def on_step(step: int, of: int, decode: Callable[[], list[Image.Image] | None]) -> None:
            self.worker.note_step()
            if all(picture.request.has_left for picture in batch):
                raise BatchAbandoned
            at = [picture.request.preview_at(step, of) for picture in batch]
            previews = decode() if any(index is not None for index in at) else None
            for place, (picture, index) in enumerate(zip(batch, at, strict=True)):
                tell = picture.request.events.put_nowait
                loop.call_soon_threadsafe(tell, Step(picture.number, step, of))
                if previews and index is not None:
                    preview = Preview(picture.number, index, previews[place])
                    loop.call_soon_threadsafe(tell, preview)

        return on_step
