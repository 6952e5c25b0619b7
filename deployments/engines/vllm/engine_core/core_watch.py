"""Whether the engine's core goes on: it answers a question between any two of its steps.

A core that has hung is no dead process, and its frontend, which answers for both, notices nothing
by itself.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

# The most that a step may take. On a GPU it takes milliseconds, or a minute where it compiles a
# kernel. On two CPU cores 4,096 tokens of a prompt, vLLM's bound on one step, take at least 650 s
# through 8 G parameters (65 TFLOP).
GPU_STEP_MOST_S, CPU_STEP_MOST_S = 300.0, 1_800.0


class CoreWatch:
    """Finds out whether the core goes on. `ask`: calls the core; one call at a time is made.
    `clock`: monotonic seconds."""

    def __init__(
        self,
        ask: Callable[[], Coroutine[Any, Any, Any]],
        most_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask, self._most_s, self._clock = ask, most_s, clock
        self._asked_s = 0.0
        self._answer: asyncio.Task[Any] | None = None

    def check(self) -> None:
        """Calls the core, unless the last call is unanswered. Waits for nothing. Raises
        RuntimeError when a call has been unanswered for longer than any step takes."""
        if self._answer is None or self._answer.done():
            self._asked_s = self._clock()
            self._answer = asyncio.ensure_future(self._ask())
            self._answer.add_done_callback(_ignore_error)
        elif (waited_s := self._clock() - self._asked_s) > self._most_s:
            raise RuntimeError(
                f"the engine core has not gone on for {waited_s:.0f} s with requests in flight; a"
                f" step takes {self._most_s:.0f} s at most"
            )


def _ignore_error(answer: asyncio.Task[Any]) -> None:
    """Reads an error, so that asyncio does not log it. An error is an answer as well, and the death
    of a core is noticed by its pidfd."""
    if not answer.cancelled():
        answer.exception()
