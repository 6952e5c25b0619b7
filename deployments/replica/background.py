"""Tasks that nobody waits for: kept while they run, and heard when they fail."""

import asyncio
import contextvars
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger("arbiter.residency")


def detached_task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task with a context of its own: Ray cancels whatever was called in the context of a request
    that is cancelled, and work that others wait for is not only of the request that began it."""
    return asyncio.create_task(work, context=contextvars.Context())


def log_failure(task: asyncio.Task[None]) -> None:
    """Its end: what failed is a bug, which nobody else would hear of."""
    if not task.cancelled() and (error := task.exception()):
        logger.error("a task nobody waits for failed", exc_info=error)


class BackgroundTasks:
    """The event loop holds a task only weakly, so somebody must hold it until it is done."""

    def __init__(self) -> None:
        self.running: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = detached_task(work)
        self.running.add(task)
        task.add_done_callback(self._ended)

    async def done(self) -> None:
        await asyncio.gather(*self.running, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.running.discard(task)
        log_failure(task)
