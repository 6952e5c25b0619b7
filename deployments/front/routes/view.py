"""The view model over HTTP (K4): once, as a stream that all viewers share, and adapters by name."""

import json
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, StreamingResponse

from deployments.config.adapter_names import base_of, is_full
from deployments.front.dependencies import FrontState, SeenEvent, State, Viewer
from deployments.front.openapi import refusals
from deployments.front.routes.arbiter import EVENT_STREAM, viewed
from deployments.front.status.listed_tiers import in_order, tiers_of
from deployments.monitoring.view import Facts, to_plain

router = APIRouter(prefix="/arbiter/view", responses=refusals(401, 403))
MOST_FOUND = 200  # adapters in one answer: as many as a person reads


def facts_of(front: FrontState) -> Callable[[], Awaitable[Facts]]:
    """What the front knows of its table."""

    async def facts() -> Facts:
        names = await front.service.names.visible("")
        counts = Counter(base_of(name) for name in names if is_full(name))
        return Facts(front.table.homes, counts)

    return facts


@router.get("", responses=refusals(503))
async def view(front: State, _: Viewer) -> JSONResponse:
    """All rows of the console and of `arbiter top`, as of now."""
    return JSONResponse(to_plain(await front.viewing.read(facts_of(front))))


@router.get("/stream", response_class=StreamingResponse, responses=EVENT_STREAM | refusals(429))
async def stream(
    request: Request, front: State, caller: Viewer, seen: SeenEvent
) -> StreamingResponse:
    """The view as SSE: first all rows and events after `after`, then what changes. All streams
    share one subscription at the arbiter. `Last-Event-ID` resumes. Raises TenantLimitReached,
    QueueFull where too many read."""
    return viewed(request, front, caller, _sse(front, seen))


async def _sse(front: FrontState, after: int) -> AsyncGenerator[bytes, None]:
    async with aclosing(front.viewing.follow(facts_of(front), after)) as messages:  # type: ignore[type-var]
        async for message in messages:
            if not message:
                yield b": nothing happened\n\n"
                continue
            if events := message.get("events"):
                after = events[-1]["seq"]
            data = json.dumps(message, separators=(",", ":"))
            yield f"id: {after}\nevent: view\ndata: {data}\n\n".encode()


@router.get("/adapters")
async def adapters(
    front: State,
    caller: Viewer,
    search: Annotated[str, Query(max_length=256)] = "",
    model: Annotated[str, Query(max_length=256)] = "",
    most: Annotated[int, Query(ge=1, le=MOST_FOUND)] = 50,
) -> dict[str, Any]:
    """Adapters by full name whose name contains `search`, and how many do; of those in slots and of
    the first `most` the tiers, where they are known."""
    names = await front.service.names.visible(caller.tenant)
    words = search.casefold()
    rows = [
        name
        for name in names
        if is_full(name) and (not model or base_of(name) == model) and words in name.casefold()
    ]
    tiers = await tiers_of(front.service, front.viewing, rows, most, caller.tenant)
    shown = in_order(rows, tiers)[:most]
    known_tiers = {name: tiers[name] for name in shown if name in tiers}
    return {"count": len(rows), "adapters": shown, "tiers": known_tiers}
