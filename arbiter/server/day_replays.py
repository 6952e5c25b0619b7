"""Replays the demand of the last day under other eviction policies, for the metrics (K2).

The arbiter's process only notes the demand, a few microseconds for each event. The replays run in a
process of the lowest priority, because they take seconds and nothing waits for them.
"""

import asyncio
import json
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable

from arbiter.core.decisions import Decision
from arbiter.core.events import Event
from arbiter.core.settings import Settings
from arbiter.protocol.json_codec import from_json
from arbiter.replay.recorded import LIVE_USES_COUNT, DemandReader
from arbiter.replay.score import ReplayedDay
from arbiter.units import Instant

logger = logging.getLogger("arbiter")

# The most uses take 12 s of an idle core; on a busy machine the lowest priority gets little of one.
REPLAY_MOST_S = 300.0


class DayReplays:
    """Replays the demand of the last day, again and again, in processes of their own: one object
    per epoch. `module` is run by `python -m`; it gets the demand on its standard input and prints a
    ReplayedDay."""

    def __init__(self, module: str, settings: Settings, clock: Callable[[], Instant]) -> None:
        self._module, self._settings, self._clock = module, settings, clock
        self._reader = DemandReader(LIVE_USES_COUNT)
        self._replayed_count = 0
        self.last: ReplayedDay | None = None

    def note(self, event: Event, at: Instant, decisions: list[Decision]) -> None:
        """Takes one event of the core, and what the core decided."""
        self._reader.read(event, at, decisions)

    async def run(self, every_s: float) -> None:
        """Runs until it is cancelled. While no model is used, nothing is replayed."""
        while True:
            await asyncio.sleep(every_s)
            if self._reader.uses_count != self._replayed_count:
                await self.replay()

    async def replay(self) -> None:
        """Replays once. A replay that fails, however it does, leaves the last result as it is: the
        result is for the metrics alone, and an error of this task would end the arbiter's
        process."""
        self._replayed_count = self._reader.uses_count
        [outcome] = await asyncio.gather(self._replayed(), return_exceptions=True)
        if isinstance(outcome, BaseException):
            logger.warning("the last day is not replayed for the metrics: %r", outcome)
        else:
            self.last = outcome

    async def _replayed(self) -> ReplayedDay | None:
        reply = await self._answer(pickle.dumps((self._reader, self._settings, self._clock())))
        return None if reply is None else from_json(ReplayedDay, reply)

    async def _answer(self, request: bytes) -> object:
        """Asks a child process, and waits in a thread, because children can be awaited on a loop of
        the main thread only. Raises OSError, subprocess.SubprocessError, ValueError."""
        process = subprocess.Popen(
            [sys.executable, "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        try:
            out, err = await asyncio.to_thread(process.communicate, request, REPLAY_MOST_S)
        finally:
            process.kill()  # nothing happens to a process that has ended
        if process.returncode:
            last_line = err.decode(errors="replace").strip().rpartition("\n")[2]
            raise subprocess.SubprocessError(f"{self._module} ended: {last_line}")
        answer: object = json.loads(out)
        return answer
