"""Waiting on a condition, with a bound."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def eventually(look: Callable[[], T | Awaitable[T]], within_s: float = 20.0) -> T:
    """The first true value of `look`. Raises TimeoutError."""
    async with asyncio.timeout(within_s):
        while True:
            seen = look()
            found: T = await seen if inspect.isawaitable(seen) else seen
            if found:
                return found
            await asyncio.sleep(0.01)
