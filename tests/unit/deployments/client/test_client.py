"""The Python client over a socket and by a handle, on the front's own application."""

import asyncio
import base64
import json
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal
from PIL import Image

from arbiter.errors import DeadlineUnmet, QueueFull, RequestError, TicketClosed, UnknownModel
from arbiter.units import TicketId
from deployments import messages
from deployments.client import (
    AsyncClient,
    Audio,
    Client,
    FrontUnreachable,
    Picture,
    synchronous,
)
from deployments.client.answers import Choice, Delta, Span, ToolCall, Usage
from deployments.front.access.auth import Denied
from deployments.front.inference.request import BadRequest
from tests.support.answering_front import (
    MODEL,
    OTHER,
    SSE,
    AnsweringFront,
    both,
    events,
    whole,
)
from tests.support.scripted_front import Answer, ScriptedFront
from tests.support.waits import WITHIN_S, eventually, wait_in_thread

CHAT, SPEAK = "/v1/chat/completions", "/v1/audio/speech"
USAGE = {"prompt_tokens": 3, "completion_tokens": 2}
SAID = {"model": MODEL, "usage": USAGE}
HI = {"index": 0, "message": {"content": "Hi."}, "finish_reason": "stop"}
SOUND = Audio(b"RIFF", "audio/wav")
RED = Picture.of(Image.new("RGB", (4, 2), "red"))
B64 = base64.b64encode(RED.data).decode()

Call = Callable[[AsyncClient], Awaitable[Any]]


@pytest.fixture
def front(tmp_path: Path) -> AnsweringFront:
    return AnsweringFront(tmp_path)


@pytest.fixture
async def clients(front: AnsweringFront) -> AsyncIterator[dict[str, AsyncClient]]:
    async with both(front) as made:
        yield made


async def of_both(clients: dict[str, AsyncClient], call: Call) -> Any:
    """The answer, which is the same either way."""
    first, second = [await call(client) for client in clients.values()]
    assert first == second
    return first


async def refused(clients: dict[str, AsyncClient], call: Call) -> RequestError:
    """The refusal, which is the same either way."""
    found = []
    for client in clients.values():
        with pytest.raises(RequestError) as caught:
            await call(client)
        found.append(caught.value)
    assert found[0] == found[1]
    return found[0]


async def listed(parts: AsyncGenerator[Any]) -> list[Any]:
    return [part async for part in parts]


@pytest.mark.spec("J7")
async def test_chat_is_answered_alike_over_http_and_by_handle(
    front: AnsweringFront, clients: dict[str, AsyncClient]
) -> None:
    called = [{"id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}]
    other = {"message": {"content": None, "tool_calls": called}, "finish_reason": "tool_calls"}
    front.says(CHAT, whole({**SAID, "choices": [HI, other]}))
    answer = await of_both(clients, lambda c: c.chat("Hello", n=2, extra_body={"top_k": 4}))
    assert (answer.text, answer.model, answer.usage) == ("Hi.", MODEL, Usage(3, 2))
    assert answer.choices[1] == Choice("", "tool_calls", (ToolCall("1", "add", '{"a": 1}'),))
    assert answer.choices[1].tool_calls[0].parsed == {"a": 1}
    assert front.body["messages"] == [{"role": "user", "content": "Hello"}]
    assert (front.body["n"], front.body["top_k"], front.body["model"]) == (2, 4, MODEL)


@pytest.mark.spec("J7")
async def test_chat_streams_and_comments_are_skipped(
    front: AnsweringFront, clients: dict[str, AsyncClient]
) -> None:
    rows = [{"choices": [{"index": 0, "delta": {"content": word}}]} for word in ("Hi", ".")]
    front.says(CHAT, *events(*rows, {"choices": [], "usage": USAGE}))
    parts = await of_both(clients, lambda c: listed(c.stream_chat("Hello")))
    assert parts == [Delta("Hi"), Delta(".")]
    assert front.body["stream"] is True


@pytest.mark.spec("J7")
async def test_separators_of_lines_within_a_text_end_no_line_of_a_stream(
    front: AnsweringFront, clients: dict[str, AsyncClient]
) -> None:
    said = "one\u2028two\u2029three\x85"
    row = {"choices": [{"index": 0, "delta": {"content": said}}]}
    event = b"data: " + json.dumps(row, ensure_ascii=False).encode() + b"\r\n\r\n"
    front.says(CHAT, SSE, event[:40], event[40:], b"data: [DONE]\n\n")
    parts = await of_both(clients, lambda c: listed(c.stream_chat("Hello")))
    assert parts == [Delta(said)]


CALLS: dict[str, tuple[str, dict[str, Any], Call]] = {
    "complete": (
        "/v1/completions",
        {**SAID, "choices": [{"text": " lived"}]},
        lambda c: c.complete("A fox"),
    ),
    "embed": (
        "/v1/embeddings",
        {**SAID, "data": [{"index": 1, "embedding": [2.0]}, {"index": 0, "embedding": [1.0]}]},
        lambda c: c.embed(["a", "b"]),
    ),
    "rerank": (
        "/v1/rerank",
        {"model": MODEL, "results": [{"index": 1, "relevance_score": 0.5}]},
        lambda c: c.rerank("q", ["a", "b"], top_n=1),
    ),
    "images": (
        "/v1/images/generations",
        {"data": [{"b64_json": B64}]},
        lambda c: c.images("a circle", x_seed=3),
    ),
    "edits": (
        "/v1/images/edits",
        {"data": [{"b64_json": B64}]},
        lambda c: c.images("a circle", picture=RED, x_strength=0.5),
    ),
    "describe": (CHAT, {**SAID, "choices": [HI]}, lambda c: c.describe(RED)),
    "transcribe": (
        "/v1/audio/transcriptions",
        {
            "text": "A fox.",
            "language": "en",
            "duration": 2.0,
            "segments": [{"start": 0.0, "end": 1.5, "text": " A fox."}],
            "words": [{"start": 0.0, "end": 0.5, "word": "A"}],
        },
        lambda c: c.transcribe(SOUND, with_words=True, language="en"),
    ),
    "vad": (
        "/v1/audio/vad",
        {"duration": 2.0, "segments": [{"start": 0.5, "end": 1.0}]},
        lambda c: c.vad(SOUND, threshold=0.4),
    ),
    "request": (
        "/v1/score",
        {"data": [{"score": 0.5}]},
        lambda c: c.request("/v1/score", {"text_1": "a", "text_2": "b"}),
    ),
}


@pytest.mark.spec("J7")
@pytest.mark.parametrize("name", CALLS)
async def test_each_call_is_answered_alike_over_http_and_by_handle(
    front: AnsweringFront, clients: dict[str, AsyncClient], name: str
) -> None:
    path, said, call = CALLS[name]
    front.says(path, whole(said))
    answer = await of_both(clients, call)
    assert [one.path for one in front.calls] == [path] * 2
    match name:
        case "embed":
            assert answer.vectors == [[1.0], [2.0]] and answer.vector == [1.0]
        case "rerank":
            assert (answer.best.text, answer.best.position) == ("b", 1)
        case "images" | "edits":
            assert answer == (RED,) and RED.size == (4, 2)
        case "transcribe":
            assert (answer.text, answer.segments) == ("A fox.", (Span(0.0, 1.5, "A fox."),))
            assert answer.words == (Span(0.0, 0.5, "A"),)
            granularities = b'name="timestamp_granularities[]"\r\n\r\nword'
            assert granularities in front.calls[-1].body and b"RIFF" in front.calls[-1].body
        case "vad":
            assert answer.segments == (Span(0.5, 1.0),)
        case "describe":
            [part] = front.body["messages"][0]["content"][1:]
            assert part == {"type": "image_url", "image_url": {"url": RED.uri}}
        case "request":
            assert answer == said


@pytest.mark.spec("J7")
async def test_speech_is_a_file_or_its_pieces(
    front: AnsweringFront, clients: dict[str, AsyncClient], tmp_path: Path
) -> None:
    head = messages.ResponseHead(200, {"content-type": "audio/wav"}, is_chunked=True)
    front.says(SPEAK, head, b"RIFF", b"data")
    said = await of_both(clients, lambda c: c.speak("Hello"))
    assert said == Audio(b"RIFFdata", "audio/wav")
    assert Audio.open(said.save(tmp_path / "said.wav")).data == said.data
    assert front.body["response_format"] == "wav"
    pieces = await listed(clients["handle"].stream_speak("Hello", response_format="wav"))
    assert [piece.data for piece in pieces] == [b"RIFF", b"data"]


@pytest.mark.spec("J7")
async def test_previews_of_a_picture_come_before_it(
    front: AnsweringFront, clients: dict[str, AsyncClient]
) -> None:
    rows = [
        {"type": f"image_generation.{name}", "b64_json": B64}
        for name in ("partial_image", "completed")
    ]
    front.says("/v1/images/generations", *events(*rows, last=b""))
    parts = await of_both(clients, lambda c: listed(c.stream_images("a circle", previews=1)))
    assert [part.is_final for part in parts] == [False, True]


@pytest.mark.spec("J7")
async def test_transcript_streams_by_segments(
    front: AnsweringFront, clients: dict[str, AsyncClient]
) -> None:
    rows = [
        {"type": "transcript.text.delta", "delta": "A fox."},
        {"type": "done", "text": "A fox."},
    ]
    front.says("/v1/audio/transcriptions", *events(*rows, last=b""))
    assert await of_both(clients, lambda c: listed(c.stream_transcribe(SOUND))) == [Delta("A fox.")]


@pytest.mark.spec("J7")
async def test_refusals_are_the_typed_errors_with_code_field_and_retry_after(
    front: AnsweringFront, clients: dict[str, AsyncClient]
) -> None:
    front.answers[CHAT] = QueueFull("model", 9, 8, 3.0)
    full = await refused(clients, lambda c: c.chat("Hello"))
    assert isinstance(full, QueueFull)
    assert (full.status_code, full.code, full.retry_after_s) == (429, "queue_full", 3.0)
    assert str(full) == str(QueueFull("model", 9, 8, 3.0))
    unknown = await refused(clients, lambda c: c.chat("Hello", model="modle"))
    assert isinstance(unknown, UnknownModel) and unknown.param == "model"
    assert "did you mean model" in str(unknown)
    again = pickle.loads(pickle.dumps(unknown))
    assert (type(again), again) == (type(unknown), unknown)


@pytest.mark.spec("J7")
async def test_field_that_is_wrong_is_refused_before_anything_is_sent(
    front: AnsweringFront, clients: dict[str, AsyncClient]
) -> None:
    wrong = await refused(clients, lambda c: c.chat("Hello", n=0))
    assert isinstance(wrong, BadRequest) and wrong.param == "n"
    assert (await refused(clients, lambda c: c.chat([]))).param == "messages"
    assert not front.calls
    for client in clients.values():
        with pytest.raises(TypeError, match="name a `model`"):
            await AsyncClient("http://none").chat("Hello")
        assert client


@pytest.mark.spec("J7", "L1")
async def test_key_counts_by_handle_as_it_does_over_http(
    front: AnsweringFront,
) -> None:
    front.says(CHAT, whole({**SAID, "choices": [HI]}))
    async with AsyncClient(handle=front, key="arb-wrong", model=MODEL) as client:
        with pytest.raises(Denied) as caught:
            await client.chat("Hello", x_priority="high")
        assert caught.value.code == "invalid_api_key"


@pytest.mark.spec("J7")
async def test_refusal_within_a_stream_is_raised_behind_its_parts(
    front: AnsweringFront, clients: dict[str, AsyncClient]
) -> None:
    row = {"choices": [{"index": 0, "delta": {"content": "Hi"}}]}
    broken = messages.stream_error(DeadlineUnmet(TicketId("t"), 1.0, 2.0))
    front.says(CHAT, *events(row, last=broken))
    for client in clients.values():
        heard = []
        with pytest.raises(DeadlineUnmet, match="was not ready"):
            async for delta in client.stream_chat("Hello"):
                heard.append(delta)
        assert heard == [Delta("Hi")]


@pytest.mark.spec("J7", "J8")
@pytest.mark.parametrize("way", ["http", "handle"])
async def test_stream_that_is_closed_early_cancels_the_work(
    front: AnsweringFront, clients: dict[str, AsyncClient], way: str
) -> None:
    row = {"choices": [{"index": 0, "delta": {"content": "Hi"}}]}
    front.says(CHAT, *events(row, last=b": more\n\n"))
    front.holds.add(CHAT)
    async for _ in clients[way].stream_chat("Hello"):
        break
    await eventually(front.responses[-1].was_cancelled.is_set)


@pytest.mark.spec("J7")
async def test_front_that_is_not_there_is_a_typed_error() -> None:
    async with AsyncClient("http://127.0.0.1:9", model=MODEL) as client:
        with pytest.raises(FrontUnreachable, match=r"127\.0\.0\.1:9") as caught:
            await client.chat("Hello")
    assert caught.value.retry_after_s == 2.0


@pytest.mark.spec("J7", "A21")
async def test_budget_is_the_deadline_of_each_call_and_ends_them_all(
    front: AnsweringFront, clients: dict[str, AsyncClient]
) -> None:
    front.says(CHAT, whole({**SAID, "choices": [HI]}))
    for client in clients.values():
        turn = client.within(30.0)
        await turn.chat("Hello")
        await turn.chat("Hello", x_deadline_s=5.0)
        first, second = (call.deadline_s for call in front.calls[-2:])
        assert first is not None and 20 < first < 30 and second == 5.0
        await client.chat("Hello")
        assert front.calls[-1].deadline_s is None
        with pytest.raises(DeadlineUnmet):
            await client.within(0.0).chat("Hello")
    front.holds.add(CHAT)
    front.says(CHAT)
    with pytest.raises(DeadlineUnmet):  # which no deadline of the server's ends
        await clients["handle"].within(0.05).chat("Hello")
    await eventually(front.responses[-1].was_cancelled.is_set)


def acquired(state: str, **more: object) -> dict[str, object]:
    return {"object": "acquired", "ticket": "model-1", "model": MODEL, "state": state, **more}


@pytest.mark.spec("J7", "A7")
@pytest.mark.parametrize("way", ["http", "handle"])
async def test_acquired_model_is_held_until_release_and_use_after_it_is_typed(
    front: AnsweringFront, clients: dict[str, AsyncClient], way: str
) -> None:
    front.says(messages.ACQUIRE, *events(acquired("held"), last=b": held\n\n"))
    front.holds.add(messages.ACQUIRE)
    front.says(CHAT, whole({**SAID, "choices": [HI]}))
    async with clients[way].acquire(OTHER, term_s=9.0) as held:
        assert front.body["term_s"] == 9.0
        assert (held.ticket, held.model, held.has_ended) == ("model-1", OTHER, False)
        assert (await held.chat("Hello")).text == "Hi."
        assert front.body["model"] == OTHER
        in_use = front.responses[0]
        assert not in_use.was_cancelled.is_set()
        await held.release()
        await held.release()
        await eventually(in_use.was_cancelled.is_set)
        with pytest.raises(TicketClosed):
            await held.chat("Hello")
    assert held.has_ended


@pytest.mark.spec("J7", "A7")
async def test_acquire_that_is_refused_or_ended_by_the_front_is_typed(
    front: AnsweringFront, clients: dict[str, AsyncClient]
) -> None:
    front.answers[messages.ACQUIRE] = QueueFull("model", 9, 8, 3.0)
    for client in clients.values():
        with pytest.raises(QueueFull):
            async with client.acquire():
                pytest.fail("it was refused")
    front.says(messages.ACQUIRE, *events(acquired("held"), acquired("ended", reason="leaving")))
    for client in clients.values():
        async with client.acquire() as held:
            await eventually(lambda held=held: held.has_ended)
            with pytest.raises(TicketClosed):
                await held.chat("Hello")


@pytest.mark.spec("J7", "A7")
async def test_exception_in_the_block_releases(
    front: AnsweringFront, clients: dict[str, AsyncClient]
) -> None:
    front.says(messages.ACQUIRE, *events(acquired("held"), last=b""))
    front.holds.add(messages.ACQUIRE)
    with pytest.raises(ZeroDivisionError):
        async with clients["handle"].acquire():
            raise ZeroDivisionError
    await eventually(front.responses[0].was_cancelled.is_set)


@pytest.mark.spec("J7")
def test_plain_client_does_the_same_by_plain_calls(front: AnsweringFront) -> None:
    row = {"choices": [{"index": 0, "delta": {"content": "Hi"}}]}
    front.says("/v1/completions", *events(row, {"choices": [{"text": "."}]}, last=b": more\n\n"))
    front.says(CHAT, whole({**SAID, "choices": [HI]}))
    front.says(messages.ACQUIRE, *events(acquired("held"), last=b""))
    front.holds |= {"/v1/completions", messages.ACQUIRE}
    with front.serving() as url, Client(url, key=front.key, model=MODEL) as client:
        assert client.chat("Hello").text == "Hi."
        assert client.models() == (MODEL, OTHER)
        parts = client.stream_complete("A fox")
        assert next(parts).text == "Hi"
        parts.close()
        assert front.responses[-1].was_cancelled.wait(60)
        with client.acquire(OTHER) as held:
            assert held.within(9.0).chat("Hello").text == "Hi."
            assert front.body["model"] == OTHER
            held.release()
            with pytest.raises(TicketClosed):
                held.chat("Hello")
        with pytest.raises(UnknownModel):
            client.chat("Hello", model="none")


@pytest.mark.spec("J7")
def test_script_that_forgets_to_close_its_client_ends() -> None:
    script = """
from deployments.client import Client, FrontUnreachable
client = Client("http://127.0.0.1:9", model="model")
turn = Client("http://127.0.0.1:9", model="model").within(60)
try:
    turn.chat("Hello")
except FrontUnreachable:
    print("not there")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, b"not there\n"), done.stderr


@pytest.mark.spec("J7", "J8")
@pytest.mark.parametrize(
    "call",
    [
        "client.chat('Hello')",
        "list(client.stream_chat('Hello'))",
        "client.acquire().__enter__()",  # while its model is loaded
    ],
)
def test_interrupt_of_a_plain_call_ends_its_work_though_the_client_lives_on(
    front: AnsweringFront, call: str
) -> None:
    """As in a notebook, whose kernel is interrupted."""
    script = f"""
import signal, sys
from deployments.client import Client
signal.signal(signal.SIGINT, signal.default_int_handler)
client = Client(sys.argv[1], key=sys.argv[2], model=sys.argv[3])
try:
    {call}
except KeyboardInterrupt:
    print("interrupted", flush=True)
sys.stdin.read()
"""
    front.says(CHAT, *events({"choices": [{"index": 0, "delta": {"content": "Hi"}}]}, last=b""))
    front.says(messages.ACQUIRE, SSE, b": a comment\n\n")
    front.holds |= {CHAT, messages.ACQUIRE}
    with front.serving() as url:
        command = [sys.executable, "-c", script, url, front.key, MODEL]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as notebook:
            wait_in_thread(lambda: front.responses)
            notebook.send_signal(signal.SIGINT)
            assert front.responses[-1].was_cancelled.wait(60)
            said, troubles = notebook.communicate()
    assert (said, notebook.returncode) == (b"interrupted\n", 0), troubles


@pytest.mark.spec("J7")
def test_interrupt_of_a_plain_call_before_it_has_the_future_of_its_work_ends_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with start_blocking_portal() as portal:
        start = portal.start_task_soon

        def interrupted(*args: Any) -> None:
            monkeypatch.undo()
            start(*args)
            assert begun.wait(WITHIN_S)
            raise KeyboardInterrupt

        monkeypatch.setattr(portal, "start_task_soon", interrupted)
        with pytest.raises(KeyboardInterrupt):
            synchronous._result_of(portal, work)
        assert ended.wait(WITHIN_S)


@pytest.mark.spec("J7")
async def test_speech_that_breaks_off_is_an_error_and_no_shorter_speech(
    front: AnsweringFront, clients: dict[str, AsyncClient]
) -> None:
    head = messages.ResponseHead(200, {"content-type": "audio/wav"}, is_chunked=True)
    front.breaks.add(SPEAK)
    front.says(SPEAK, head, b"RIFF")
    for client in clients.values():
        with pytest.raises(FrontUnreachable, match="broke off"):
            await client.speak("Hello")


@pytest.mark.spec("L1")
async def test_key_for_this_machine_goes_to_no_proxy_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    front = ScriptedFront()
    front.answers["POST", CHAT] = Answer(503, {}, b"heard")
    front.says("PUT", "/arbiter/leases/mine", {"state": "held"})
    with front.serving() as url, socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        async with AsyncClient(url, model=MODEL, key="arb-mine") as client:
            with pytest.raises(RequestError, match="HTTP 503: heard"):
                await client.chat("Hello")
            put = client._connection.lease_way().put
            lease = await asyncio.to_thread(put, "mine", {"gb": 1})
        assert lease == {"state": "held"}
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()
    sent = [request.headers["authorization"] for request in front.requests]
    assert sent == ["Bearer arb-mine"] * 2


async def test_answer_of_no_front_says_what_came() -> None:
    proxy = ScriptedFront()
    proxy.answers["POST", CHAT] = Answer(502, {}, b"proxy")
    with proxy.serving() as url:
        async with AsyncClient(url, model=MODEL) as client:
            with pytest.raises(RequestError, match="HTTP 502: proxy") as caught:
                await client.chat("Hello")
    assert caught.value.status_code == 502
