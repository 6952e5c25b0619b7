"""Ollama's routes: each asks for what an OpenAI route would, and says it in Ollama's words.

`keep_alive` is stay-warm: a wish for as long as the client is known to come back. Nothing here
takes a model from others, so it ends no model, and models come from the configuration alone.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from arbiter.core.types import Priority
from arbiter.errors import UnknownModel
from deployments import messages
from deployments.config.file_threads import in_thread
from deployments.config.schema import Table
from deployments.front.access.keys import Caller
from deployments.front.dependencies import FrontState, Inferrer, State
from deployments.front.inference.relay import ClosingStream, WholeResponse, whole_response
from deployments.front.inference.request import BadRequest
from deployments.front.inference.service import AnyCall, Parts
from deployments.front.inference.tasks import task_of
from deployments.front.jobs.accepted import submit
from deployments.front.jobs.async_calls import prefers_async
from deployments.front.ollama import bodies, catalogue
from deployments.front.ollama.answers import (
    Answer,
    ContentFields,
    embedded,
    in_chat,
    in_generate,
    now,
)
from deployments.front.openapi import refusals
from deployments.front.routes.json_route import JsonRoute
from deployments.front.routes.openai import call_for
from deployments.front.status import arbiter_gateway, model_cards
from deployments.front.status.model_cards import Facts
from deployments.remotes.offers import SERVED_BY

router = APIRouter(
    prefix="/api", route_class=JsonRoute, responses=refusals(400, 401, 403, 404, 410, 429, 503, 507)
)

CHAT, COMPLETION, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
# Of Ollama: whose forms these are. Clients ask for it to know which fields they may send.
VERSION = "0.12.0"
LINES = "application/x-ndjson"
_OTHERS = "models come from the configuration, and `arbiter unload` ends one"


@router.get("/version", responses={})
async def version() -> dict[str, str]:
    return {"version": VERSION}


@router.get("/tags")
async def tags(caller: Inferrer, front: State) -> dict[str, Any]:
    """Models, adapters and models on other machines that this caller may name."""
    table, started_unix_s = front.table, front.started_unix_s
    names, (known, sizes) = await asyncio.gather(
        front.service.names.visible(caller.tenant), _known(table, table.homes)
    )
    rows = await in_thread("tags", catalogue.tags, table, names, known, sizes, started_unix_s)
    remotes = front.service.remotes
    away = [
        catalogue.remote_tag(name, *remotes.model(name), started_unix_s)
        for name in remotes.names(caller)
    ]
    return {"models": rows + away}


@router.get("/ps")
async def ps(caller: Inferrer, front: State) -> dict[str, Any]:
    """Models that are loaded, with the bytes that the node agent measured."""
    table, state = front.table, (await arbiter_gateway.state()).plain
    models = {ticket["model"] for ticket in catalogue.loaded(table, state)}
    contexts = await model_cards.contexts(table, models)
    return {"models": catalogue.rows(table, state, contexts)}


@router.post("/show")
async def show(body: bodies.Show, caller: Inferrer, front: State) -> dict[str, Any]:
    """The card of one name, as Ollama has it. Raises UnknownModel, AdapterAmbiguous,
    AdapterInvalid."""
    name = await _name(front, body.model, caller)
    if name in front.service.remotes.names(caller):
        return catalogue.remote_card(*front.service.remotes.model(name), front.started_unix_s)
    table = front.table
    target = await front.service.names.find(name, caller.tenant)
    known, sizes = await _known(table, [target.model])
    at = target.model
    return catalogue.card(table, target, known[at], sizes[at], front.started_unix_s)


@router.post("/chat")
async def chat(body: bodies.Chat, request: Request, caller: Inferrer, front: State) -> Response:
    if not body.messages:
        return await _loaded(body, in_chat, request, caller, front)
    return await _generated(CHAT, body, in_chat, request, caller, front)


@router.post("/generate")
async def generate(
    body: bodies.Generate, request: Request, caller: Inferrer, front: State
) -> Response:
    if not body.prompt and not body.images:
        return await _loaded(body, in_generate, request, caller, front)
    path = COMPLETION if body.raw else CHAT
    return await _generated(path, body, in_generate, request, caller, front)


@router.post("/embed")
async def embed(body: bodies.Embed, request: Request, caller: Inferrer, front: State) -> Response:
    if _is_later(request):
        return await _accepted(EMBEDDINGS, body.openai(), request, caller, front)
    began_ns = time.monotonic_ns()
    async with aclosing(_run(EMBEDDINGS, body.openai(), request, caller, front)) as parts:
        first = await anext(parts)
        assert isinstance(first, messages.FullResponse), "vectors come whole"
    if first.head.status != 200:
        return whole_response(first)
    reply = embedded(
        _named(body.model, first.head), json.loads(first.body), first.head.headers, began_ns
    )
    return _whole(reply, front, caller)


@router.post("/pull", responses=refusals(501))
@router.post("/push", responses=refusals(501))
@router.post("/create", responses=refusals(501))
@router.post("/copy", responses=refusals(501))
@router.delete("/delete", responses=refusals(501))
async def steer(request: Request, caller: Inferrer) -> Response:
    """What Ollama's users do to its models."""
    raise BadRequest(f"{request.url.path} is not served: {_OTHERS}", None, 501)


async def _known(
    table: Table, models: Iterable[str]
) -> tuple[dict[str, Facts], dict[str, int | None]]:
    """Facts and bytes of weights of these models; a file server that hangs is not waited for."""
    models = tuple(models)
    return await asyncio.gather(
        model_cards.facts(table, models),
        model_cards.from_files(table, models, catalogue.weights_bytes),
    )


async def _generated(
    path: str,
    body: bodies.Chat | bodies.Generate,
    content_fields: ContentFields,
    request: Request,
    caller: Caller,
    front: FrontState,
) -> Response:
    if _is_later(request):
        return await _accepted(path, body.openai(), request, caller, front)
    began_ns = time.monotonic_ns()
    parts = _run(path, body.openai(), request, caller, front)
    first = await anext(parts)
    if isinstance(first, messages.FullResponse):
        await parts.aclose()
        if first.head.status != 200:
            return whole_response(first)
        answer = Answer(
            _named(body.model, first.head), content_fields, first.head.headers, began_ns
        )
        return _whole(answer.whole(json.loads(first.body)), front, caller)
    assert isinstance(first, messages.ResponseHead), "no progress here"
    answer = Answer(_named(body.model, first), content_fields, first.headers, began_ns)
    return ClosingStream(answer.streamed(_bytes(parts)), media_type=LINES, holds=parts)


def _is_later(request: Request) -> bool:
    return prefers_async(request.headers.getlist("prefer"))


async def _accepted(
    path: str, fields: dict[str, Any], request: Request, caller: Caller, front: FrontState
) -> Response:
    """202 with a job. Its result is OpenAI's, and whole, because Ollama's lines are a stream of one
    connection. Raises RequestError."""
    fields = {name: value for name, value in fields.items() if not name.startswith("stream")}
    with front.admitted(caller.tenant):
        call, priority, raw = await _call(path, fields, request, caller, front)
        return await submit(front, call, request.headers, raw, priority)


async def _call(
    path: str, fields: dict[str, Any], request: Request, caller: Caller, front: FrontState
) -> tuple[AnyCall, Priority | None, bytes]:
    """The call that an OpenAI body means, the priority it asks for, and the body. Raises
    RequestError."""
    raw = json.dumps(fields | {"model": await _name(front, fields["model"], caller)}).encode()
    return *(await call_for(request, caller, front, path, raw)), raw


def _whole(reply: dict[str, Any], front: FrontState, caller: Caller) -> WholeResponse:
    """A response of one piece, in flight until its client has it. Half of a surrogate pair, which a
    remote may write, is escaped in it as it was there."""
    response = WholeResponse(json.dumps(reply), media_type="application/json")
    response.sending = partial(front.counted, caller.tenant)
    return response


async def _loaded(
    body: bodies.Chat | bodies.Generate,
    content_fields: ContentFields,
    request: Request,
    caller: Caller,
    front: FrontState,
) -> Response:
    """A call without a question: it loads the model, by the shortest answer there is."""
    if body.keep_alive == 0:
        raise BadRequest(f"`keep_alive` 0 ends no model here: {_OTHERS}", "keep_alive", 501)
    fields = body.common() | {"prompt": " ", "max_tokens": 1}
    async with aclosing(_run(COMPLETION, fields, request, caller, front)) as parts:
        first = await anext(parts)
    assert isinstance(first, messages.FullResponse), "one token comes whole"
    if first.head.status != 200:
        return whole_response(first)
    head = {"model": body.model, "created_at": now(), "done": True, "done_reason": "load"}
    return JSONResponse(head | content_fields("", "", []))


async def _run(
    path: str, fields: dict[str, Any], request: Request, caller: Caller, front: FrontState
) -> Parts:
    """The response to an OpenAI body: no progress, because Ollama's lines have no comments; whole
    where it is no event stream, also where its engine declares no length. Raises RequestError."""
    with front.admitted(caller.tenant):
        call, _, _ = await _call(path, fields, request, caller, front)
        parts = front.service.run(replace(call, wants_progress=False))
        async with aclosing(parts):
            first = await anext(parts)
            if isinstance(first, messages.ResponseHead) and not first.is_event_stream:
                first = messages.FullResponse(
                    first, b"".join([part async for part in _bytes(parts)])
                )
            yield first
            async for part in parts:
                yield part


async def _name(front: FrontState, name: str, caller: Caller) -> str:
    """Ollama's clients add `:latest` to a name without a tag."""
    plain, service = name.removesuffix(":latest"), front.service
    is_alias = any(plain in profile.aliases for profile in service.profiles.values())
    if is_alias or service.remotes.has(plain):
        return plain
    try:
        if (task := task_of(plain)) is not None:
            front.tasks.find(task)
            return plain
        await service.names.find(plain, caller.tenant)
    except UnknownModel:
        return name
    return plain


def _named(name: str, head: messages.ResponseHead) -> str:
    """The model that an answer names: as asked, and of a task the rung."""
    return head.headers.get(SERVED_BY, name)


async def _bytes(parts: Parts) -> AsyncIterator[bytes]:
    async for part in parts:
        assert isinstance(part, bytes), "one head, then bytes"
        yield part
