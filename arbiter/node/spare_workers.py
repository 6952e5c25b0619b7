"""Idle Ray workers at hand on this node, imports done, for the replicas that start next.

A replica that takes one is up in a tenth of a second, where the start of a process and its imports
take one or two. Ray starts a few with a node, gives each away once and makes no more by itself, so
we ask for the next. A spare belongs to no job and counts for nothing on the books.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable

from arbiter.node import procfs
from arbiter.protocol import ray_internals

logger = logging.getLogger("arbiter.agent")

# Between two looks. A spare is requested at the second look in a row that finds too few: the
# replica that took the last one has had its first token by then, and does not share two cores with
# the start of the next.
LOOK_S = 5.0
# Ray ends idle workers beyond one for each core after a second, but not these before this time.
KEPT_S = 3_600
IDLE = b"ray::IDLE"


def unused() -> list[int]:
    """Pids of the workers of this node's raylet, our parent, that have never run anything: Ray
    names them so, and writes the job into a worker's output with its first task or actor."""
    raylet = os.getppid()
    siblings = (p.pid for p in procfs.processes().values() if p.parent == raylet and p.alive)
    return [pid for pid in siblings if _is_idle(pid) and _has_said_nothing(pid)]


def _is_idle(pid: int) -> bool:
    return procfs.command(pid).startswith(IDLE)


def _has_said_nothing(pid: int) -> bool:
    try:
        return os.stat(f"{procfs.PROC}/{pid}/fd/1").st_size == 0
    except (FileNotFoundError, ProcessLookupError):
        return False


async def keep(
    count: int,
    ask: Callable[[int], Awaitable[None]] = ray_internals.prestart_worker,
    found: Callable[[], list[int]] = unused,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """For ever: `ask` for another while `found` says fewer than `count`. If asking brings none the
    next time is twice as far, so that a sign that Ray has changed costs a worker now and then."""
    few_count = 0  # looks in a row
    while count:
        await pause(LOOK_S)
        few_count = few_count + 1 if len(await asyncio.to_thread(found)) < count else 0
        if few_count > 1 and few_count.bit_count() == 1:
            try:
                await ask(KEPT_S)
            except ConnectionError as error:
                logger.warning("Ray starts no spare worker: %s", error)
