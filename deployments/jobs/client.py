"""JobsClient: a front's way to the one `jobs` replica."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

from grpc.aio import AioRpcError
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
)

from arbiter.errors import RequestError, error_fields
from arbiter.protocol.ray_internals import raised_there
from deployments.jobs.errors import Superseded
from deployments.replica.background import BackgroundTasks

WITHIN_S = 30.0  # a replica starts in 1-3 s, on a machine busy with imports in ten
AGAIN_S = 0.2
WAKE_AGAIN_S = 60.0  # the replica stays for 300 s after a call

# The replica died under the call, or there is none yet and no application.
_DIED = (RayActorError, AioRpcError, DeploymentUnavailableError, RayServeException, KeyError)
Send = Callable[..., Awaitable[Any]]  # of a method's name and its arguments


@error_fields
class JobsAway(RequestError):
    """The process that keeps files, batches and jobs does not answer."""

    why: str
    status_code, code, retry_after_s = 503, "jobs_unavailable", 2.0

    def __str__(self) -> str:
        return (
            f"files, batches and jobs cannot be reached just now: {self.why}; send the request"
            f" again in {self.retry_after_s:.0f} s, or see `serve status`"
        )


class JobsClient:
    """Sends a call again when the replica died meanwhile: every method may be repeated."""

    def __init__(self, send: Send | None = None, within_s: float = WITHIN_S) -> None:
        self._send, self._within_s = send or by_handle, within_s
        self._background, self._heard_at = BackgroundTasks(), float("-inf")

    def wake(self) -> None:
        """Has the replica started, where it may not run, by a caller that needs it soon."""
        if time.monotonic() - self._heard_at > WAKE_AGAIN_S:
            self._heard_at = time.monotonic()
            self.begin("page", "", None, "", 1)

    def begin(self, method: str, *args: Any) -> None:
        """Makes a call whose answer no caller awaits, not even its refusal."""
        self._background.begin(self._call_unheeded(method, *args))

    async def _call_unheeded(self, method: str, *args: Any) -> None:
        with contextlib.suppress(RequestError):
            await self.call(method, *args)

    async def call(self, method: str, *args: Any) -> Any:
        """Raises the RequestError that the service raised; JobsAway."""
        why = "it does not start"
        try:
            async with asyncio.timeout(self._within_s):
                while True:
                    try:
                        answer = await self._send(method, *args)
                        self._heard_at = time.monotonic()
                        return answer
                    except (Superseded, *_DIED) as error:
                        why = f"{type(error).__name__}: {error}"
                    await asyncio.sleep(AGAIN_S)
        except (TimeoutError, BackPressureError) as error:
            raise JobsAway(f"not within {self._within_s:.0f} s: {why}") from error


async def by_handle(method: str, *args: Any) -> Any:
    """Raises what the replica raised, as itself."""
    handle = serve.get_deployment_handle("jobs", app_name="jobs")
    try:
        return await handle.answer.remote(method, *args)
    except RayTaskError as error:
        raise raised_there(error, RequestError) or error from None
