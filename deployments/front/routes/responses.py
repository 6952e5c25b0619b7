"""OpenAI's responses: live, stored, continued, and in the background."""

from contextlib import AsyncExitStack
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from deployments.front.access.keys import Scope
from deployments.front.dependencies import Inferrer, State
from deployments.front.inference.relay import ClosingStream, after_first, closing_json, event_stream
from deployments.front.inference.request import BadRequest
from deployments.front.inference.schemas import SCHEMAS
from deployments.front.jobs import async_calls
from deployments.front.jobs.accepted import accepted
from deployments.front.jobs.stored_responses import COMPLETE, StoredResponses
from deployments.front.openapi import described, refusals
from deployments.front.routes.openai import call_for, respond
from deployments.jobs import responses

router = APIRouter()
ONE_RESPONSE = responses.PATH + "/{response_id}"
_REFUSALS = refusals(400, 401, 403, 404, 503)
_DESCRIBED: dict[str, Any] = described(SCHEMAS[responses.PATH])


@router.post(responses.PATH, **_DESCRIBED)
async def create(request: Request, caller: Inferrer, front: State) -> Response:
    """Answers now, or in the background where the body or `Prefer: respond-async` says so; kept
    unless `store` is false. Raises RequestError."""
    service, stored = front.service, StoredResponses(front.jobs, caller.tenant)
    is_async = async_calls.prefers_async(request.headers.getlist("prefer"))
    with front.admitted(caller.tenant):
        raw = await request.body()
        prepared = await stored.prepare(raw, front.table.jobs.stores_responses, is_async=is_async)
        call, priority = await call_for(request, caller, front, responses.PATH, prepared.body)
        if not prepared.is_background:
            return await respond(
                front, call, stored.live(prepared, call, service.run(call)), caller.tenant
            )
        async with AsyncExitStack() as stack:
            if prepared.checked.stream and not is_async:
                stack.enter_context(front.reader(caller.tenant))
            job = await stored.begin(prepared, call, request.headers, priority)
            reader = stack.pop_all()
        if is_async:
            return await accepted(job, front.table)
        if prepared.checked.stream:
            check = front.key_check(request, Scope.INFER)
            return event_stream(stored.stream(job, None), reader, check)
        return JSONResponse(await stored.shown(job))


@router.get(ONE_RESPONSE, responses=_REFUSALS | refusals(429))
async def retrieve(
    response_id: str,
    request: Request,
    caller: Inferrer,
    front: State,
    stream: bool = False,
    starting_after: Annotated[int | None, Query(ge=0)] = None,
) -> Response:
    """A stored response as it is now, or its events above a number. Raises NotFound;
    TenantLimitReached, QueueFull where too many read."""
    stored = StoredResponses(front.jobs, caller.tenant)
    async with AsyncExitStack() as stack:
        stack.enter_context(front.reader(caller.tenant))
        job = await stored.job(response_id)
        if not stream and job.status == COMPLETE:  # in pieces, because it may be large
            pieces = await after_first(stored.answer(job))
            return ClosingStream(pieces, media_type="application/json", holds=stack.pop_all())
        if not stream:
            return closing_json(await stored.shown(job), stack.pop_all())
        if not (job.meta["background"] and job.meta["stream"]):
            text = "only a response that was made with `background` and `stream` has a stream"
            raise BadRequest(text, "stream")
        check = front.key_check(request, Scope.INFER)
        return event_stream(stored.stream(job, starting_after), stack.pop_all(), check)


@router.delete(ONE_RESPONSE, responses=_REFUSALS | refusals(409))
async def delete(response_id: str, caller: Inferrer, front: State) -> dict[str, Any]:
    """Forgets it. Raises NotFound; Conflict where it is unfinished."""
    await StoredResponses(front.jobs, caller.tenant).delete(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.post(ONE_RESPONSE + "/cancel", responses=_REFUSALS | refusals(429))
async def cancel(response_id: str, caller: Inferrer, front: State) -> dict[str, Any]:
    """Ends the work of a background response. Raises NotFound; QueueFull."""
    with front.admitted(caller.tenant):  # it is shown with what was asked
        return await StoredResponses(front.jobs, caller.tenant).cancel(response_id)


@router.get(ONE_RESPONSE + "/input_items", responses=_REFUSALS | refusals(429))
async def input_items(
    response_id: str,
    caller: Inferrer,
    front: State,
    after: str = "",
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """What was put in, with the turns that it continues. Raises NotFound;
    TenantLimitReached, QueueFull where too many read."""
    stored = StoredResponses(front.jobs, caller.tenant)
    async with AsyncExitStack() as stack:
        stack.enter_context(front.reader(caller.tenant))
        job = await stored.job(response_id)
        items = responses.input_items(job.id, await stored.request(job.id))
        items = items if order == "asc" else items[::-1]
        ids = [item["id"] for item in items]
        if after and after not in ids:
            raise BadRequest(f"`after`: no item {after!r}", "after")
        start = ids.index(after) + 1 if after else 0
        page = items[start : start + limit]
        listed = {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": start + limit < len(items),
        }
        return closing_json(listed, stack.pop_all())
