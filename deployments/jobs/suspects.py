"""Suspects: a call whose engine died under an earlier attempt runs alone from then on, among the
calls of this process for its model. So it ends no other call with it, and the next death is due to
this call alone, or to a kill from outside.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from deployments.front.inference.service import TRIES

# Deaths of the engine under a call until the call fails: those of three attempts, or of nine where
# a stream had begun in each; all but the first run alone. Kills from outside do not come to that
# (docs/adr/0035).
DEATHS_MOST = 3 * TRIES


class Suspects:
    """The calls in flight of all runners of one process, by model."""

    def __init__(self) -> None:
        self._in_flight: Counter[str] = Counter()
        self._suspects: Counter[str] = Counter()  # those that run or wait until they may
        self._alone: set[str] = set()  # models of which a suspect runs
        self._changed = asyncio.Event()

    @property
    def models(self) -> frozenset[str]:
        """The models of which no further call is to begin, because a suspect runs or waits."""
        return frozenset(+self._suspects)

    @asynccontextmanager
    async def call(self, model: str, losses: int) -> AsyncGenerator[None]:
        """Counts the call that is made within the block. With `losses` it waits until the other
        calls for the model have ended, and no other begins before it ends."""
        suspects = 1 if losses else 0
        self._suspects[model] += suspects
        try:
            while self._in_flight[model] if suspects else model in self._alone:
                await self._changed.wait()
            self._in_flight[model] += 1
            if suspects:
                self._alone.add(model)
            try:
                yield
            finally:
                self._in_flight[model] -= 1
                if suspects:
                    self._alone.discard(model)
        finally:
            self._suspects[model] -= suspects
            self._changed.set()
            self._changed = asyncio.Event()
