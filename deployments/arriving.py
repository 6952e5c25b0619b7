"""What a waiting request may hear: how far its model is, from what the holder knows by itself.

The arbiter is not asked: its grant brought a prediction, and the line is that of this holder.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping

from arbiter.units import in_seconds
from deployments.slot import Life, Slot
from deployments.use import Use
from deployments.wire import Progress

# Between two looks at the slot. A look costs microseconds, and the front tells the client once a
# second.
LOOK_S = 0.25


def is_at_hand(slots: Mapping[str, Slot], model: str) -> bool:
    """Entering will not wait."""
    slot = slots.get(model)
    return slot is not None and slot.life is Life.RESIDENT


def look(slots: Mapping[str, Slot], model: str) -> Progress:
    """How far `model` is now."""
    slot = slots.get(model)
    if slot is not None and slot.life is Life.LOADING:
        return Progress("loading", 0, _left_s(slot))
    ahead = 0
    for name, other in slots.items():  # in the order in which they were asked for
        if name == model:
            break
        ahead += other.life is Life.QUEUED
    return Progress("queued", ahead, None)


def _left_s(slot: Slot) -> float | None:
    """Of the load under way, as predicted with its grant; None when nothing was known of it."""
    if not slot.predicted:
        return None
    return max(0.0, in_seconds(slot.predicted) - (time.monotonic_ns() - slot.granted_ns) / 1e9)


async def arriving(
    use: Use, slots: Mapping[str, Slot], model: str
) -> AsyncGenerator[Progress, None]:
    """Enters the use; meanwhile says how far it is, when that changes. Ended early, it gives up.
    Raises what entering raises."""
    arrival = asyncio.ensure_future(use.__aenter__())
    said: Progress | None = None
    try:
        while True:
            await asyncio.wait({arrival}, timeout=LOOK_S)
            if arrival.done():
                arrival.result()
                return
            now = look(slots, model)
            if said is None or (now.phase, now.position) != (said.phase, said.position):
                said = now
                yield now
    finally:
        if not arrival.done():
            arrival.cancel()
            await asyncio.wait({arrival})
            use.release()
