"""The deadline of a call, in its replica."""

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

from arbiter.errors import DeadlineUnmet
from deployments.messages import InferenceCall

RETRY_AFTER_S = 1.0
T = TypeVar("T")


def left_s(call: InferenceCall, began_s: float) -> float | None:
    """Returns the seconds left of a call's deadline, possibly negative; None: the call has none.
    `began_s`: when its replica first saw it, monotonic."""
    return None if call.deadline_s is None else call.deadline_s - (time.monotonic() - began_s)


async def until_deadline(call: InferenceCall, began_s: float, work: Awaitable[T]) -> T:
    """Awaits the work, and returns or raises what it does; DeadlineUnmet where the deadline passes
    before."""
    try:
        async with asyncio.timeout(left_s(call, began_s)) as bound:
            return await work
    except TimeoutError:
        if not bound.expired():
            raise
        raise DeadlineUnmet(call.model, call.deadline_s or 0.0, RETRY_AFTER_S) from None
