"""Two replicas of one capability: who gets what, through Serve itself."""

import asyncio
import contextlib
import itertools
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.context import _get_serve_request_context, _serve_request_context

from arbiter.errors import DeadlineUnmet
from deployments import messages
from deployments.app import ROUTING
from deployments.front.inference.model_names import ModelNames
from deployments.front.inference.request import inference_call, parse
from deployments.front.inference.service import answer
from deployments.replica.capability import Capability
from deployments.routing.pieces import PIECE_CHARACTERS, split
from deployments.routing.rank import OVERLOAD_COUNT
from tests.support.live_arbiter import LiveArbiter, capability, live_arbiter, model
from tests.support.waits import eventually

pytestmark = [pytest.mark.usefixtures("cluster", "serving"), pytest.mark.spec("G2", "G3")]
PATH = "/v1/chat/completions"
ROOM = OVERLOAD_COUNT + 2  # of one replica
PATIENT = {"request_router_class": "tests.support.patient_router:PatientRouter"}


@serve.deployment(
    name="chat",
    num_replicas=2,
    max_ongoing_requests=ROOM,
    ray_actor_options={"num_cpus": 0},
    graceful_shutdown_timeout_s=5,
    graceful_shutdown_wait_loop_s=0.05,
    request_router_config=RequestRouterConfig(**ROUTING | PATIENT),
)
class Chat(Capability):
    """Says first which replica it is, before its model is there, and what deadline it was given."""

    paths = frozenset({PATH})

    async def handle(self, call: messages.InferenceCall) -> AsyncIterator[messages.Part]:
        replica = serve.get_replica_context().replica_id.unique_id
        yield messages.ResponseHead(200, {"replica": replica, "deadline": str(call.deadline_s)})
        async for part in super().handle(call):
            yield part

    async def whoami(self) -> str:
        return str(serve.get_replica_context().replica_id.unique_id)


@contextlib.asynccontextmanager
async def two(**engine_args: Any) -> AsyncIterator[tuple[LiveArbiter, Any]]:
    async with live_arbiter(
        {"chat": capability(a=model(40, chunks=10_000, chunk_seconds=0.05, **engine_args))}
    ) as d:
        app = Chat.bind("chat")
        handle = await asyncio.to_thread(serve.run, app, name="chat", route_prefix=None)
        names: set[str] = set()

        async def both_answer() -> bool:
            """The router hears of a replica a moment after its start."""
            calls = (handle.whoami.remote() for _ in range(4))
            names.update(await asyncio.gather(*calls))
            return len(names) == 2

        try:
            await eventually(both_answer)
            yield d, handle.options(stream=True)
        finally:
            await asyncio.to_thread(serve.delete, "chat")


def call(conversation: str | None = None, body: bytes = b"{}") -> messages.InferenceCall:
    key = f"conv:{conversation}" if conversation else ""
    return messages.InferenceCall(PATH, body, {}, "req", "a", key=key)


async def asked(
    d: LiveArbiter,
    system: str,
    question: str,
    conversation: str | None = None,
    *,
    stable: bool = False,
    **more: Any,
) -> messages.InferenceCall:
    """As the front makes a call of what a client sends."""
    first = {"role": "system", "content": system, **({"stable": True} if stable else {})}
    said = [first, {"role": "user", "content": question}]
    fields: dict[str, Any] = {"model": "a", "messages": said, **more}
    if conversation is not None:
        fields["x_conversation_id"] = conversation
    it = await parse(PATH, json.dumps(fields).encode(), {}, {})
    target = await ModelNames(d.table).find("a", "default")
    return inference_call(it, target, d.table.capabilities["chat"].models["a"], "default")


async def begun(
    handle: Any, asked: messages.InferenceCall
) -> tuple[str, AsyncGenerator[Any, None]]:
    """The replica that answers, and the rest of its answer."""
    parts = handle.handle.remote(asked)
    return (await anext(parts)).headers["replica"], parts


@dataclass(frozen=True, slots=True)
class OpenStream:
    """A call in a replica until a test ends it. Its answer ends; it is not cancelled, because Ray
    leaves the generator of a call suspended that is cancelled while a piece is on its way: the
    replica would count a call for a while that has no reader."""

    replica: str
    parts: AsyncGenerator[Any, None]
    gate: Path

    def end(self) -> None:
        self.gate.touch()

    async def ended(self) -> None:
        """Its replica counts it no more."""
        self.end()
        async for _ in self.parts:
            continue


async def opened(d: LiveArbiter, handle: Any, asked: messages.InferenceCall) -> OpenStream:
    gate = d.folder / uuid.uuid4().hex
    body = json.loads(asked.body) | {"stream": True, "until": str(gate)}
    return OpenStream(*await begun(handle, replace(asked, body=json.dumps(body).encode())), gate)


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
        held = [await opened(d, handle, call())]
        while held[-1].replica == first:  # until it has no room, and a second copy is loaded
            assert len(held) <= ROOM
            held.append(await opened(d, handle, call("talk")))
        other = held[-1].replica
        assert len(held) > OVERLOAD_COUNT
        await anext(held[-1].parts)  # it has its model
        for one in held[1:]:
            await one.ended()
        # Once the router has heard that both have the model, the idle one is preferred.
        await eventually(lambda: _goes_to(handle, call(), other))
        await held[0].ended()
        busy = [await opened(d, handle, call("talk")) for _ in range(OVERLOAD_COUNT)]
        assert {one.replica for one in busy} == {other}  # though the first is idle
        await eventually(lambda: _goes_to(handle, call("talk"), first))  # too far behind now
        for one in busy:
            one.end()


async def _goes_to(handle: Any, asked: messages.InferenceCall, replica: str) -> bool:
    return await replica_of(handle, asked) == replica


async def test_concurrent_calls_of_one_request_are_all_sent() -> None:
    """Inside a replica they carry one id, and Serve's own index would know only one of them."""
    async with two() as (_, handle):
        await replica_of(handle, call())
        context = _get_serve_request_context()
        token = _serve_request_context.set(replace(context, _internal_request_id="one"))
        try:
            async with asyncio.timeout(60):
                asked = (replica_of(handle, call()) for _ in range(4))
                assert len(await asyncio.gather(*asked)) == 4
        finally:
            _serve_request_context.reset(token)


@pytest.mark.spec("J2")
async def test_deadline_runs_while_every_replica_is_full() -> None:
    async with two() as (d, handle):
        held = [await opened(d, handle, call()) for _ in range(2 * ROOM)]
        began_s = time.monotonic()
        parts = answer(replace(call(), deadline_s=60.0), handle.handle.remote)
        waiting = asyncio.ensure_future(anext(parts))
        with pytest.raises(DeadlineUnmet):
            await anext(answer(replace(call(), deadline_s=0.5), handle.handle.remote))
        assert not waiting.done()
        waited_s = time.monotonic() - began_s
        for one in held:
            one.end()
        async with asyncio.timeout(60):
            head = await waiting
        await parts.aclose()
        assert isinstance(head, messages.ResponseHead)
        assert 0.0 < float(head.headers["deadline"]) <= 60.0 - waited_s


MANUAL = " ".join(f"Rule {number}: be exact." for number in range(300))
RULES = " ".join(f"Law {number}: be kind." for number in range(300))


async def idle(d: LiveArbiter, count: int = 2) -> None:
    """So many replicas compute nothing: what they say next of their queue counts no call that has
    ended."""
    await d.until(lambda s: sum(t["idle_s"] is not None for t in s["tickets"]) == count)


async def both_loaded(d: LiveArbiter, handle: Any) -> tuple[str, str]:
    """The replicas, when both have the model: the first was sent MANUAL, and the other one RULES
    when the first was full."""
    held = [await opened(d, handle, await asked(d, MANUAL, "Go on."))]
    first = held[0].replica
    await anext(held[0].parts)  # it has its model
    while held[-1].replica == first:
        assert len(held) <= ROOM
        held.append(await opened(d, handle, await asked(d, RULES, "Go on.")))
    *others, last = held
    await anext(last.parts)
    for one in others:
        one.end()
    await idle(d, 1)
    await eventually(lambda: _goes_to(handle, call(), first))  # once its router knows the model
    last.end()
    await idle(d)
    return first, last.replica


async def test_new_conversation_goes_where_its_prompt_is_known_unless_that_is_overloaded() -> None:
    async with two() as (d, handle):
        first, other = await both_loaded(d, handle)
        busy = [await opened(d, handle, await asked(d, MANUAL, "Go on.", "busy-0"))]
        assert busy[0].replica == first
        await eventually(lambda: _goes_to(handle, call(), other))  # it has less to do
        known = await asked(d, MANUAL, "And what does rule 7 say?", "new")
        assert await replica_of(handle, known) == first
        for key in (RUN, GIVEN):
            assert await replica_of(handle, await asked(d, MANUAL, "Why?", **key)) == first
        assert await replica_of(handle, await asked_in_part(d, 7, 10)) == first
        await _goes_by_load(d, handle, other)
        for number in range(1, OVERLOAD_COUNT):
            more = await asked(d, MANUAL, "Go on.", f"busy-{number}")
            busy.append(await opened(d, handle, more))
        assert {one.replica for one in busy} == {first}
        moved = await _one_that_moves(d, handle, other, "x_conversation_id")
        prefix = await _one_that_moves(d, handle, other, "x_prefix_id")
        for one in busy:
            one.end()
        keys = ({"x_conversation_id": moved}, {"stable": True}, {"x_prefix_id": "p"})
        places = [await _stays(d, handle, key) for key in (*keys, {"prompt_cache_key": "k"})]
        assert places[0] == other
        await idle(d)
        held = await opened(d, handle, await asked(d, "Be brief.", "Why?", moved))
        await eventually(lambda: _goes_to(handle, call(), first))  # it has less to do
        for place, both in (
            (other, {"x_conversation_id": moved, **RUN}),
            (first, {**RUN, "x_prefix_id": prefix}),
            (other, {"x_prefix_id": prefix, **GIVEN}),
        ):
            asks = await asked(d, MANUAL, "Which rule?", **both)
            assert await replica_of(handle, asks) == place, f"the first of {both} decides"
        held.end()


async def test_prompt_and_conversation_go_to_the_least_loaded_once_their_kv_is_evicted(
    tmp_path: Path,
) -> None:
    kept = tmp_path / "kept"
    async with two(kept=str(kept)) as (d, handle):
        first, other = await both_loaded(d, handle)
        talk = await asked(d, MANUAL, "And what does rule 7 say?", "talk")
        busy = await opened(d, handle, talk)
        assert busy.replica == first
        await eventually(lambda: _goes_to(handle, call(), other))  # it has less to do
        new = await asked(d, MANUAL, "Why?")
        brief = await asked(d, "Be brief.", "Why?", "talk")  # only its key says where it was
        assert [await replica_of(handle, one) for one in (new, brief)] == [first, first]
        # All that they are sent until then: the engines of both have lost it when they say so.
        kept.write_text(str(time.time() + 3_600))
        await eventually(lambda: _goes_to(handle, brief, other))
        await eventually(lambda: _goes_to(handle, new, other))
        busy.end()


# Of a prompt that the first replica was sent: its stable run, and OpenAI's key for it.
RUN: dict[str, Any] = {"stable": True}
GIVEN: dict[str, Any] = {"prompt_cache_key": "of-the-manual"}


async def _goes_by_load(d: LiveArbiter, handle: Any, replica: str) -> None:
    """A prompt of which another replica knows two thirds goes to this one, which has less to do. As
    the router hears a moment late that a call has ended, each is asked once."""
    numbers = itertools.count()

    async def goes() -> bool:
        return await _goes_to(handle, await asked_in_part(d, 2, 3, next(numbers)), replica)

    await eventually(goes)


async def asked_in_part(
    d: LiveArbiter, pieces: int, of: int, number: int = 0
) -> messages.InferenceCall:
    """A prompt of which so many pieces are those of MANUAL; with each number another."""
    other = f"{number} " * 3_000
    shared = PIECE_CHARACTERS * pieces
    made = await asked(d, MANUAL[:shared] + other[: PIECE_CHARACTERS * (of - pieces)], "Why?")
    manual = split((await asked(d, MANUAL, "Go on.")).pieces)
    same = [a == b for a, b in zip(split(made.pieces), manual, strict=False)]
    assert (same.count(True), len(split(made.pieces))) == (pieces, of)
    return made


async def _one_that_moves(d: LiveArbiter, handle: Any, replica: str, field: str) -> str:
    """A new key whose prompt another replica knows, and which went to this one. The router hears a
    moment late that a call has ended, and until then the other counts as less busy."""
    names = [f"moved-{number}" for number in range(200)]

    async def moves() -> bool:
        asks = await asked(d, MANUAL, "And rule 8?", **{field: names.pop()})
        return await _goes_to(handle, asks, replica)

    await eventually(moves)
    return f"moved-{len(names)}"


async def _stays(d: LiveArbiter, handle: Any, key: dict[str, Any]) -> str:
    """The replica to which requests of a key go each time, although another has less to do."""
    await idle(d)
    asks = await asked(d, "Be brief.", "Why?", **key)
    held = [await opened(d, handle, asks) for _ in range(2)]
    [place] = {one.replica for one in held}

    async def goes_elsewhere() -> bool:
        return await replica_of(handle, call()) != place

    await eventually(goes_elsewhere)
    assert await replica_of(handle, asks) == place
    for one in held:
        one.end()
    return place
