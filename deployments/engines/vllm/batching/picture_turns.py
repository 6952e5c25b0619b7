"""Turns in which the pictures of a request become pixels, and pixels what the model reads.

Both are done once per request, one request after the other. 32 M pixels, the most that the front
lets through in one request, are 128 MiB once they are decoded, and vLLM keeps them until its one
thread for that has processed them: 256 requests side by side would hold 32 GiB.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from heapq import heappop, heappush
from math import isinf

from deployments.engines import asgi
from deployments.engines.protocol import Receive
from deployments.engines.vllm.batching import callers
from deployments.engines.vllm.batching.batch_gate import RETRY_S, RequestExpired


def _nothing() -> None:
    """Ends the turn of a request without pictures, which has none."""


_END: ContextVar[Callable[[], None]] = ContextVar("end", default=_nothing)


class PictureTurns:
    """Whose turn it is, of the requests of one engine that have pictures: the most urgent, and of
    these the first."""

    def __init__(self) -> None:
        self._is_taken = False
        self._numbers = itertools.count()  # by arrival
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap

    async def take(self, model: str, receive: Receive) -> bool:
        """Waits for the turn of the current request, which `until_end` must end. Returns False once
        its client has left. Raises RequestExpired at its deadline."""
        if not self._is_taken:
            self._is_taken = True
            return True
        caller, began_s = callers.current(), time.monotonic()
        turn = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (caller.priority, next(self._numbers), turn))
        left_s = None if isinf(caller.expires_s) else caller.expires_s - began_s
        leaving = asyncio.ensure_future(asgi.disconnected(receive))
        is_mine = False
        try:
            async with asyncio.timeout(left_s):
                await asyncio.wait({turn, leaving}, return_when=asyncio.FIRST_COMPLETED)
            is_mine = turn.done()
            return is_mine
        except TimeoutError as error:
            raise RequestExpired(model, time.monotonic() - began_s, RETRY_S) from error
        finally:
            leaving.cancel()
            if not is_mine and not turn.cancel():  # it came in the same moment
                self._pass_on()

    @contextmanager
    def until_end(self) -> Iterator[None]:
        """Ends the turn that was taken: with `end_turn`, or else with the request."""
        is_over = False

        def end() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                self._pass_on()

        _END.set(end)
        try:
            yield
        finally:
            end()

    def _pass_on(self) -> None:
        while self._waiting:
            _, _, turn = heappop(self._waiting)
            if not turn.done():
                return turn.set_result(None)
        self._is_taken = False


def end_turn() -> None:
    """Ends the turn of the request that this task answers: vLLM has processed its pictures. A
    second call has no effect."""
    _END.get()()
