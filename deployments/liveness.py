"""Whether an engine still answers (SPEC H9). One that is dead breaks its lifeline and is heard of
at once; one that hangs says nothing, so it is asked.
"""

import asyncio
import logging
from collections.abc import Callable

from arbiter.decisions import Reason
from arbiter.errors import EngineLost
from deployments import freshness
from deployments.chores import apart, heard
from deployments.engine_link import LoadRefused
from deployments.slot import Life, Slot

logger = logging.getLogger("arbiter.residency")

ASK_S = 5.0  # between two questions; one costs an engine less than a token
# An engine's loop computes nothing itself and stalls for far less than this on a machine where
# twenty processes want two cores.
HUNG_S = 60.0

Close = Callable[[Slot, Reason], None]


async def watch(slot: Slot, close: Close) -> None:
    """Until it does not answer, or says that it cannot. Then its ticket is given back, which has
    the node agent kill it, and who waits for an answer is told. Cancelled with its slot."""
    while True:
        await asyncio.sleep(ASK_S)
        link = slot.link
        if slot.life is not Life.RESIDENT or link is None:
            continue
        try:
            async with asyncio.timeout(HUNG_S):
                await link.health()
        except EngineLost:
            if slot.link is link:
                return  # the lifeline says so as well
        except (TimeoutError, LoadRefused) as error:
            if slot.link is link and slot.life in (Life.RESIDENT, Life.DRAINING):
                logger.warning("the engine of %s does not serve: %r", slot.ticket, error)
                return close(slot, Reason.LOST)


def begin(slot: Slot, outdated: Callable[[Slot], None], close: Close) -> asyncio.Task[None]:
    """Its files and its engine, for as long as the slot lives."""
    task = apart(_watch_all(slot, outdated, close))
    task.add_done_callback(heard)
    return task


async def _watch_all(slot: Slot, outdated: Callable[[Slot], None], close: Close) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(freshness.watch(slot, outdated, close))
        group.create_task(watch(slot, close))
