"""Requests over the front's own socket: as through Serve, with nothing of it in between."""

import asyncio
import errno
import os
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from arbiter.protocol import ray_internals
from deployments.front.proxy import FrontBySocket, middlewares
from deployments.front.sockets import front_client, front_socket
from deployments.front.sockets.front_socket import FrontSocket
from tests.support.waits import eventually

pytestmark = pytest.mark.spec("N1")
WITHIN_S = 60.0  # for what takes some thousandths of a second


class Application:
    """Answers with what it was asked, piece by piece once a test lets it, and notes its end."""

    def __init__(self) -> None:
        self.go, self.begun, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.cancelled = False
        self.asked: list[tuple[str, bytes, dict[bytes, bytes]]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message.get("more_body"):
                break
        self.asked.append((scope["path"], body, dict(scope["headers"])))
        self.begun.set()
        try:
            await self.go.wait()
            headers = [(b"content-type", b"text/plain")]
            await send({"type": "http.response.start", "status": 201, "headers": headers})
            for piece in (b"a", b"b" * 300_000):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        finally:
            self.ended.set()


async def by_serve(scope: Scope, receive: Receive, send: Send) -> None:
    """Serve's proxy. Answers with the body."""
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message["body"]
        if not message.get("more_body"):
            break
    await send({"type": "http.response.start", "status": 299, "headers": []})
    await send({"type": "http.response.body", "body": body})


class Client:
    """One ASGI call of the proxy's middlewares, as its server makes it."""

    def __init__(self, path: str = "/v1/x", *bodies: bytes, **headers: str) -> None:
        sent = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
        self.scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(),
            "query_string": b"", "headers": [(b"host", b"h"), *sent],
        }  # fmt: skip
        self.bodies = list(bodies or (b"{}",))
        self.left = asyncio.Event()
        self.said: list[Message] = []

    async def receive(self) -> Any:
        if self.bodies:
            body = self.bodies.pop(0)
            return {"type": "http.request", "body": body, "more_body": bool(self.bodies)}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.said.append(message)

    async def call(self, app: Any) -> "Client":
        await app(self.scope, self.receive, self.send)
        return self

    @property
    def status(self) -> int:
        return int(self.said[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(m["body"] for m in self.said[1:])


@pytest.fixture
def proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(ray_internals, "session_folder", lambda: tmp_path)
    app: Any = by_serve
    for middleware in middlewares():
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)
    return app


@asynccontextmanager
async def opened(application: Application) -> AsyncIterator[FrontSocket]:
    front = FrontSocket(application)
    await front.open()
    yield front
    await front.close()


async def test_request_goes_by_the_socket_and_its_answer_comes_whole(proxy: Any) -> None:
    application = Application()
    application.go.set()
    async with opened(application):
        for number in range(2):
            client = await Client("/v1/x", b"one", b"two", x_request_id=f"r{number}").call(proxy)
            assert (client.status, client.body) == (201, b"a" + b"b" * 300_000)
            assert (b"x-request-id", b"r%d" % number) in client.said[0]["headers"]
            assert not client.said[-1].get("more_body")
    assert [body for _, body, _ in application.asked] == [b"onetwo", b"onetwo"]


@pytest.mark.spec("J8", "L3")
async def test_answer_before_the_end_of_its_body_reaches_a_client_that_still_sends(
    proxy: Any,
) -> None:
    """The front, in a thread here, has ended with the request when its next piece is sent."""
    is_open, is_answered, is_over = threading.Event(), threading.Event(), threading.Event()

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 413, "headers": []})
        await send({"type": "http.response.body", "body": b"too large"})
        for _ in range(4):
            await asyncio.sleep(0)  # what its server does to the connection is done
        is_answered.set()

    async def serve() -> None:
        front = FrontSocket(refuse)
        await front.open()
        is_open.set()
        await asyncio.to_thread(is_over.wait, WITHIN_S)
        await front.close()

    class Sender(Client):
        async def receive(self) -> Any:
            if len(self.bodies) == 1:
                assert is_answered.wait(WITHIN_S)  # this loop stands: the answer is not read yet
            return await super().receive()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert is_open.wait(WITHIN_S)
        client = await Sender("/v1/x", b"one", b"two").call(proxy)
    finally:
        is_over.set()
        thread.join(WITHIN_S)
    assert (client.status, client.body) == (413, b"too large")


async def test_request_without_an_id_gets_one(proxy: Any) -> None:
    application = Application()
    application.go.set()
    async with opened(application):
        client = await Client().call(proxy)
    told = dict(client.said[0]["headers"])[b"x-request-id"]
    assert application.asked[0][2][b"x-request-id"] == told and len(told) == 36


@pytest.mark.parametrize("path", ["/arbiter/state", "/v1/x"])
async def test_all_else_goes_by_serve(proxy: Any, path: str) -> None:
    async with opened(Application()):
        assert (await Client("/arbiter/state").call(proxy)).status == 299
    client = await Client(path, b"one", b"two", b"three").call(proxy)
    assert (client.status, client.body) == (299, b"onetwothree")  # the front is gone


@pytest.mark.spec("J4", "J8")
@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/files/f/content"), ("POST", "/v1/x")])
async def test_answer_that_its_client_does_not_read_is_held_in_bounds(
    proxy: Any, method: str, path: str
) -> None:
    sent_bytes, whole_bytes, piece = 0, 64 << 20, bytes(64 << 10)

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal sent_bytes
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while sent_bytes < whole_bytes:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            sent_bytes += len(piece)
        await send({"type": "http.response.body", "body": b""})

    client, reads, is_full = Client(path, b""), asyncio.Event(), asyncio.Event()
    client.scope["method"] = method
    take = client.send

    async def slowly(message: Message) -> None:
        if message["type"] == "http.response.body" and not reads.is_set():
            is_full.set()
            await reads.wait()
        await take(message)

    client.send = slowly  # type: ignore[method-assign]
    async with opened(application):  # type: ignore[arg-type]
        calling = asyncio.ensure_future(client.call(proxy))
        await is_full.wait()
        before = -1
        while before != sent_bytes:  # until the application is stopped
            before = sent_bytes
            for _ in range(1_000):
                await asyncio.sleep(0)
        assert sent_bytes < 4 << 20
        reads.set()
        await calling
    assert len(client.body) == whole_bytes


class CountingProxy:
    """Serve's proxy, as far as it counts what it carries."""

    ongoing_count = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("it goes by the socket")

    def _ongoing_requests_start(self) -> None:
        self.ongoing_count += 1

    def _ongoing_requests_end(self) -> None:
        self.ongoing_count -= 1


@pytest.mark.usefixtures("proxy")
async def test_proxy_that_drains_sees_the_requests_that_go_by_the_socket() -> None:
    application, serves = Application(), CountingProxy()
    async with opened(application):
        calling = asyncio.ensure_future(Client().call(FrontBySocket(serves)))
        await asyncio.wait_for(application.begun.wait(), 60)
        assert serves.ongoing_count == 1
        application.go.set()
        assert (await calling).status == 201
    assert serves.ongoing_count == 0


@pytest.mark.spec("J8")
async def test_client_that_leaves_cancels_the_work(proxy: Any) -> None:
    application, client = Application(), Client()
    async with opened(application):
        calling = asyncio.ensure_future(client.call(proxy))
        await asyncio.wait_for(application.begun.wait(), 60)
        client.left.set()
        await asyncio.wait_for(application.ended.wait(), 60)
        await calling
    assert application.cancelled


@pytest.mark.spec("J9")
async def test_front_that_ends_answers_what_it_has_and_takes_no_more(proxy: Any) -> None:
    application, client = Application(), Client()
    front = FrontSocket(application)
    await front.open()
    calling = asyncio.ensure_future(client.call(proxy))
    await asyncio.wait_for(application.begun.wait(), 60)
    closing = asyncio.ensure_future(front.close())
    await asyncio.sleep(0)
    assert (await Client().call(proxy)).status == 299
    assert not closing.done()
    application.go.set()
    await closing
    assert (await calling).status == 201


def raw(*, says: bytes = b"") -> socket.socket:
    """A connection of this user's, made by the kernel before the front's event loop runs again."""
    conn = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    conn.connect(str(front_socket.place()))
    conn.send(says)
    conn.setblocking(False)
    return conn


async def all_of(conn: socket.socket) -> bytes:
    said = b""
    with conn:
        async with asyncio.timeout(60):
            while piece := await asyncio.get_running_loop().sock_recv(conn, 1 << 20):
                said += piece
    return said


REQUEST = b"POST /v1/x HTTP/1.1\r\nhost: h\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}"


async def with_a_connection(application: Application) -> tuple[FrontSocket, socket.socket]:
    """A front that answers each request, and a connection that it has accepted."""
    application.go.set()
    front = FrontSocket(application)
    await front.open()
    accepted = raw()
    await eventually(lambda: front._state.connections)
    return front, accepted


@pytest.mark.spec("J9")
@pytest.mark.usefixtures("proxy")
async def test_front_that_ends_answers_what_it_has_not_accepted_or_read_yet() -> None:
    application = Application()
    front, accepted = await with_a_connection(application)
    waiting = [raw(says=REQUEST) for _ in range(3)]
    closing = asyncio.ensure_future(front.close())
    for conn in waiting:
        assert (await all_of(conn)).startswith(b"HTTP/1.1 201")
    assert not closing.done(), "a request may be on its way"
    accepted.send(REQUEST)
    assert (await all_of(accepted)).startswith(b"HTTP/1.1 201")
    await asyncio.wait_for(closing, 60)
    assert len(application.asked) == 4


@pytest.mark.spec("J9")
@pytest.mark.usefixtures("proxy")
async def test_front_that_ends_short_of_descriptors_answers_what_it_has(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    application, fails = Application(), [errno.ECONNABORTED, None, errno.EMFILE]
    front, accepted = await with_a_connection(application)
    first, second = raw(says=REQUEST), raw(says=REQUEST)
    accept = socket.socket.accept

    def short(listening: socket.socket) -> tuple[socket.socket, Any]:
        if number := fails.pop(0):
            raise OSError(number, os.strerror(number))
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", short)
    closing = asyncio.ensure_future(front.close())
    assert (await all_of(first)).startswith(b"HTTP/1.1 201")
    with pytest.raises(ConnectionResetError):  # for which the proxy answers front_lost
        await all_of(second)
    accepted.send(REQUEST)
    assert (await all_of(accepted)).startswith(b"HTTP/1.1 201")
    await asyncio.wait_for(closing, 60)
    assert "Too many open files" in caplog.text


@pytest.mark.spec("J9")
@pytest.mark.usefixtures("proxy")
async def test_front_that_ends_does_not_wait_for_a_connection_without_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(front_socket, "HEAD_S", 0.01)
    front = FrontSocket(Application())
    await front.open()
    silent = raw()
    await asyncio.wait_for(front.close(), 60)
    assert await all_of(silent) == b""


@pytest.mark.spec("J8")
async def test_death_before_the_response_is_503_with_when_to_come_back(proxy: Any) -> None:
    async def dies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    server = await asyncio.start_unix_server(dies, front_socket.place())
    client = await Client().call(proxy)
    server.close()
    assert client.status == 503 and b"front_lost" in client.body


@pytest.mark.spec("L1")
async def test_socket_is_for_this_user_alone_and_the_last_front_has_it(proxy: Any) -> None:
    first, second = Application(), Application()
    first.go.set()
    second.go.set()
    earlier = FrontSocket(first)
    await earlier.open()
    assert (await Client().call(proxy)).status == 201
    async with opened(second):
        path = front_socket.place()
        assert path is not None and path.stat().st_mode & 0o777 == 0o600
        await earlier.close()
        assert (await Client().call(proxy)).status == 201
    assert (len(first.asked), len(second.asked)) == (1, 1)


@pytest.mark.spec("L1")
async def test_socket_of_another_user_gets_no_byte_of_a_request(
    proxy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel says whose process listens; here it says that of a stranger."""
    application = Application()
    application.go.set()
    async with opened(application):
        monkeypatch.setattr(front_client, "peer_uid", lambda conn: 65_534)
        assert (await Client().call(proxy)).status == 299
    assert not application.asked


@pytest.mark.spec("J8")
async def test_request_to_change_the_protocol_is_answered_over_its_empty_body(proxy: Any) -> None:
    """Java's client asks for HTTP/2 so; the proxy's server hands over no byte of its body."""
    application = Application()
    application.go.set()
    client = Client("/v1/x", b"", content_length="2", connection="Upgrade", upgrade="h2c")
    async with opened(application):
        await asyncio.wait_for(client.call(proxy), 60)
    assert client.status == 201
    [(_, body, headers)] = application.asked
    assert body == b"" and headers[b"content-length"] == b"0"
