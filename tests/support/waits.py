"""Waiting on a condition, with a bound."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
# For anything that must happen: on two cores that three clusters of Ray share, what takes a second
# alone has taken twenty.
WITHIN_S = 60.0


async def eventually(look: Callable[[], T | Awaitable[T]], within_s: float = WITHIN_S) -> T:
    """The first true value of `look`. Raises TimeoutError."""
    async with asyncio.timeout(within_s):
        while True:
            seen = look()
            found: T = await seen if inspect.isawaitable(seen) else seen
            if found:
                return found
            await asyncio.sleep(0.01)
