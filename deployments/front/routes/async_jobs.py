"""Jobs of `Prefer: respond-async` (RFC 7240) and of background responses, by their tenant. No route
here loads a model or waits for one."""

from contextlib import AsyncExitStack
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from deployments.front.access.keys import Scope
from deployments.front.dependencies import Inferrer, State
from deployments.front.inference.relay import ClosingStream, after_first, event_stream
from deployments.front.jobs import async_calls
from deployments.front.openapi import refusals
from deployments.jobs.errors import Conflict
from deployments.jobs.store import Job

router = APIRouter(prefix="/v1/jobs", responses=refusals(400, 401, 403, 404, 503))


@router.get("")
async def jobs(
    caller: Inferrer,
    front: State,
    after: str = "",
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> dict[str, Any]:
    """The newest first, with stored responses."""
    page: list[Job] = await front.jobs.call("page", caller.tenant, None, after, limit + 1)
    rows = await async_calls.shown_all(page[:limit], front.table)
    return {"object": "list", "data": rows, "has_more": len(page) > limit}


@router.get("/{job_id}")
async def job(job_id: str, caller: Inferrer, front: State) -> dict[str, Any]:
    """How far it is. Raises NotFound."""
    job: Job = await front.jobs.call("get", caller.tenant, job_id)
    return await async_calls.shown(job, front.table)


@router.get("/{job_id}/result", response_class=Response, responses=refusals(409, 429))
async def result(job_id: str, caller: Inferrer, front: State) -> Response:
    """The answer of its call: status, content type and body as they would have been. Raises
    NotFound; Conflict while there is none; TenantLimitReached, QueueFull where too many read."""
    async with AsyncExitStack() as stack:
        stack.enter_context(front.reader(caller.tenant))
        job: Job = await front.jobs.call("get", caller.tenant, job_id)
        if job.status is None:
            raise Conflict("job", job_id, job.state, "read: it has no answer")
        pieces = await after_first(async_calls.result(front.jobs, caller.tenant, job_id))
        kind, reader = job.content_type, stack.pop_all()
        return ClosingStream(pieces, job.status, media_type=kind, holds=reader)


@router.get("/{job_id}/events", response_class=Response, responses=refusals(429))
async def events(
    job_id: str,
    request: Request,
    caller: Inferrer,
    front: State,
    after: Annotated[int, Query(ge=0)] = 0,
) -> Response:
    """The events of a call with `stream`, those above a number, until its end: tokens, or pictures
    as they form. Raises NotFound; TenantLimitReached, QueueFull where too many read."""
    async with AsyncExitStack() as stack:
        stack.enter_context(front.reader(caller.tenant))
        await front.jobs.call("get", caller.tenant, job_id)
        stream = async_calls.events(front.jobs, caller.tenant, job_id, after)
        return event_stream(stream, stack.pop_all(), front.key_check(request, Scope.INFER))


@router.post("/{job_id}/cancel")
async def cancel(job_id: str, caller: Inferrer, front: State) -> dict[str, Any]:
    """Ends its call, between two steps of the engine. Raises NotFound."""
    ended = await async_calls.cancelled(front.jobs, caller.tenant, job_id)
    return await async_calls.shown(ended, front.table)


@router.delete("/{job_id}", responses=refusals(409))
async def delete(job_id: str, caller: Inferrer, front: State) -> dict[str, Any]:
    """Cancels it where it is unfinished, and forgets it. Raises NotFound; Conflict while its call
    still ends."""
    await async_calls.cancelled(front.jobs, caller.tenant, job_id)
    await front.jobs.call("delete", caller.tenant, job_id)
    return {"id": job_id, "object": "job", "deleted": True}
