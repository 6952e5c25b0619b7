"""Fewer, larger pieces of a stream where many streams flow at once.

What a piece costs on its way through Serve does not depend on its size, and it costs the cores that
the engine computes on. So of several streams each piece waits for the one after it, and both go
out as one: a token is late by the time to the next at most. Where tokens come faster than Serve
carries pieces, a piece also waits until its share of the transport is due.

Nothing waits where nothing is gained: not a stream alone, not the first tokens of any, and not the
last.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from deployments.messages import FIRST_PIECES, RUNNING, Progress, ResponseHead

# Chunks a second over all streams of a replica. Serve carries 940 to 2,580 between two replicas on
# two cores (docs/benchmarks.md); well below it, so that proxy, front and engine keep their cores.
CHUNKS_PER_S = 500.0

# A piece waits for the next one this many times as long as the last came after the one before:
# steps of an engine differ by less, unless it takes in a long prompt.
PATIENCE = 1.5

# An answer that begins within this time costs no message about it; the front tells its client
# nothing in the first second.
SLOW_S = 0.25

# Of bytes read and not asked for; then the engine's socket fills, which stops the engine.
MOST_HELD_BYTES = 1 << 20

Part = ResponseHead | bytes


class StreamBatching:
    """Pairs the pieces of concurrent streams. One per replica."""

    def __init__(self, chunks_per_s: float = CHUNKS_PER_S, patience: float = PATIENCE) -> None:
        self._share_s, self._patience = 1.0 / chunks_per_s, patience
        self._streams = 0

    async def follow(
        self, parts: AsyncGenerator[Part, None], *, wants_progress: bool = False
    ) -> AsyncGenerator[Progress | Part, None]:
        """Yields the same bytes in the same order, and raises the same error at the end. With
        `wants_progress`, RUNNING precedes a head that is not there within SLOW_S."""
        self._streams += 1
        inlet = _Inlet(parts)
        number, due_s = 0, 0.0
        try:
            if wants_progress and not await inlet.has_begun(SLOW_S):
                yield RUNNING
            while (part := await inlet.take()) is not None:
                yield part
                number += isinstance(part, bytes)
                if number < FIRST_PIECES:
                    continue
                due_s = max(due_s, inlet.now_s()) + self._streams * self._share_s
                if self._streams > 1:
                    await inlet.pair(self._patience)
                await inlet.until(due_s)
        finally:
            self._streams -= 1
            await inlet.close()


class _Inlet:
    """Reads ahead, so that it is known what has come, how fast, and whether more will.

    Reader and taker signal each other by one event, and each clears it itself. No signal is lost: a
    side clears the event right after it has looked at what it waits for, with no await in between,
    and an event that is set wakes all that wait at that moment, even if it is cleared before they
    run."""

    def __init__(self, parts: AsyncGenerator[Part, None]) -> None:
        self._head: ResponseHead | None = None
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._came_s = self._interval_s = 0.0
        self._wakeup = asyncio.Event()  # something came, was taken, or there is no more
        self.now_s = asyncio.get_running_loop().time
        self._reading = asyncio.ensure_future(self._read(parts))
        self._reading.add_done_callback(lambda _: self._wakeup.set())

    async def has_begun(self, within_s: float) -> bool:
        """Waits until head or end has come. False: neither came within that time."""
        await self._wait(lambda: self._head is not None, self.now_s() + within_s)
        return self._head is not None or self._reading.done()

    async def take(self) -> Part | None:
        """Returns the head, or all bytes there are, and waits for some. None: the end. Raises what
        broke the stream."""
        await self._wait(lambda: bool(self._head or self._held))
        if self._head is not None:
            head, self._head = self._head, None
            return head
        if not self._held:
            self._reading.result()
            return None
        held, self._held, self._held_bytes = b"".join(self._held), [], 0
        self._wakeup.set()
        return held

    async def pair(self, patience: float) -> None:
        """Waits until two pieces are there, or the second is late."""
        await self._wait(lambda: bool(self._held))
        await self._wait(lambda: len(self._held) > 1, self._came_s + patience * self._interval_s)

    async def until(self, due_s: float) -> None:
        """Waits until that time, or the end of the stream if that is sooner."""
        await self._wait(lambda: False, due_s)

    async def close(self) -> None:
        """Cancels the work behind the stream."""
        self._reading.cancel()
        await asyncio.wait({self._reading})
        if not self._reading.cancelled():
            self._reading.exception()  # `take` has raised it, if the stream was read to its end

    async def _wait(self, ready: Callable[[], bool], until_s: float | None = None) -> None:
        """Returns when ready, late, or when nothing more will come."""
        while not ready() and not self._reading.done():
            self._wakeup.clear()
            try:
                async with asyncio.timeout_at(until_s):
                    await self._wakeup.wait()
            except TimeoutError:
                return

    async def _read(self, parts: AsyncGenerator[Part, None]) -> None:
        async with aclosing(parts):
            async for part in parts:
                if isinstance(part, ResponseHead):
                    self._head = part
                else:
                    before_s, self._came_s = self._came_s, self.now_s()
                    self._interval_s = self._came_s - before_s
                    self._held.append(part)
                    self._held_bytes += len(part)
                self._wakeup.set()
                while self._held_bytes > MOST_HELD_BYTES:
                    self._wakeup.clear()
                    await self._wakeup.wait()
