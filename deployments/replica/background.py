"""Tasks that no caller awaits: kept while they run, and logged when they fail."""

import asyncio
import contextvars
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
logger = logging.getLogger("arbiter.residency")


def detached_task(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Starts a task with a context of its own. Ray cancels everything that was begun in the context
    of a cancelled request, and other requests may wait for this work too."""
    return asyncio.create_task(work, context=contextvars.Context())


def log_failure(task: asyncio.Task[None]) -> None:
    """Logs the error that ended it, which is a bug and would be lost otherwise."""
    if not task.cancelled() and (error := task.exception()):
        logger.error("a background task failed", exc_info=error)


class BackgroundTasks:
    """Holds tasks until they are done, because the event loop refers to them only weakly."""

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
