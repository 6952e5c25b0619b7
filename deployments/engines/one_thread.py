"""OneThread: the one thread that touches a model, and turns in it for many requests.

    worker = OneThread("hear")
    model = await worker.run(load)
    async for segment in worker.each(model.transcribe(samples)): ...   # one turn per segment

An iterator takes one turn for each item, so a long request does not keep a short one waiting to its
end, and a client that leaves stops its work at the next item: nothing asks for more.
"""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from deployments.engines.protocol import Config

T = TypeVar("T")

# One step of a model: 30 s of speech heard, 10 s spoken. They take a second or two on one core;
# a step that takes this long has hung in its library.
STEP_MOST_S = 300.0
# One pass over a batch: 32 texts of 512 tokens through 0.6 G parameters, or a step of four pictures
# of a megapixel, is 20 to 50 TFLOP, 400 to 1,000 s on one slow core.
PASS_MOST_S = 1_800.0
_END = object()
# CTranslate2's default for `intra_threads`. Models of speech are too small to use more.
MOST_THREADS = 4


def compute_threads(config: Config) -> int:
    """Returns the number of threads with which a library computes a step: as configured, else one
    for each core that the process may use, at most MOST_THREADS."""
    count = config.get("engine_args", {}).get("threads") or config.get("threads")
    return int(count or min(MOST_THREADS, len(os.sched_getaffinity(0))))


class OneThread:
    """Runs what it is given in the order in which it came. `most_s`: a step that takes longer has
    hung."""

    def __init__(self, name: str, most_s: float = STEP_MOST_S) -> None:
        self.most_s = most_s
        self.executor = ThreadPoolExecutor(1, name)  # for a library that is to use the thread, too
        self._began_s: float | None = None  # of the step that runs now

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Runs a function in the thread, in its turn. A call that is cancelled before its turn
        never runs. Raises what `function` raises."""
        return await asyncio.get_running_loop().run_in_executor(
            self.executor, self._timed, function, args
        )

    async def each(self, items: Iterator[T]) -> AsyncGenerator[T, None]:
        """Yields the items of an iterator, each taken in a turn of its own. Raises what the
        iterator raises."""
        while (item := await self.run(next, items, _END)) is not _END:
            yield item

    def check(self) -> None:
        """Raises RuntimeError when a step has hung."""
        began_s = self._began_s
        if began_s is not None and time.monotonic() - began_s > self.most_s:
            raise RuntimeError(f"one step of the model has run for more than {self.most_s:.0f} s")

    def note_step(self) -> None:
        """Called in the thread at the begin of each step, by a function that has several."""
        self._began_s = time.monotonic()

    @contextmanager
    def holding(self, lock: AbstractContextManager[None]) -> Iterator[None]:
        """Takes `lock` in the thread. The time of the wait does not count as a step, because
        another engine may hold the lock for as long as it computes."""
        self._began_s = None
        with lock:
            self.note_step()
            yield

    def _timed(self, function: Callable[..., T], args: tuple[Any, ...]) -> T:
        self.note_step()
        try:
            return function(*args)
        finally:
            self._began_s = None
