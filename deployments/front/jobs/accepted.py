"""Queues a call as a job, and answers its client with 202."""

from collections.abc import Mapping

from fastapi.responses import JSONResponse, Response

from arbiter.core.types import Priority
from deployments.config.schema import Table
from deployments.front.dependencies import FrontState
from deployments.front.inference.service import AnyCall
from deployments.front.jobs import async_calls
from deployments.jobs.store import Job

POLL_AGAIN_S = 1  # of `Retry-After`: a poll costs milliseconds


async def submit(
    front: FrontState,
    call: AnyCall,
    headers: Mapping[str, str],
    raw: bytes,
    priority: Priority | None,
) -> Response:
    """Queues the call. Raises BadRequest, TenantLimitReached, StorageFull, JobsAway."""
    new = async_calls.new_job(await async_calls.for_later(call), headers, priority)
    job: Job = await front.jobs.call("create", new, raw)
    return await accepted(job, front.table)


async def accepted(job: Job, table: Table) -> Response:
    """202 with the job."""
    headers = {
        "location": f"/v1/jobs/{job.id}",
        "preference-applied": async_calls.RESPOND_ASYNC,
        "retry-after": str(POLL_AGAIN_S),
    }
    return JSONResponse(await async_calls.shown(job, table), 202, headers)
