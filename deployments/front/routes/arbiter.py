"""The arbiter's state, explanations and events, read with the scope `view`."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, StreamingResponse

from deployments.front.access.auth import Denied
from deployments.front.access.keys import Caller, Scope
from deployments.front.dependencies import (
    VIEWERS_MOST,
    FrontState,
    Require,
    SeenEvent,
    State,
    Viewer,
)
from deployments.front.inference.relay import SSE, ClosingStream, while_allowed
from deployments.front.inference.tasks import task_of
from deployments.front.openapi import refusals
from deployments.front.status import arbiter_gateway

router = APIRouter(prefix="/arbiter", dependencies=[Depends(Require(Scope.VIEW))])
EVENT_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}
}


@router.get("/state", responses=refusals(401, 403, 503))
async def state() -> JSONResponse:
    """Devices, tickets, leases, queue, floors, cool-downs and the table."""
    return JSONResponse((await arbiter_gateway.state()).plain)


@router.get("/explain/{ticket}", responses=refusals(401, 403, 404, 503))
async def explain(ticket: str, front: State, caller: Viewer) -> JSONResponse:
    """Why this ticket waits, or why it was evicted, with the numbers. Of `task:NAME`: in which
    order its models would be asked now, and why."""
    if (task := task_of(ticket)) is not None:
        return JSONResponse(await front.tasks.explain(task, caller))
    return JSONResponse(await arbiter_gateway.explain(ticket))


@router.get("/events/recent", responses=refusals(401, 403, 503))
async def recent_events(after: int = 0) -> JSONResponse:
    """The event log from sequence number `after` on, as far as the ring keeps it."""
    return JSONResponse({"events": await arbiter_gateway.recent_events(after)})


@router.get(
    "/events",
    response_class=StreamingResponse,
    responses=EVENT_STREAM | refusals(401, 403, 429),
)
async def events(
    request: Request, front: State, caller: Viewer, seen: SeenEvent
) -> StreamingResponse:
    """The event log as SSE, from sequence number `after` on; `Last-Event-ID` resumes. Raises
    TenantLimitReached, QueueFull where too many read."""
    return viewed(request, front, caller, arbiter_gateway.event_stream(seen))


def viewed(
    request: Request, front: FrontState, caller: Caller, pieces: AsyncGenerator[bytes, None]
) -> ClosingStream:
    """A stream of what the arbiter does, until its key does not count any more: the client, which
    comes again, is told so then. Raises TenantLimitReached, QueueFull beyond VIEWERS_MOST."""
    place = AsyncExitStack()
    place.enter_context(front.viewers.one(caller.tenant, VIEWERS_MOST))
    return ClosingStream(_while_viewer(request, front, pieces), media_type=SSE, holds=place)


async def _while_viewer(
    request: Request, front: FrontState, pieces: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    with suppress(Denied):
        async with aclosing(while_allowed(pieces, front.key_check(request, Scope.VIEW))) as seen:
            async for piece in seen:
                yield piece
