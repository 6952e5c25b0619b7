"""POST /v1/prewarm: a client says that a chat is about to come (G1)."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from deployments.front.dependencies import Inferrer, State
from deployments.front.inference.relay import whole_response
from deployments.front.inference.schemas import SCHEMAS
from deployments.front.openapi import described
from deployments.front.routes.openai import call_for
from deployments.requests import prefixes

# A replica that runs answers within milliseconds. A client that opens a session does not wait for
# a replica that Serve has to start.
PATIENCE_S = 0.5

router = APIRouter()
_DESCRIBED: dict[str, Any] = described(SCHEMAS[prefixes.PATH])


@router.post(prefixes.PATH, status_code=202, **_DESCRIBED)
async def prewarm(request: Request, caller: Inferrer, front: State) -> Response:
    """Brings the model in with the least priority, where it is not resident, and has its engine
    compute the beginning of the chat while it has nothing else to do. Answers before either; the
    event `prewarm` tells how it went. Raises RequestError."""
    service = front.service
    with front.admitted(caller.tenant):
        raw = await request.body()
        call, _ = await call_for(request, caller, front, prefixes.PATH, raw)
        started = await service.begin(call, PATIENCE_S)
    if started is None:
        return JSONResponse(prefixes.accepted(call.request_id, call.served, "starting"), 202)
    return whole_response(started)
