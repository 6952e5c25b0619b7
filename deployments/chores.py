"""Tasks that nobody waits for: kept while they run, and heard when they fail."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger("arbiter.residency")


class Chores:
    """The event loop holds a task only weakly, so somebody must hold it until it is done."""

    def __init__(self) -> None:
        self.running: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self.running.add(task)
        task.add_done_callback(self._ended)

    async def done(self) -> None:
        await asyncio.gather(*self.running, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.running.discard(task)
        if not task.cancelled() and (error := task.exception()):
            logger.error("a task nobody waits for failed", exc_info=error)
