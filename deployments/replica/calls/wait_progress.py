"""What a waiting request hears: how far its model is, as the holder knows by itself.

The arbiter is not asked. Its answers brought predictions when the ticket joined the queue and with
the grant; the position counts this holder's own queued models.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping

from deployments.messages import Progress
from deployments.replica.held_model import HeldModel, HolderState
from deployments.replica.use import Use

# Between two looks at the model. A look costs microseconds, and the front tells the client once a
# second.
LOOK_S = 0.25


def is_at_hand(models: Mapping[str, HeldModel], model: str) -> bool:
    """Whether a request for the model begins without waiting."""
    held = models.get(model)
    return held is not None and held.state is HolderState.RESIDENT


def progress_of(models: Mapping[str, HeldModel], model: str) -> Progress:
    """Returns how far the model is now."""
    held = models.get(model)
    if held is not None and held.state is HolderState.LOADING:
        return Progress("loading", 0, held.left_s)
    ahead = 0
    for name, other in models.items():  # in the order in which they were asked for
        if name == model:
            break
        ahead += other.state is HolderState.QUEUED
    return Progress("queued", ahead, held.left_s if held else None)


async def with_progress(
    use: Use, models: Mapping[str, HeldModel], model: str
) -> AsyncGenerator[Progress, None]:
    """Enters the use, and meanwhile yields how far the model is, each time that changes. Closing
    the generator gives up. Raises what entering raises."""
    arrival = asyncio.ensure_future(use.__aenter__())
    last: Progress | None = None
    has_entered = False
    try:
        while True:
            await asyncio.wait({arrival}, timeout=LOOK_S)
            if arrival.done():
                arrival.result()
                has_entered = True
                return
            now = progress_of(models, model)
            if last is None or _words(now) != _words(last):
                last = now
                yield now
    finally:
        if not has_entered:  # the caller does not know of the use, which may just have begun
            arrival.cancel()
            try:
                await asyncio.gather(arrival, return_exceptions=True)
            finally:  # also where this is cancelled again
                use.release(asyncio.CancelledError())


def _words(progress: Progress) -> tuple[str, int, bool]:
    """Returns what is worth telling again; an estimate that only grows shorter is not."""
    return progress.phase, progress.position, progress.estimate_s is None
