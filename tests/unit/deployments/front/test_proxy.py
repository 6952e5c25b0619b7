"""What stands around Serve's proxy."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from contextvars import Context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from httpx import ASGITransport, AsyncClient
from ray.serve import context as serve_context
from ray.serve.context import _RequestContext
from starlette.types import ASGIApp, Receive, Scope, Send

from arbiter.errors import EngineLost
from arbiter.protocol import ray_internals
from arbiter.units import TicketId
from deployments import messages
from deployments.front import proxy
from deployments.front.proxy import middlewares
from deployments.front.sockets import side_stream
from deployments.replica.engine_client import EngineLink
from tests.support.full_disk import full_disk
from tests.support.streaming_engine import StreamingEngine, serving
from tests.support.waits import eventually

SOON_S = 0.02
LOST = EngineLost("m", TicketId("t"))


def around(app: ASGIApp) -> AsyncClient:
    """As Serve applies them."""
    for middleware in middlewares():
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)
    return AsyncClient(transport=ASGITransport(app), base_url="http://localhost")


@pytest.mark.spec("J8")
async def test_request_that_got_no_response_is_503_with_when_to_come_back() -> None:
    async def dies(scope: Scope, receive: Receive, send: Send) -> None:
        """As the proxy does where the replica died: returns having sent nothing."""

    async with around(dies) as client:
        answer = await client.get("/v1/models")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert answer.json()["error"]["code"] == "front_lost"


class ServesTwo:
    """Serve's proxy before the front and another application, whose replicas answer nothing."""

    def __init__(self) -> None:
        self.proxy_router, self.headers = self, list[bytes]()

    def _ongoing_requests_start(self) -> None: ...

    def _ongoing_requests_end(self) -> None: ...

    def match_route(self, path: str) -> Any:
        name = "other" if path.startswith("/other") else "front"
        return path, SimpleNamespace(deployment_id=SimpleNamespace(name=name)), False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers = [name for name, _ in scope["headers"]]


@pytest.mark.spec("J8")
async def test_other_applications_of_the_cluster_are_left_to_serve() -> None:
    """What they fail with is no front's death, and its bound on a request is theirs."""
    serve = ServesTwo()
    async with around(serve) as client:
        lifts_bound = {"x-request-timeout-seconds": "5"}
        ours = await client.get("/health", headers=lifts_bound)
        assert b"x-request-timeout-seconds" not in serve.headers
        with pytest.raises(AssertionError):  # of httpx: no response was begun
            await client.get("/other", headers=lifts_bound)
        assert b"x-request-timeout-seconds" in serve.headers
    assert ours.status_code == 503


async def test_response_that_was_sent_is_left_alone() -> None:
    async def answers(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 418, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})

    async with around(answers) as client:
        answer = await client.get("/")
    assert (answer.status_code, answer.content) == (418, b"x")


@pytest.mark.spec("J8")
@pytest.mark.parametrize(
    ("status", "given", "told"),
    [
        (503, [], "10"),
        (429, [], "10"),
        (503, [(b"Retry-After", b"7")], "7"),
        (429, [(b"retry-after", b"0")], "0"),
        (500, [], None),
        (200, [], None),
    ],
)
async def test_temporary_refusal_of_serve_itself_says_when_to_come_back(
    status: int, given: list[tuple[bytes, bytes]], told: str | None
) -> None:
    async def answers(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": given})
        await send({"type": "http.response.body", "body": b"x"})

    async with around(answers) as client:
        answer = await client.get("/")
    assert (answer.status_code, answer.content) == (status, b"x")
    assert answer.headers.get_list("retry-after") == ([told] if told else [])


class Serve:
    """Serve's proxy: a request waits in its router until a front takes it."""

    def __init__(self, is_taken: bool) -> None:
        self.is_taken, self.was_cancelled, self.answers = is_taken, False, asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        serve_context._serve_request_context.set(_RequestContext(_internal_request_id="one"))
        task = asyncio.current_task()
        if not self.is_taken:
            serve_context._add_request_pending_assignment("one", "its response", task)
        try:
            await self.answers.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True  # and Serve ends the request without a response
            return
        finally:
            serve_context._remove_request_pending_assignment("one", "its response")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"late"})


@pytest.mark.spec("J8")
async def test_request_that_no_front_takes_in_time_is_503_with_when_to_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proxy, "TAKEN_S", SOON_S)
    serve = Serve(is_taken=False)
    async with around(serve) as client:
        answer = await client.get("/v1/models")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
    assert answer.json()["error"]["code"] == "front_away"
    assert serve.was_cancelled, "no front gets it later"


@pytest.mark.spec("J8")
async def test_request_that_a_front_has_taken_may_last(monkeypatch: pytest.MonkeyPatch) -> None:
    serve, looks = Serve(is_taken=True), ray_internals.waits_for_replica

    def looked(context: Context) -> bool:
        serve.answers.set()  # later than the bound
        return looks(context)

    monkeypatch.setattr(proxy, "TAKEN_S", SOON_S)
    monkeypatch.setattr(ray_internals, "waits_for_replica", looked)
    async with around(serve) as client:
        answer = await client.get("/v1/models")
    assert (answer.status_code, answer.content) == (200, b"late")


@pytest.mark.spec("J8")
async def test_client_that_leaves_a_request_that_waits_for_a_front_ends_it() -> None:
    serve = Serve(is_taken=False)
    async with around(serve) as client:
        asking = asyncio.ensure_future(client.get("/v1/models"))
        pending = serve_context._requests_pending_assignment
        await eventually(lambda: "one" in pending)
        asking.cancel()
        await asyncio.wait({asking})
    assert serve.was_cancelled and "one" not in pending


@pytest.mark.spec("L3")
@pytest.mark.parametrize(("given", "is_kept"), [(b"mine-1", True), (b"\xff", False)])
async def test_request_id_that_is_not_ascii_does_not_reach_serve(
    given: bytes, is_kept: bool
) -> None:
    seen: list[Any] = []

    async def answers(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend(value for name, value in scope["headers"] if name == b"x-request-id")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    async with around(answers) as client:
        await client.get("/", headers=[(b"x-request-id", given)])
    assert seen == ([given] if is_kept else [])


@pytest.mark.spec("L3")
@pytest.mark.parametrize(
    "name",
    [
        "serve_multiplexed_model_id",
        "serve-multiplexed-model-id",
        "x-session-id",
        "x_session_id",
        "traceparent",
    ],
)
async def test_header_that_serve_cannot_decode_is_400_by_name_and_any_other_value_reaches_it(
    name: str,
) -> None:
    seen: list[bytes] = []

    async def answers(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend(value for key, value in scope["headers"] if key == name.encode())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    async with around(answers) as client:
        refused = await client.get("/", headers=[(name.encode(), b"\xff\xfe")])
        served = await client.get("/", headers=[(name.encode(), "é".encode())])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
    assert (served.status_code, seen) == (200, ["é".encode()])


@pytest.mark.spec("L3", "J8")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/health"])
@pytest.mark.parametrize(
    "header",
    [
        (b"x-request-timeout-seconds", b"0"),
        (b"x-request-timeout-seconds", b"\xff"),
        (b"X-Request-Disconnect-Disabled", b"?1"),
    ],
)
async def test_header_by_which_a_client_would_steer_serve_does_not_reach_it(
    path: str, header: tuple[bytes, bytes]
) -> None:
    seen: list[bytes] = []

    async def answers(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend(name for name, _ in scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    async with around(answers) as client:
        answer = await client.post(path, headers=[header, (b"x-other", b"kept")])
    assert answer.status_code == 200
    assert b"x-other" in seen and not proxy.CONTROLS & set(seen)


class Front:
    """Says at once, as Serve's proxy passes it on, where the stream is; then how it ended, once
    `told` is set."""

    def __init__(self, place: str, last: bytes = b"") -> None:
        self.place, self.last, self.told = place, last, asyncio.Event()
        self.readers: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.readers += [v for k, v in scope["headers"] if k == side_stream.READER.encode()]
        headers = [(b"content-type", b"text/event-stream")]
        headers.append((messages.SIDE_STREAM.encode(), self.place.encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self.told.wait()
        await send({"type": "http.response.body", "body": self.last, "more_body": bool(self.last)})
        if self.last:
            await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def held_by_replica(engine: StreamingEngine, front: Front) -> AsyncIterator[None]:
    """A replica asks the engine, and says to the front where the stream is and when it ended."""
    async with serving(engine) as path:
        link = EngineLink("m", TicketId("t"), path)
        parts = link.stream("POST", "/v1/x", {messages.SIDE_STREAM: "w"}, b"{}")
        head = await anext(parts)
        assert isinstance(head, messages.ResponseHead)
        front.place = head.headers[messages.SIDE_STREAM]

        async def hold() -> None:
            with contextlib.suppress(EngineLost):
                await anext(parts, None)
            front.told.set()

        holding = asyncio.ensure_future(hold())
        yield
        holding.cancel()
        await asyncio.wait({holding})
        link.cut()
        await link.closed()


@pytest.mark.spec("N1")
async def test_stream_is_read_where_the_front_says_and_ends_as_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(side_stream, "reader_token", lambda: "ours")
    front, engine = Front(""), StreamingEngine(b"data: 1\n\n", b"data: 2\n\n").let_all()
    async with held_by_replica(engine, front), around(front) as client:
        answer = await client.post("/v1/x", headers={side_stream.READER: "theirs"})
    assert answer.content == b"data: 1\n\ndata: 2\n\n"
    assert messages.SIDE_STREAM not in answer.headers
    assert front.readers == [b"ours"]


@pytest.mark.spec("A19", "N1")
async def test_last_event_of_the_front_follows_a_stream_that_was_lost() -> None:
    lost = messages.stream_error(LOST)
    front = Front("", last=lost)
    async with held_by_replica(StreamingEngine(b"data: 1\n\n", breaks=True).let_all(), front):
        async with around(front) as client:
            answer = await client.post("/v1/x")
    assert answer.content in (b"data: 1\n\n" + lost, lost)  # it may break before it is read


@pytest.mark.spec("J1", "N1")
async def test_half_an_event_of_a_lost_stream_is_not_read() -> None:
    """A client would read it as one with the error event that follows, which is no JSON."""
    front, engine = Front(""), StreamingEngine(b"data: 1\n\ndata: {", b'"half', breaks=True)
    async with held_by_replica(engine, front), aclosing(side_stream.read(front.place)) as pieces:
        engine.gates[0].set()
        assert await anext(pieces) == b"data: 1\n\n"
        engine.gates[1].set()
        with pytest.raises(side_stream.SideStreamLost):
            await anext(pieces)


@pytest.mark.spec("N1")
async def test_side_stream_that_ends_well_is_read_to_its_end() -> None:
    front, engine = Front(""), StreamingEngine(b"data: 1\n\ndata: 2\n").let_all()
    async with held_by_replica(engine, front), aclosing(side_stream.read(front.place)) as pieces:
        assert b"".join([piece async for piece in pieces]) == b"data: 1\n\ndata: 2\n"


@pytest.mark.spec("A19", "N1")
async def test_stream_that_cannot_be_read_is_no_empty_success() -> None:
    front = Front("/nowhere/engine.sock w")
    front.told.set()
    async with around(front) as client:
        answer = await client.post("/v1/x")
    error = json.loads(answer.content.removeprefix(b"data: "))["error"]
    assert error["code"] == "engine_lost" and "this request's model" in error["message"]


@pytest.mark.spec("J8", "N1")
async def test_reader_goes_with_its_client() -> None:
    """Serve returns from its application when the client has left."""

    async def leaves(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(messages.SIDE_STREAM.encode(), front.place.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    front, engine = Front(""), StreamingEngine(b"data: 1\n\n")
    async with held_by_replica(engine, front):
        said: list[Any] = []

        async def send(message: Any) -> None:
            said.append(message)

        async def receive() -> Any:
            return {"type": "http.disconnect"}

        app: ASGIApp = leaves
        for middleware in middlewares():
            app = middleware.cls(app, *middleware.args, **middleware.kwargs)
        scope = {"type": "http", "method": "POST", "path": "/v1/x", "headers": []}
        await app(scope, receive, send)
    assert [message["type"] for message in said] == ["http.response.start"]


@pytest.mark.spec("L1", "N1")
def test_reader_token_of_a_node_is_one_and_for_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_internals, "session_folder", lambda: tmp_path)
    token = side_stream.reader_token()
    [file] = tmp_path.iterdir()
    assert (file.read_text(), file.stat().st_mode & 0o777) == (token, 0o600)
    side_stream._token_in.cache_clear()  # as another process
    assert side_stream.reader_token() == token and side_stream.is_reader(token)
    assert not side_stream.is_reader(None) and not side_stream.is_reader("x" * len(token))
    monkeypatch.setattr(ray_internals, "session_folder", lambda: None)
    assert not side_stream.is_reader("") and not side_stream.is_reader(token)


@pytest.mark.spec("L3", "N1")
def test_reader_token_that_finds_no_room_is_none_until_it_does_and_leaves_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "session"
    monkeypatch.setattr(ray_internals, "session_folder", lambda: folder)
    assert side_stream.reader_token() == ""
    folder.mkdir()
    with full_disk(0):
        assert side_stream.reader_token() == "" and not side_stream.is_reader("x")
    assert list(folder.iterdir()) == []
    token = side_stream.reader_token()
    assert token and side_stream.is_reader(token)
    side_stream._token_in.cache_clear()  # as another process
    with full_disk(0):
        assert side_stream.reader_token() == token
    assert len(list(folder.iterdir())) == 1
