"""Waiting on a condition, with a bound."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

T = TypeVar("T")
# For anything that must happen: on two cores that three clusters of Ray share, what takes a second
# alone has taken twenty.
WITHIN_S = 60.0
_GROWS_BY = 1.2


def pauses(first_s: float, most_s: float) -> Iterator[float]:
    """How long to wait before each further look. What has not come soon is looked for less often,
    because looks take the processor from what they wait for."""
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(most_s, pause_s * _GROWS_BY)


async def eventually(look: Callable[[], T | Awaitable[T]], within_s: float = WITHIN_S) -> T:
    """The first true value of `look`. Raises TimeoutError."""
    pause_s = pauses(0.01, 0.1)
    async with asyncio.timeout(within_s):
        while True:
            seen = look()
            value: T = await seen if inspect.isawaitable(seen) else seen
            if value:
                return value
            await asyncio.sleep(next(pause_s))


def wait_in_thread(look: Callable[[], object], within_s: float = WITHIN_S) -> None:
    """Blocks this thread until `look` gives something true. Raises TimeoutError."""
    deadline_s = time.monotonic() + within_s
    while not look():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {within_s:.0f} s")
        time.sleep(0.001)
