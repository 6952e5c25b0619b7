"""The arbiter's state, explanations and events, read with the scope `view`."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header
from fastapi.responses import JSONResponse, StreamingResponse

from deployments.front import arbiter_gateway
from deployments.front.dependencies import Require, State, Viewer
from deployments.front.keys import Scope
from deployments.front.openapi import refusals
from deployments.front.relay import ClosingStream
from deployments.front.tasks import task_of

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
    responses=EVENT_STREAM | refusals(401, 403),
)
async def events(after: int = 0, last_event_id: Annotated[str, Header()] = "") -> StreamingResponse:
    """The event log as SSE, from sequence number `after` on; `Last-Event-ID` resumes."""
    number = arbiter_gateway.event_number(last_event_id, after)
    return ClosingStream(arbiter_gateway.event_stream(number), media_type="text/event-stream")
