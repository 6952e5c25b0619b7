"""Idle Ray workers at hand on this node, imports done, for the replicas that start next.

A replica that takes one is up in a tenth of a second, where the start of a process and its imports
take one or two. Ray starts a few with a node, gives each away once and makes no more by itself, so
we ask for the next. A spare belongs to no job and counts for nothing on the books.
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable

from arbiter.node import procfs
from arbiter.protocol import ray_internals

logger = logging.getLogger("arbiter.agent")

# Between two looks. A spare is requested at the second look in a row that finds too few: the
# replica that took the last one has had its first token by then, and does not share two cores with
# the start of the next.
LOOK_S = 5.0
# Between two looks for the first, and the most that a node's readiness waits for it: it takes two
# seconds, ten where the disk is cold and a machine is busy.
FIRST_LOOK_S, FIRST_S = 0.5, 60.0
RESTING_TICKS = 3  # from one look to the next: of 50; an idle worker takes none or one
# Ray ends idle workers beyond one for each core after a second, but not these before this time.
KEPT_S = 3_600
IDLE = b"ray::IDLE"
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def unused() -> list[int]:
    """Returns the pids of the workers of this node's raylet, our parent, that have never run
    anything: Ray names them so, and writes the job into a worker's output with its first task or
    actor."""
    raylet = os.getppid()
    siblings = (p.pid for p in procfs.processes().values() if p.parent == raylet and p.alive)
    return [pid for pid in siblings if _is_idle(pid) and _has_said_nothing(pid)]


def end_from_before(unix_s: float) -> None:
    """Ends unused workers that are older: the code that they imported has been replaced, and a
    replica that took such a worker could not join the arbiter. Ray starts others when it needs
    them."""
    for pid in unused():
        process = procfs.process(pid)
        if process is not None and _started_unix_s(process) < unix_s:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _started_unix_s(process: procfs.Process) -> float:
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - process.start_ticks / TICKS_A_SECOND
    return time.time() - age_s


def _is_idle(pid: int) -> bool:
    return procfs.command(pid).startswith(IDLE)


def busy_ticks(pid: int) -> int:
    """Returns the processor time that a process has had, in ticks; 0 where there is none."""
    process = procfs.process(pid)
    return process.busy_ticks if process is not None else 0


def _has_said_nothing(pid: int) -> bool:
    try:
        return os.stat(f"{procfs.PROC}/{pid}/fd/1").st_size == 0
    except (FileNotFoundError, ProcessLookupError):
        return False


class SpareWorkers:
    """Keeps a number of spares at hand."""

    def __init__(
        self,
        count: int,
        ask: Callable[[int], Awaitable[None]] = ray_internals.prestart_worker,
        find: Callable[[], list[int]] = unused,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        busy: Callable[[int], int] = busy_ticks,
    ) -> None:
        self._count, self._ask, self._find, self._pause = count, ask, find, pause
        self._busy = busy
        self.is_settled = not count  # the first were seen, or do not come

    async def keep(self) -> None:
        """Keeps the count of spare workers, for ever: asks for another while fewer are found. If
        asking brings none the next time is twice as far, so that a sign that Ray has changed costs
        a worker now and then."""
        if not self._count:
            return
        await self._begin()
        few_count = 0  # looks in a row
        while True:
            await self._pause(LOOK_S)
            few_count = 0 if await self._are_at_hand() else few_count + 1
            if few_count > 1 and few_count.bit_count() == 1:
                await self._ask_for_one()

    async def _begin(self) -> None:
        """Asks at once for those that Ray did not start with its node or has given away, because
        the node is ready only with them, and waits until their imports are done: Ray names a worker
        idle before it imports anything, and an importing process is busy."""
        before: dict[int, int] = {}
        for look in range(round(FIRST_S / FIRST_LOOK_S)):
            pids = await asyncio.to_thread(self._find)
            for _ in range(self._count - len(pids) if look == 0 else 0):
                await self._ask_for_one()
            busy = {pid: self._busy(pid) for pid in pids}
            rest = [p for p in busy if p in before and busy[p] - before[p] <= RESTING_TICKS]
            if len(rest) >= self._count:
                break
            before = busy
            await self._pause(FIRST_LOOK_S)
        self.is_settled = True

    async def _are_at_hand(self) -> bool:
        return len(await asyncio.to_thread(self._find)) >= self._count

    async def _ask_for_one(self) -> None:
        try:
            await self._ask(KEPT_S)
        except ConnectionError as error:
            logger.warning("Ray starts no spare worker: %s", error)
