"""How a resident model stops serving: its requests end, and it sleeps or goes (A9)."""

import asyncio
import logging

from arbiter.client.holder import HolderClient
from arbiter.core import events as ev
from arbiter.errors import EngineLost
from arbiter.units import Span, in_seconds
from deployments.replica.engine_client import LoadRefused
from deployments.replica.held_model import HeldModel, HolderState

logger = logging.getLogger("arbiter.residency")

UNLOAD_S = 30.0  # the core's term for an unload; an engine that sleeps slower is ended


async def emptied(slot: HeldModel, within: Span) -> bool:
    """The barrier is up: new requests wait for what comes of it. False: those in flight did not end
    in time."""
    try:
        async with asyncio.timeout(in_seconds(within)):
            while slot.inflight:
                slot.emptied.clear()
                await slot.emptied.wait()
    except TimeoutError:
        return not slot.inflight
    return True


def drop_barrier(slot: HeldModel, client: HolderClient) -> None:
    """It was not idle in time, and serves on."""
    slot.life = HolderState.RESIDENT
    client.tell(ev.BarrierDropped(slot.ticket, slot.inflight))
    slot.admit()


async def fell_asleep(slot: HeldModel) -> bool:
    assert slot.link is not None
    try:
        async with asyncio.timeout(UNLOAD_S):
            await slot.link.sleep()
    except (TimeoutError, LoadRefused, EngineLost) as error:
        logger.warning("%s did not fall asleep and goes: %r", slot.ticket, error)
        return False
    return True
