"""Turns in which the pictures of a request become pixels, and pixels what the model reads.

Both are done once per request, one request after the other. 32 M pixels, the most that the front
lets through in one request, are 128 MiB once they are decoded, and vLLM keeps them until its one
thread for that has processed them: 256 requests side by side would hold 32 GiB.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from contextvars import ContextVar


def _nothing() -> None:
    """Ends the turn of a request without pictures, which has none."""


_END: ContextVar[Callable[[], None]] = ContextVar("end", default=_nothing)


class PictureTurns:
    """Whose turn it is, of the requests of one engine that have pictures."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits for the request's turn, in the order of arrival. It ends with `end_turn`, or else
        with the request."""
        with ExitStack() as held:
            await self._lock.acquire()
            held.callback(self._lock.release)
            _END.set(held.close)
            yield


def end_turn() -> None:
    """Ends the turn of the request that this task answers: vLLM has processed its pictures. A
    second call has no effect."""
    _END.get()()
