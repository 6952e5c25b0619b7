"""JobsPolicy: whether Serve keeps the replica of jobs."""

import time
from collections.abc import Callable
from typing import Any

from deployments.jobs.database import has_work, state_path
from deployments.scaling import Context

# A replica is kept for so long after the last call: a client that polls each minute meets the same.
IDLE_S = 300.0
LOOK_S = 1.0  # between two looks into the state file, of 0.1 ms
# After its expiry, within which a job or file is erased where no replica runs: so expiries that
# come one after another start one at most each hour.
ERASED_WITHIN_S = 3_600.0


class JobsPolicy:
    """One replica while it is called, has unfinished work, or has to erase what has expired, by the
    state file, which Serve's controller can read: it is on the head node as well. After any kill
    the work goes on."""

    def __init__(
        self,
        state_file: str = "",
        digest: str = "",
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`digest` is of the code that is deployed; the front reads it back from Serve."""
        self._path, self._clock, self._wall_clock = state_path(state_file), clock, wall_clock
        self._looked_at = self._used_at = float("-inf")

    def __call__(self, context: Context) -> tuple[int, dict[str, Any]]:
        """Answers Serve's question, ten times a second."""
        now = self._clock()
        if context.total_num_requests > 0:
            self._used_at = now
        elif now - self._looked_at >= LOOK_S:
            self._looked_at = now
            if has_work(self._path, self._wall_clock() - ERASED_WITHIN_S):
                self._used_at = now
        return int(now - self._used_at < IDLE_S), {}
