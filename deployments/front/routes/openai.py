"""OpenAI's routes: models, and one route for each row of SCHEMAS and each path of the table."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractContextManager, aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from arbiter.core.types import Priority
from arbiter.protocol.ray_internals import own_node
from deployments.config.adapter_names import base_of
from deployments.config.task_section import PREFIX
from deployments.front.access.keys import Caller, Scope
from deployments.front.dependencies import FrontState, Inferrer, State
from deployments.front.inference.relay import WholeResponse, relay
from deployments.front.inference.request import parse
from deployments.front.inference.schemas import OF_THE_TABLE, SCHEMAS
from deployments.front.inference.service import AnyCall, Parts
from deployments.front.inference.tasks import task_of
from deployments.front.jobs.accepted import submit
from deployments.front.jobs.async_calls import prefers_async
from deployments.front.middleware.error_forms import form_of
from deployments.front.openapi import described, refusals
from deployments.front.sockets import side_stream
from deployments.front.status import model_cards
from deployments.messages import ACQUIRE, InferenceCall

router = APIRouter(prefix="/v1")


async def infer(request: Request, caller: Inferrer, front: State) -> Response:
    """Carries the request to the capability of its model and the response back, or makes a job of
    it. Raises RequestError."""
    with front.admitted(caller.tenant):
        raw = await request.body()
        call, priority = await call_for(request, caller, front, request.url.path, raw)
        if prefers_async(request.headers.getlist("prefer")) and request.url.path != ACQUIRE:
            return await submit(front, call, request.headers, raw, priority)
        if (
            isinstance(call, InferenceCall)
            and call.wants_progress
            and has_side_stream_reader(request)
        ):
            call = replace(call, reader_node=str(own_node()))
        parts = front.service.run(call)
        if request.url.path == ACQUIRE:
            parts = _within(front.acquirer(caller.tenant), parts)
        return await respond(front, call, parts, caller.tenant)


async def _within(bound: AbstractContextManager[None], parts: Parts) -> Parts:
    """The same parts, while the bound is entered. Raises what entering it raises, RequestError."""
    with bound:
        async with aclosing(parts):
            async for part in parts:
                yield part


async def respond(front: FrontState, call: AnyCall, parts: Parts, tenant: str) -> Response:
    """The HTTP response of a call, of which `parts` come. It counts as in flight until its client
    has it. Raises RequestError."""
    progress_s = front.table.front.progress_s
    name = call.served or call.model if isinstance(call, InferenceCall) else PREFIX + call.task
    response = await relay(parts, name, wants_progress=call.wants_progress, progress_s=progress_s)
    if isinstance(response, StreamingResponse):
        response.body_iterator = count_in_flight(front, tenant, response.body_iterator)
    elif isinstance(response, WholeResponse):
        response.sending = partial(front.counted, tenant)
    return response


def has_side_stream_reader(request: Request) -> bool:
    """Whether an event stream may go past the front, from the engine to the proxy: the proxy reads
    side streams on this node, and the path needs no form but OpenAI's."""
    is_near = side_stream.is_reader(request.headers.get(side_stream.READER))
    return is_near and form_of(request.url.path) is None


async def call_for(
    request: Request, caller: Caller, front: FrontState, path: str, raw: bytes
) -> tuple[AnyCall, Priority | None]:
    """The call that a body for `path` means, by a caller that may make it, and the priority it
    asks for. Raises RequestError."""
    service = front.service
    parsed = await parse(path, raw, request.headers, service.profiles)
    if parsed.priority is not None and parsed.priority < Priority.NORMAL:
        front.auth.require(request, Scope.PRIORITY)
    if (task := task_of(parsed.model)) is not None:
        return await front.tasks.call(task, parsed, caller), parsed.priority
    return await service.call(parsed, caller.tenant, caller.scopes), parsed.priority


async def count_in_flight(front: FrontState, tenant: str, body: Any) -> AsyncGenerator[Any, None]:
    """The same parts of a stream, which counts as in flight until its end."""
    with front.counted(tenant):
        async with aclosing(body):
            async for part in body:
                yield part


def post_routes(paths: tuple[str, ...]) -> list[tuple[str, dict[str, Any]]]:
    """Each path with the keyword arguments of its POST route: name, schemas of body and errors."""
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
    table, names = front.table, front.service.names
    known, visible = await asyncio.gather(
        model_cards.facts(table, table.homes), names.visible(caller.tenant)
    )
    cards = [_card(front, name, names.home(name), known[base_of(name)]) for name in visible]
    remotes = [_remote_card(front, name) for name in front.service.remotes.names(caller)]
    tasks = [_task_card(front, name, known) for name in sorted(front.table.tasks)]
    return {"object": "list", "data": cards + remotes + tasks}


@router.get("/models/{model:path}", responses=refusals(401, 403, 404))
async def model(model: str, caller: Inferrer, front: State) -> dict[str, Any]:
    """The card of one name: a model, an adapter, a task, or a model on another machine. Raises
    UnknownModel, AdapterAmbiguous, AdapterInvalid, AdaptersAway."""
    if (task := task_of(model)) is not None:
        front.tasks.find(task)
        return _task_card(front, task, await model_cards.facts(front.table, front.table.homes))
    if model in front.service.remotes.names(caller):
        return _remote_card(front, model)
    table = front.table
    target = await front.service.names.find(model, caller.tenant)
    known = await model_cards.facts(table, [target.model])
    return _card(front, target.served, target.capability, known[target.model])


def _remote_card(front: FrontState, name: str) -> dict[str, Any]:
    """Makes the card of a model on another machine, of which nothing is resident here."""
    remote, model = front.service.remotes.model(name)
    known = model_cards.remote_facts(model)
    created = front.started_unix_s
    return {"id": name, "object": "model", "created": created, "owned_by": remote} | known.plain


def _card(front: FrontState, name: str, owner: str, facts: model_cards.Facts) -> dict[str, Any]:
    """Makes the card of a model or adapter of `owner`, its capability: OpenAI's fields and ours."""
    created = front.started_unix_s
    return {"id": name, "object": "model", "created": created, "owned_by": owner} | facts.plain


def _task_card(
    front: FrontState, task: str, facts_by_model: Mapping[str, model_cards.Facts]
) -> dict[str, Any]:
    """Makes the card of a task: what the models of its ladder can do together, and where the
    readiest of them is."""
    rungs = [
        facts_by_model[n]
        for name in front.table.tasks[task].ladder
        if (n := base_of(name)) in facts_by_model
    ]
    fields = model_cards.together(rungs).plain if rungs else {}
    created = front.started_unix_s
    return {"id": PREFIX + task, "object": "model", "created": created, "owned_by": "task"} | fields
