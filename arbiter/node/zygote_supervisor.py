"""Keeps the node's zygote alive: finds it, starts the next, tells why none will start."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from arbiter.node import children, procfs, zygote_client
from arbiter.protocol.messages import AgentSettings

logger = logging.getLogger("arbiter.agent")

TURN_S = 1.0  # between pings; a death is seen at once, by pidfd
BACKOFF_FIRST_S, BACKOFF_MOST_S = 0.1, 5.0  # between starts of a zygote that will not stay up
RETRY_S = 0.02  # between tries to reach a zygote that starts; its imports take seconds
PINGS_MISSED = 3  # a zygote that answers none of these is hung, which half a minute tells
STARTS_FAILED = 3  # in a row: not a machine short of memory for a moment, but a broken import


class ZygoteSupervisor:
    """Keeps one zygote running. Calls `on_found` for each zygote that answers, before it counts as
    up, and `kill_orphans` before each start, because a dead zygote may have left processes."""

    def __init__(
        self,
        settings: AgentSettings,
        socket: Path,
        log: Path,
        on_found: Callable[[], Awaitable[None]],
        kill_orphans: Callable[[], None],
    ) -> None:
        self.zygote = zygote_client.Zygote(socket)
        self.process: procfs.Name | None = None  # of the running zygote
        self._starting: procfs.Name | None = None  # it has not answered yet
        self.is_up = False
        self.trouble: str | None = None  # why the last starts failed
        self.news = asyncio.Event()  # set, and replaced, when any of this changes
        self._settings, self._socket, self._log = settings, socket, log
        self._on_found, self._kill_orphans = on_found, kill_orphans

    def announce(self) -> None:
        """Wakes every task that waits for news of the zygote."""
        self.news.set()
        self.news = asyncio.Event()

    @property
    def pids(self) -> set[int]:
        """Returns the zygote's pids, also while it starts."""
        return {name[0] for name in (self.process, self._starting) if name}

    def is_alive(self) -> bool:
        """Says whether the zygote lives, as the kernel has it now."""
        return self.process is not None and children.lives(*self.process)

    async def keep(self) -> None:
        """Replaces a zygote that died or hangs, for ever."""
        backoff_s, failed_count = BACKOFF_FIRST_S, 0
        while True:
            try:
                await self._find_or_start()
                backoff_s, failed_count = BACKOFF_FIRST_S, 0
                await self._stays_up()
            except (zygote_client.ZygoteError, OSError) as error:
                failed_count += 1
                if failed_count >= STARTS_FAILED:
                    self.trouble = f"does not start: {_message_of(error)}"
                logger.warning("%s; next try in %.1f s", error, backoff_s)
            self.is_up = False
            self.announce()
            self.end()
            await asyncio.sleep(backoff_s)
            backoff_s = min(BACKOFF_MOST_S, 2 * backoff_s)

    def end(self) -> None:
        """Kills the zygote, if it still runs or starts."""
        self.zygote.close()
        children.kill_known([name for name in (self.process, self._starting) if name])
        self.process = self._starting = None

    async def _find_or_start(self) -> None:
        try:
            pid = await self.zygote.ping(zygote_client.IMPORTS_S)  # found while it still imports
        except zygote_client.ZygoteError:
            self._kill_orphans()
            wrote_bytes = self._log.stat().st_size if self._log.exists() else 0
            started = await asyncio.to_thread(
                zygote_client.start, self._settings, self._socket, self._log
            )
            pid = await self._first_ping(started, wrote_bytes)
        process = procfs.process(pid)
        self.process, self._starting = (pid, process.start_ticks) if process else None, None
        await self._on_found()
        self.is_up, self.trouble = True, None
        self.announce()

    async def _first_ping(self, started: int, wrote_bytes: int) -> int:
        """Waits for the zygote's first answer: it binds its socket before its imports and answers
        after them. Raises ZygoteError with its last words when it is dead instead."""
        process = procfs.process(started)
        self._starting = (started, process.start_ticks) if process else None
        async with asyncio.timeout(zygote_client.IMPORTS_S):
            while process is not None and children.lives(started, process.start_ticks):
                try:
                    return await self.zygote.ping(zygote_client.IMPORTS_S)
                except zygote_client.ZygoteError:
                    await asyncio.sleep(RETRY_S)
        raise zygote_client.ZygoteError(
            f"died at its start: {zygote_client.tail(self._log, wrote_bytes)}"
        )

    async def _stays_up(self) -> None:
        """Returns when the zygote is dead or hung."""
        if self.process is None:
            return
        died = asyncio.Event()
        fd = os.pidfd_open(self.process[0])
        loop = asyncio.get_running_loop()
        loop.add_reader(fd, died.set)
        try:
            missed = 0
            while missed < PINGS_MISSED and not died.is_set():
                try:
                    async with asyncio.timeout(TURN_S):
                        await died.wait()
                except TimeoutError:
                    missed = 0 if await self._answers() else missed + 1
        finally:
            loop.remove_reader(fd)
            os.close(fd)

    async def _answers(self) -> bool:
        try:
            await self.zygote.ping(zygote_client.ANSWER_S)
        except zygote_client.ZygoteError:
            return False
        return True


def _message_of(error: Exception) -> str:
    return error.message if isinstance(error, zygote_client.ZygoteError) else repr(error)
