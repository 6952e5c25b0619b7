"""OpenAI's routes: models, and one route for each row of SCHEMAS and each path of the table."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from arbiter.core.types import Priority
from deployments.front import model_cards
from deployments.front.dependencies import FrontState, Inferrer, State
from deployments.front.keys import Caller, Scope
from deployments.front.relay import relay
from deployments.front.request import parse
from deployments.front.schemas import OF_THE_TABLE, SCHEMAS, described, refusals
from deployments.messages import InferenceCall

router = APIRouter(prefix="/v1")


async def infer(request: Request, caller: Inferrer, front: State) -> Response:
    """Carries the request to the capability of its model and the response back. Raises
    RequestError."""
    service = front.service
    with service.admitted():
        raw = await request.body()
        call = await call_for(request, caller, front, request.url.path, raw)
        response = await relay(
            service.run(call),
            wants_progress=call.wants_progress,
            progress_s=service.table.front.progress_s,
        )
    if isinstance(response, StreamingResponse):
        response.body_iterator = _counted(front, response.body_iterator)
    return response


async def call_for(
    request: Request, caller: Caller, front: FrontState, path: str, raw: bytes
) -> InferenceCall:
    """The call that a body for `path` means, by a caller that may make it. Raises RequestError."""
    service = front.service
    asked = await parse(path, raw, request.headers, service.profiles)
    if asked.priority is not None and asked.priority < Priority.NORMAL:
        front.auth.require(request, Scope.PRIORITY)
    return service.call(asked, caller.tenant)


async def _counted(front: FrontState, body: Any) -> AsyncGenerator[Any, None]:
    """A stream is in flight until its end."""
    with front.service.counted():
        async with aclosing(body):
            async for part in body:
                yield part


def generating(paths: tuple[str, ...]) -> list[tuple[str, dict[str, Any]]]:
    """Each path with the arguments of its POST route."""
    return [
        (path, {"name": _name(path), **described(SCHEMAS.get(path, OF_THE_TABLE))})
        for path in paths
    ]


def _name(path: str) -> str:
    """`chat_completions` of `/v1/chat/completions`."""
    return path.removeprefix("/v1").strip("/").replace("/", "_").replace("-", "_")


@router.get("/models", responses=refusals(401, 403))
async def models(caller: Inferrer, front: State) -> dict[str, Any]:
    """Models, and the adapters that this caller may name: what each is good for, where it is and
    when it could answer."""
    names = front.service.names
    known = await model_cards.facts(front.table, front.table.homes)
    cards = [
        _card(front, name, names.home(name), known[names.base(name)])
        for name in names.visible(caller.tenant)
    ]
    return {"object": "list", "data": cards}


@router.get("/models/{model:path}", responses=refusals(401, 403, 404))
async def model(model: str, caller: Inferrer, front: State) -> dict[str, Any]:
    """Raises UnknownModel, AdapterAmbiguous, AdapterInvalid."""
    target = front.service.names.find(model, caller.tenant)
    known = await model_cards.facts(front.table, [target.model])
    return _card(front, target.served, target.capability, known[target.model])


def _card(front: FrontState, name: str, owner: str, known: model_cards.Facts) -> dict[str, Any]:
    """OpenAI's fields, and ours, which its clients keep."""
    created = front.started_unix_s
    return {"id": name, "object": "model", "created": created, "owned_by": owner} | known.plain
