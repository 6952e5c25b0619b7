"""Two replicas of one capability: who gets what, through Serve itself."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from ray import serve
from ray.serve.context import _get_serve_request_context, _serve_request_context

from deployments import messages
from deployments.app import ROUTER
from deployments.replica.capability import Capability
from deployments.routing.rank import OVERLOAD_COUNT
from tests.support.live_arbiter import LiveArbiter, capability, live_arbiter, model
from tests.support.waits import eventually

pytestmark = [pytest.mark.usefixtures("cluster", "serving"), pytest.mark.spec("G3")]
PATH = "/v1/chat/completions"
ROOM = OVERLOAD_COUNT + 2  # of one replica


@serve.deployment(
    name="chat",
    num_replicas=2,
    max_ongoing_requests=ROOM,
    ray_actor_options={"num_cpus": 0},
    graceful_shutdown_timeout_s=5,
    graceful_shutdown_wait_loop_s=0.05,
    request_router_config=ROUTER,
)
class Chat(Capability):
    """Says first which replica it is, before its model is there."""

    paths = frozenset({PATH})

    async def handle(self, call: messages.InferenceCall) -> AsyncIterator[messages.Part]:
        yield messages.ResponseHead(
            200, {"replica": serve.get_replica_context().replica_id.unique_id}
        )
        async for part in super().handle(call):
            yield part


@contextlib.asynccontextmanager
async def two() -> AsyncIterator[tuple[LiveArbiter, Any]]:
    async with live_arbiter(
        {"chat": capability(a=model(40, chunks=1000, chunk_seconds=0.05))}
    ) as d:
        app = Chat.bind("chat")
        handle = await asyncio.to_thread(serve.run, app, name="chat", route_prefix=None)
        try:
            yield d, handle.options(stream=True)
        finally:
            await asyncio.to_thread(serve.delete, "chat")


def call(conversation: str | None = None, body: bytes = b"{}") -> messages.InferenceCall:
    return messages.InferenceCall(PATH, body, {}, "req", "a", conversation_id=conversation)


async def begun(
    handle: Any, asked: messages.InferenceCall
) -> tuple[str, AsyncGenerator[Any, None]]:
    """The replica that answers, and the rest of its answer."""
    parts = handle.handle.remote(asked)
    return (await anext(parts)).headers["replica"], parts


async def replica_of(handle: Any, asked: messages.InferenceCall) -> str:
    replica, parts = await begun(handle, asked)
    async for _ in parts:
        continue
    return replica


async def test_concurrent_requests_load_a_model_once_and_a_conversation_keeps_its_replica() -> None:
    async with two() as (d, handle):
        async with asyncio.timeout(60):
            requests = (replica_of(handle, call()) for _ in range(OVERLOAD_COUNT))
            [first] = set(await asyncio.gather(*requests))
        assert len((await d.state())["tickets"]) == 1
        stream = b'{"stream": true}'
        held = [await begun(handle, call(body=stream))]
        while held[-1][0] == first:  # until it has no room, and a second copy is loaded
            assert len(held) <= ROOM
            held.append(await begun(handle, call("talk", stream)))
        other, answer = held[-1]
        assert len(held) > OVERLOAD_COUNT
        await anext(answer)  # it has its model
        for _, parts in held[1:]:
            parts.cancel()
        # Once the router has heard that both have the model, the idle one is preferred.
        await eventually(lambda: _goes_to(handle, call(), other))
        held[0][1].cancel()
        busy = [await begun(handle, call("talk", stream)) for _ in range(OVERLOAD_COUNT)]
        assert {name for name, _ in busy} == {other}  # though the first is idle
        await eventually(lambda: _goes_to(handle, call("talk"), first))  # too far behind now
        for _, parts in busy:
            parts.cancel()


async def _goes_to(handle: Any, asked: messages.InferenceCall, replica: str) -> bool:
    return await replica_of(handle, asked) == replica


async def test_concurrent_calls_of_one_request_are_all_sent() -> None:
    """Inside a replica they carry one id, and Serve's own index would know only one of them."""
    async with two() as (_, handle):
        await replica_of(handle, call())
        context = _get_serve_request_context()
        token = _serve_request_context.set(replace(context, _internal_request_id="one"))
        try:
            async with asyncio.timeout(20):
                asked = (replica_of(handle, call()) for _ in range(4))
                assert len(await asyncio.gather(*asked)) == 4
        finally:
            _serve_request_context.reset(token)
