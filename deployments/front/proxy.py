"""Middlewares of Serve's HTTP proxy, which Serve loads from the variable
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` (`arbiter serve` sets it; it is read when Ray starts).
Where it was not set, as under a plain `serve run`, we put them around each proxy ourselves
(plain_proxies). Innermost first:

- BoundedWait answers a request that no front has taken in TAKEN_S. The only bound that Serve has is
  on the whole of a request, its stream included.
- FrontBySocket sends inference, and reads of what was kept, to the front's socket, past Serve.
- SideStreams reads an event stream from its engine's socket (side_stream), past replica and front,
  where the engine is on this node.
- FrontErrors answers a request whose front died before its response began, which Serve would answer
  with a bare 500, and drops the headers in CONTROLS.
- ForFront has requests for other applications of Serve go past all of these.
- ServeErrors adds Retry-After to Serve's own refusals, and answers 400 where Serve cannot decode
  a header, which it would answer with a bare 500.

A response that has begun is cut where the front dies.
"""

import asyncio
import contextvars
import uuid
from collections.abc import Iterable
from contextlib import aclosing
from pathlib import Path

from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from arbiter.errors import EngineLost, RequestError
from arbiter.protocol import ray_internals
from deployments import messages
from deployments.front.middleware.http_middleware import HttpMiddleware
from deployments.front.sockets import front_client, front_socket, side_stream
from deployments.front.sockets.front_client import NoFront

# A front starts in two seconds, and on a busy machine in ten times as long.
TAKEN_S = 30.0
FRONT = "front"  # its deployment (ingress.Front)
# Retry-After for what Serve has not started: a start takes seconds, or never succeeds. TEMPORARY
# are the statuses that get one.
AWAY_S, TEMPORARY = 10.0, (429, 503)
# By method, how the paths begin that go by the front's socket. By way of Serve a request costs 5 ms
# more of processor time (front_socket). And Serve's queue for a response has no bound, so the front
# would hold all of a stored answer that its client has not read yet.
BY_SOCKET = {"POST": ("/v1/",), "GET": ("/v1/files/", "/v1/jobs/", "/v1/responses/")}
# Headers by which a client could lift the bound of Serve's proxy on a request, or have the work go
# on after it has left.
CONTROLS = frozenset({b"x-request-timeout-seconds", b"x-request-disconnect-disabled"})
REQUEST_ID, READER = b"x-request-id", side_stream.READER.encode()
SIDE_STREAM = messages.SIDE_STREAM.encode()


class FrontLost(RequestError):
    """The front's process died under this request."""

    code, retry_after_s = "front_lost", 2.0  # in which Serve starts another front

    def __str__(self) -> str:
        return "the front died under this request; send it again in 2 s"


class FrontAway(RequestError):
    """Serve has no front that takes requests, and has not started another in TAKEN_S."""

    code, retry_after_s = "front_away", AWAY_S

    def __str__(self) -> str:
        return (
            f"no front took this request within {TAKEN_S:.0f} s; Serve starts another by itself, "
            "or `serve status` says why not; send the request again"
        )


class BoundedWait(HttpMiddleware):
    """An ASGI middleware around Serve's proxy: a request that no front has taken within TAKEN_S is
    taken back and answered. A response may last for ever, once a front has the request."""

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        carrying = loop.create_task(_awaited(self._app, scope, receive, send), context=context)
        try:
            await asyncio.wait({carrying}, timeout=TAKEN_S)
            is_away = not carrying.done() and ray_internals.waits_for_replica(context)
            if not is_away:
                await carrying
        finally:
            carrying.cancel()
            await asyncio.wait({carrying})
        if is_away:
            head, body = messages.refusal(FrontAway())
            await Response(body, head.status, head.headers)(scope, receive, send)


async def _awaited(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    await app(scope, receive, send)


class UndecodableHeader(RequestError):
    """A header that Serve's proxy reads is not UTF-8."""

    status_code, code = 400, "invalid_request"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.param = name

    def __str__(self) -> str:
        return (
            f"`{self.param}`: the value of this header is not UTF-8, as which Ray Serve reads it;"
            " encode it as UTF-8 or leave it out"
        )


class FrontErrors(HttpMiddleware):
    """An ASGI middleware around Serve's proxy: a request whose front died before its response began
    is answered with FrontLost, and Serve gets none of a client's headers in CONTROLS."""

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name, value) for name, value in scope["headers"] if name not in CONTROLS]
        has_begun = False

        async def noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        await self._app({**scope, "headers": headers}, receive, noted)
        if not has_begun:
            await _refuse(FrontLost(), scope, receive, send)


class ServeErrors(HttpMiddleware):
    """An ASGI middleware around Serve's proxy, right for every application behind it: each 429 and
    503 that goes out has a Retry-After, and no header that Serve cannot decode is a 500."""

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (name, value)
            for name, value in scope["headers"]
            if name != REQUEST_ID or value.isascii()
        ]
        if (name := _undecodable(headers)) is not None:
            await _refuse(UndecodableHeader(name), scope, receive, send)
            return

        async def send_with_retry_after(message: Message) -> None:
            await send(_with_retry_after(message))

        await self._app({**scope, "headers": headers}, receive, send_with_retry_after)


def _with_retry_after(message: Message) -> Message:
    """The message, with a Retry-After where it begins a temporary refusal that has none: a refusal
    of Serve's own, which does not know when its deployment is back."""
    if message.get("status") not in TEMPORARY:
        return message
    headers = message.get("headers", ())
    if any(name.lower() == b"retry-after" for name, _ in headers):
        return message
    return {**message, "headers": [*headers, (b"retry-after", b"%d" % AWAY_S)]}


async def _refuse(error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
    head, body = messages.refusal(error)
    await Response(body, head.status, head.headers)(scope, receive, send)


def _undecodable(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The first header that Serve's proxy would fail to decode, by its name."""
    for name, value in headers:
        if name.replace(b"_", b"-") in ray_internals.headers_of_proxy():
            try:
                value.decode()
            except UnicodeDecodeError:
                return name.decode()
    return None


class FrontBySocket:
    """An ASGI middleware around Serve's proxy: requests for inference, and for what was kept, go to
    the front's socket where there is one. It gives them an id, as Serve does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (path := _socket_for(scope)) is None:
            await self._app(scope, receive, send)
            return
        request_id = next((value for name, value in scope["headers"] if name == REQUEST_ID), b"")
        named = request_id or str(uuid.uuid4()).encode()

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"].append((REQUEST_ID, named))
            await send(message)

        headers = scope["headers"] if request_id else [*scope["headers"], (REQUEST_ID, named)]
        try:
            first = await receive()
            marked = {**scope, "headers": headers}
            with ray_internals.counted_by_proxy(self._app):
                await front_client.carry(path, marked, first, receive, with_id)
        except NoFront:
            await self._app(scope, _from_the_first(first, receive), send)


def _from_the_first(first: Message, receive: Receive) -> Receive:
    """Returns a `receive` that gives `first`, which was read already, and then the rest."""
    chunks = [first]

    async def received() -> Message:
        return chunks.pop() if chunks else await receive()

    return received


def _socket_for(scope: Scope) -> Path | None:
    """Returns the path of the front's socket; None for a request that goes by Serve."""
    if scope["type"] != "http" or not scope["path"].startswith(BY_SOCKET.get(scope["method"], ())):
        return None
    return front_socket.place()


class SideStreams(HttpMiddleware):
    """An ASGI middleware around Serve's proxy: where the head of the front's response names a side
    stream, the client gets the bytes of that stream, then what the front itself sends."""

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [pair for pair in scope["headers"] if pair[0] != READER]
        marked = {**scope, "headers": [*headers, (READER, side_stream.reader_token().encode())]}
        carried = _ProxiedResponse(send)
        try:
            await self._app(marked, receive, carried)
        finally:
            await carried.close()


class ForFront(HttpMiddleware):
    """An ASGI middleware around Serve's proxy: only requests for the front pass the middlewares
    above. How long other applications of the cluster take to start, and what their errors mean, is
    not known here, so Serve alone handles requests for them."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(app)
        self._front = FrontErrors(SideStreams(FrontBySocket(BoundedWait(app))))

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"][len(scope.get("root_path", "")) :]
        deployment = ray_internals.deployment_at(self._app, path)
        app = self._front if deployment in (None, FRONT) else self._app
        await app(scope, receive, send)


class _ProxiedResponse:
    """The `send` of one response: it sends on the side stream that the response's head names."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._pump: asyncio.Task[None] | None = None
        self._is_explained = False  # the front has sent a reason why the stream ended early

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [pair for pair in message["headers"] if pair[0] != SIDE_STREAM]
            places = [value for name, value in message["headers"] if name == SIDE_STREAM]
            await self._send({**message, "headers": headers})
            if places:
                self._pump = asyncio.ensure_future(self._carry(places[0].decode()))
            return
        if self._pump is not None:
            await asyncio.wait({self._pump})
            self._is_explained = self._is_explained or bool(message.get("body"))
            if self._pump.exception() and not self._is_explained:
                lost = messages.stream_error(EngineLost("this request's model"))
                message = {**message, "body": lost}
        await self._send(message)

    async def _carry(self, place: str) -> None:
        """Raises SideStreamLost."""
        async with aclosing(side_stream.read(place)) as pieces:
            async for piece in pieces:
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def close(self) -> None:
        if self._pump is not None and not self._pump.done():
            self._pump.cancel()
            await asyncio.wait({self._pump})


def middlewares() -> list[Middleware]:
    """Called by Serve in each proxy, outermost last."""
    return [Middleware(ForFront), Middleware(ServeErrors)]
