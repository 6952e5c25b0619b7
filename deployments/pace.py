"""Fewer, larger pieces of a stream where many streams flow at once.

Serve carries some thousand chunks a second between two replicas on two cores, whatever their size,
and each costs the engine's cores time. An engine that makes five thousand tokens a second is then
bound by their transport. So after a piece went out, the next one is taken only when its share of
the transport is due; what came meanwhile goes out as one. The first piece never waits, and a
stream alone waits a millisecond.
"""

import asyncio
import time
from collections.abc import AsyncGenerator

from deployments.wire import Head

# Chunks a second over all streams of a replica. Serve's default transport carries 940 to 2,580
# (docs/benchmarks.md); well below it, so that proxy, front and engine keep their cores.
CHUNKS_PER_S = 500.0

Part = Head | bytes


class Pace:
    """One per replica."""

    def __init__(self, chunks_per_s: float = CHUNKS_PER_S) -> None:
        self._share_s = 1.0 / chunks_per_s
        self._streams = 0

    async def follow(self, parts: AsyncGenerator[Part, None]) -> AsyncGenerator[Part, None]:
        """The same bytes in the same order. `parts` must hand over all it has when asked."""
        self._streams += 1
        due_s = 0.0
        try:
            async for part in parts:
                yield part
                if isinstance(part, Head):
                    continue  # the first bytes follow at once
                due_s = max(due_s, time.monotonic()) + self._streams * self._share_s
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        finally:
            self._streams -= 1
            await parts.aclose()  # which is what cancels the work behind it
