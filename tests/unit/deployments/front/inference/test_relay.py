"""Parts of a response become an HTTP response; errors behind the front become OpenAI's; a call that
the client saw nothing of is sent again."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from fastapi.responses import Response, StreamingResponse
from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import BackPressureError
from starlette.types import Message

from arbiter.errors import CapabilityFailed, DeadlineUnmet, EngineLost, RequestError, RolePinned
from arbiter.units import NodeId, TicketId
from deployments import messages
from deployments.front.inference.relay import PROGRESS_S
from deployments.front.inference.relay import relay as relayed
from deployments.front.inference.service import TRIES, answer
from deployments.front.middleware.http_errors import refused
from deployments.replica.engine_client import EngineLink
from tests.support.streaming_engine import StreamingEngine, serving

CALL = messages.InferenceCall("/v1/chat/completions", b"{}", {}, "req-1", "tiny")
JSON = messages.FullResponse(
    messages.ResponseHead(200, {"content-type": "application/json"}), b'{"a": 1}'
)
SSE = messages.ResponseHead(200, {"content-type": "text/event-stream"})
# A line of gRPC that breaks in the middle of an answer.
CUT = AioRpcError(StatusCode.INTERNAL, Metadata(), Metadata(), "Received RST_STREAM")
Item = messages.Part | Exception


class Answer:
    """Serve's response generator: yields its items; an exception among them is raised."""

    def __init__(self, *items: Item) -> None:
        self.items, self.cancelled = list(items), False

    def __aiter__(self) -> AsyncIterator[messages.Part]:
        return self._run()

    async def _run(self) -> AsyncIterator[messages.Part]:
        for item in self.items:
            if isinstance(item, Exception):
                raise item
            yield item

    def cancel(self) -> None:
        self.cancelled = True


class Capability:
    """Gives one answer after the other, and the last for ever."""

    def __init__(self, *answers: Answer) -> None:
        self.answers, self.calls = list(answers), 0
        self.seen: list[messages.InferenceCall] = []

    def __call__(self, call: messages.InferenceCall) -> Answer:
        self.calls += 1
        self.seen.append(call)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


async def relay(
    call: messages.InferenceCall, capability: Capability, beat_s: float = PROGRESS_S
) -> Response:
    """As the routes and their exception handler do it."""
    parts = answer(call, capability)
    try:
        return await relayed(
            parts, call.model, wants_progress=call.wants_progress, progress_s=beat_s
        )
    except RequestError as error:
        return refused(error)


async def body_of(response: Response) -> bytes:
    if isinstance(response, StreamingResponse):
        return b"".join([bytes(chunk) async for chunk in response.body_iterator])
    return bytes(response.body)


async def test_an_answer_is_carried_over() -> None:
    response = await relay(CALL, Capability(Answer(JSON)))
    assert response.status_code == 200
    assert json.loads(await body_of(response)) == {"a": 1}


@pytest.mark.spec("A19")
async def test_a_replica_that_dies_before_its_head_is_asked_again() -> None:
    for death in (ActorDiedError(), CUT, EngineLost("tiny", TicketId("t"))):
        capability = Capability(Answer(death), Answer(JSON))
        response = await relay(CALL, capability)
        assert response.status_code == 200
        assert capability.calls == 2


def pinned_on(node: str) -> Answer:
    return Answer(RayTaskError("handle", "there", RolePinned("tiny", "text", NodeId(node), "big")))


@pytest.mark.spec("A11")
async def test_call_that_a_pinned_model_keeps_off_a_node_is_sent_to_another() -> None:
    capability = Capability(pinned_on("n1"), Answer(JSON))
    response = await relay(CALL, capability)
    assert response.status_code == 200
    assert [call.refused_nodes for call in capability.seen] == [(), ("n1",)]


@pytest.mark.spec("A11")
@pytest.mark.parametrize(("nodes", "calls_count"), [("aa", 2), ("abcd", TRIES)])
async def test_call_that_pinned_models_keep_off_all_nodes_is_refused(
    nodes: str, calls_count: int
) -> None:
    capability = Capability(*(pinned_on(node) for node in nodes))
    response = await relay(CALL, capability)
    assert response.status_code == 409 and capability.calls == calls_count
    assert json.loads(await body_of(response))["error"]["code"] == "role_pinned"


@pytest.mark.spec("L3")
@pytest.mark.parametrize("by_grpc", [True, False])
async def test_unexpected_error_is_typed_and_not_retried(by_grpc: bool) -> None:
    error = ValueError("x")
    capability = Capability(
        Answer(error if by_grpc else RayTaskError("handle", "traceback", error))
    )
    response = await relay(CALL, capability)
    assert response.status_code == 503
    assert json.loads(await body_of(response))["error"]["code"] == "capability_failed"
    assert capability.calls == 1


async def test_retries_are_bounded_and_the_last_failure_is_returned() -> None:
    capability = Capability(Answer(ActorDiedError()))
    response = await relay(CALL, capability)
    assert capability.calls == TRIES
    assert response.status_code == 503
    error = json.loads(await body_of(response))["error"]
    assert error["code"] == "engine_lost"
    assert error["message"].startswith("the replica that serves tiny died under this request")


async def test_a_stream_that_breaks_ends_with_an_error_event() -> None:
    response = await relay(CALL, Capability(Answer(SSE, b"data: 1\n\n", ActorDiedError())))
    assert response.status_code == 200
    first, last = (await body_of(response)).strip().split(b"\n\n")
    assert first == b"data: 1"
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_lost"


@pytest.mark.spec("J8")
async def test_a_full_queue_is_429_with_its_bound_and_when_to_come_back() -> None:
    full = BackPressureError(num_queued_requests=5, max_queued_requests=5)
    response = await relay(CALL, Capability(Answer(full)))
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert "bound 5" in json.loads(await body_of(response))["error"]["message"]


@pytest.mark.spec("J8")
async def test_a_client_that_leaves_a_stream_cancels_the_work() -> None:
    answer = Answer(SSE, b"data: 1\n\n", b"data: 2\n\n")
    response = await relay(CALL, Capability(answer))
    assert isinstance(response, StreamingResponse)
    stream = response.body_iterator
    await anext(aiter(stream))
    await stream.aclose()  # type: ignore[union-attr]
    assert answer.cancelled


class Slow(Answer):
    """Waits at each item until the test lets it go on."""

    def __init__(self, *items: Item) -> None:
        super().__init__(*items)
        self.gates = [asyncio.Event() for _ in items]

    async def _run(self) -> AsyncIterator[messages.Part]:
        for gate, item in zip(self.gates, self.items, strict=True):
            await gate.wait()
            if isinstance(item, Exception):
                raise item
            yield item


WANTS = replace(CALL, wants_progress=True)
LOADING = messages.Progress("loading", 0, 3.0)


@pytest.mark.spec("J3")
async def test_stream_carries_progress_comments_while_its_model_loads() -> None:
    answer = Slow(LOADING, SSE, b"data: 1\n\n")
    response = await relay(WANTS, Capability(answer), beat_s=0.01)
    assert isinstance(response, StreamingResponse)
    stream = aiter(response.body_iterator)
    assert str(bytes(await anext(stream))).startswith("b': phase=starting position=0 estimate_s=un")
    answer.gates[0].set()
    while b"phase=loading" not in (line := bytes(await anext(stream))):
        assert b"phase=starting" in line
    assert b"estimate_s=3.0" in line or b"estimate_s=2.9" in line
    for gate in answer.gates:
        gate.set()
    rest = b"".join([bytes(part) async for part in stream])
    assert rest.endswith(b"data: 1\n\n")
    assert all(block.startswith((b": ", b"data: ")) for block in rest.strip().split(b"\n\n"))


@pytest.mark.spec("J3", "A19")
async def test_client_of_a_replica_that_dies_while_it_answers_reads_that_another_starts() -> None:
    tries = Capability(Answer(messages.RUNNING, ActorDiedError()), Answer(SSE))
    parts = [part async for part in answer(WANTS, tries)]
    assert parts == [messages.RUNNING, messages.STARTING, SSE]
    tries = Capability(Answer(ActorDiedError()), Answer(SSE))
    assert [part async for part in answer(CALL, tries)] == [SSE], "it wants none"


@pytest.mark.spec("J3", "N1")
@pytest.mark.parametrize("ends_well", [True, False])
async def test_front_reads_the_side_stream_of_a_head_that_comes_after_a_comment(
    ends_well: bool,
) -> None:
    engine = StreamingEngine(b"data: 1\n\n").let_all()
    async with serving(engine) as path:
        link = EngineLink("m", TicketId("t"), path)
        parts = link.stream("POST", "/v1/x", {messages.SIDE_STREAM: "w"}, b"{}")
        head = await anext(parts)
        assert isinstance(head, messages.ResponseHead)
        if not ends_well:
            head = replace(head, headers=head.headers | {messages.SIDE_STREAM: f"{path} other"})
        answer = Slow(LOADING, head)
        response = await relay(WANTS, Capability(answer), beat_s=0.01)
        for gate in answer.gates:
            gate.set()
        *comments, event = (await body_of(response)).strip().split(b"\n\n")
        assert comments and comments[0].startswith(b": ")
        assert (event == b"data: 1") if ends_well else b"that serves tiny failed" in event
        await parts.aclose()
        link.cut()
        await link.closed()


@pytest.mark.spec("J3")
@pytest.mark.parametrize(
    "last",
    [
        messages.FullResponse(
            messages.ResponseHead(400, {"content-type": "application/json"}),
            b'{"error": {"code": "engine_lost"}}',
        ),
        RayTaskError("handle", "traceback", CapabilityFailed("m", "x")),
    ],
    ids=["refused by the engine", "broken"],
)
async def test_refusal_after_a_comment_is_an_error_event(last: Item) -> None:
    answer = Slow(LOADING, last)
    response = await relay(WANTS, Capability(answer), beat_s=0.01)
    for gate in answer.gates:
        gate.set()
    *comments, event = (await body_of(response)).strip().split(b"\n\n")
    assert comments
    assert json.loads(event.removeprefix(b"data: "))["error"]["code"] in (
        "engine_lost", "capability_failed",
    )  # fmt: skip


async def test_refusal_before_any_comment_keeps_its_status() -> None:
    bad = messages.FullResponse(
        messages.ResponseHead(400, {"content-type": "application/json"}), b"{}"
    )
    response = await relay(WANTS, Capability(Answer(LOADING, bad)))
    assert response.status_code == 400


@pytest.mark.spec("J8")
async def test_a_client_that_leaves_while_the_model_loads_cancels_the_work() -> None:
    answer = Slow(LOADING, SSE)
    response = await relay(WANTS, Capability(answer), beat_s=0.01)
    assert isinstance(response, StreamingResponse)
    await anext(aiter(response.body_iterator))
    await response.body_iterator.aclose()  # type: ignore[union-attr]
    assert answer.cancelled
    answer = Slow(LOADING, SSE)
    early = asyncio.ensure_future(relay(WANTS, Capability(answer)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    early.cancel()
    with pytest.raises(asyncio.CancelledError):
        await early
    while not answer.cancelled:
        await asyncio.sleep(0)


class Left(Exception):
    """Of a socket whose client has gone."""


@pytest.mark.spec("J8")
@pytest.mark.parametrize("waits", [False, True], ids=["began", "its model loads"])
async def test_client_that_leaves_before_the_first_part_cancels_the_work(waits: bool) -> None:
    answer = Slow(LOADING, SSE) if waits else Answer(SSE, b"data: 1\n\n")
    response = await relay(WANTS if waits else CALL, Capability(answer), beat_s=0.01)

    async def send(message: Message) -> None:
        raise Left(message["type"])

    async def receive() -> Message:
        raise AssertionError("this version of ASGI tells by `send` that the client has left")

    scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
    with pytest.raises(Left, match="start"):
        await response(scope, receive, send)
    assert answer.cancelled


async def test_a_replica_that_dies_while_its_model_loads_is_asked_again() -> None:
    capability = Capability(Answer(LOADING, ActorDiedError()), Answer(JSON))
    response = await relay(WANTS, capability)
    assert response.status_code == 200
    assert capability.calls == 2


async def test_an_answer_taken_to_its_end_is_not_cancelled() -> None:
    answer = Answer(JSON)
    await relay(CALL, Capability(answer))
    assert not answer.cancelled


AUDIO = messages.ResponseHead(200, {"content-type": "audio/wav"}, is_chunked=True)


async def test_stream_of_bytes_keeps_its_type_and_its_bytes() -> None:
    response = await relay(CALL, Capability(Answer(AUDIO, b"RIFF", b"\x00\xff")))
    assert isinstance(response, StreamingResponse)
    assert response.headers["content-type"] == "audio/wav"
    assert "content-length" not in response.headers
    assert await body_of(response) == b"RIFF\x00\xff"


async def test_stream_of_bytes_that_breaks_is_cut_without_an_event() -> None:
    response = await relay(CALL, Capability(Answer(AUDIO, b"RIFF", ActorDiedError())))
    got = []
    with pytest.raises(EngineLost):
        async for part in response.body_iterator:  # type: ignore[attr-defined]
            got.append(part)
    assert got == [b"RIFF"]


async def test_response_that_is_no_event_stream_ends_the_comments_with_an_error() -> None:
    answer = Slow(LOADING, AUDIO)
    response = await relay(WANTS, Capability(answer), beat_s=0.01)
    for gate in answer.gates:
        gate.set()
    *_, event = (await body_of(response)).strip().split(b"\n\n")
    assert "audio/wav" in json.loads(event.removeprefix(b"data: "))["error"]["message"]


@pytest.mark.spec("A21")
async def test_second_try_has_the_rest_of_the_deadline() -> None:
    seen: list[float | None] = []
    answers = [Answer(ActorDiedError()), Answer(JSON)]

    def send(call: messages.InferenceCall) -> Answer:
        seen.append(call.deadline_s)
        return answers.pop(0)

    await relayed(answer(replace(CALL, deadline_s=30.0), send), "tiny", wants_progress=False)
    first_s, second_s = seen
    assert first_s == 30.0 and second_s is not None and 20 < second_s < 30


@pytest.mark.spec("A21")
async def test_no_try_is_made_without_a_rest_of_the_deadline() -> None:
    sent = list[messages.InferenceCall]()

    def send(call: messages.InferenceCall) -> Answer:
        sent.append(call)
        return Answer(ActorDiedError())

    with pytest.raises(DeadlineUnmet):
        await relayed(answer(replace(CALL, deadline_s=1e-9), send), "tiny", wants_progress=False)
    assert len(sent) == 1
