"""Applications: what Ray Serve says of the applications behind the front, for readiness (J9).

The arbiter knows only loads. A capability whose application cannot be built, or whose replicas fail
to start, never asks the arbiter for anything.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from deployments.config.file_threads import in_thread

logger = logging.getLogger("ray.serve")

FAILED = frozenset({ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY})
FRESH_S = 1.0  # Serve's controller compiles the status anew for each question
WAIT_S = 5.0  # a controller that restarts takes 1-2 s; a probe must not hang for longer
CAUSE_CHARS = 500  # of a message, from its end, where a traceback has its error

Overviews = dict[str, ApplicationStatusOverview]


def overviews() -> Overviews:
    """Blocks: asks Serve's controller."""
    applications: Overviews = serve.status().applications
    return applications


class Applications:
    """Asks at most once in FRESH_S seconds."""

    def __init__(self, ask: Callable[[], Overviews] = overviews) -> None:
        self._ask = ask
        self._asking = asyncio.Lock()
        self._seen: Overviews | None = None
        self._seen_s = float("-inf")

    async def failures(self, names: list[str]) -> dict[str, str]:
        """Name of each application that Serve reports as failed, or does not have, to the cause.
        Empty while Serve's controller does not answer."""
        async with self._asking:
            if time.monotonic() - self._seen_s > FRESH_S:
                self._seen = await self._fresh()
                self._seen_s = time.monotonic()
        if self._seen is None:
            return {}
        causes = {name: _cause(self._seen.get(name)) for name in names}
        return {name: cause for name, cause in causes.items() if cause}

    async def _fresh(self) -> Overviews | None:
        try:
            async with asyncio.timeout(WAIT_S):
                # In a thread of its own: the event loop has few, and a controller that hangs would
                # take one with each probe.
                return await in_thread("Serve's status", self._ask)
        except (OSError, RayError, RayServeException) as error:
            logger.warning("Serve's status is not known: %r", error)
            return None


def _cause(overview: ApplicationStatusOverview | None) -> str:
    """Says why an application does not run; empty where nothing failed."""
    if overview is None:
        return "Serve has no application of this name; `serve status` lists those it has"
    if overview.status not in FAILED:
        return ""
    messages = [overview.message, *(one.message for one in overview.deployments.values())]
    cause = next((text for text in messages if text), "no cause given")
    short = cause if len(cause) <= CAUSE_CHARS else f"...{cause[-CAUSE_CHARS:]}"
    return f"its Serve application is {overview.status.value}: {short}"
