"""What every engine's `app` does with ASGI: read a body, notice that the client leaves, answer.

    body = await asgi.read_body(receive)  # None: the client has left
    found = await asgi.until_disconnected(compute(body), receive)  # None: it left meanwhile
    await asgi.respond(send, 200, found)
    await asgi.refuse(send, 404, f"no route {scope['path']}")

Source: asgi.readthedocs.io, "HTTP & WebSocket ASGI Message Format".
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, TypeVar

from arbiter.errors import RequestError
from deployments import messages
from deployments.engines.protocol import ENDINGS, Receive, Send

T = TypeVar("T")


class BodyTooLarge(ValueError):
    """A request's body exceeds what the engine reads."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(most_bytes)
        self.most_bytes = most_bytes

    def __str__(self) -> str:
        return f"the body is larger than {self.most_bytes} bytes, the most that the engine reads"


class BadField(RequestError):
    """A request that an engine cannot answer as it is; `param` is the field at fault."""

    status_code, code = 400, "invalid_request"

    def __init__(self, param: str, message: str) -> None:
        super().__init__(param, message)
        self.param, self.message = param, message

    def __str__(self) -> str:
        return self.message


class RequestFailed(RequestError):
    """An engine's application failed with a request, and goes on with others."""

    status_code, code = 500, "engine_failed"

    def __str__(self) -> str:
        return (
            "the engine failed with this request and goes on; the cause is in its log,"
            " /tmp/ray/session_latest/logs/engine-TICKET.log on its node"
        )


class TypedFailures(AbstractAsyncContextManager["TypedFailures", bool]):
    """Wraps the `send` of an application that is not ours: what fails there with a request
    reaches the client as OpenAI's error object, so that it can read every error alike. That is a
    plain 500 of the application's framework, or an exception before it has answered."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._has_begun = self._is_replaced = False

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._has_begun = True
            if message["status"] == 500 and not _is_json(message["headers"]):
                self._is_replaced = True
                return await refuse_request(self._send, RequestFailed())
        if not self._is_replaced:
            await self._send(message)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        """Answers an error in place of the application. After an answer has begun the server notes
        the error, and closes what is not whole."""
        if self._has_begun or error is None or isinstance(error, ENDINGS):
            return False
        sys.excepthook(type(error), error, error.__traceback__)
        await refuse_request(self._send, RequestFailed())
        return True


def _is_json(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(
        name.lower() == b"content-type" and b"json" in value.lower() for name, value in headers
    )


async def read_body(receive: Receive, most_bytes: int | None = None) -> bytes | None:
    """The whole body, or None when the client leaves before it has sent all of it. Without
    `most_bytes` the front's bound holds. Raises BodyTooLarge."""
    parts: list[bytes] = []
    size = 0
    while (message := await receive())["type"] == "http.request":
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if most_bytes is not None and size > most_bytes:
            raise BodyTooLarge(most_bytes)
        if not message.get("more_body"):
            return b"".join(parts)
    return None


def json_object(raw: bytes) -> dict[str, Any]:
    """A body that is an object. Raises BadField."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadField("body", f"not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadField("body", "expected a JSON object")
    return body


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives a body that was read once more, and then what `receive` gives."""
    unread = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Any:
        return unread.pop() if unread else await receive()

    return replayed


async def never() -> Any:
    """A `receive` for calls that an engine makes to itself: it has no client that could leave, and
    an application that hears of one would not answer."""
    await asyncio.Event().wait()


async def disconnected(receive: Receive) -> None:
    """Returns when the client has left. Only after the body was read."""
    while (await receive())["type"] != "http.disconnect":
        continue


async def until_disconnected(work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
    """The result of `work`, or None when the client leaves first, which cancels `work`. Raises what
    `work` raises. Returns only when `work` has ended."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        working.cancel()  # has no effect on work that is done
        await asyncio.wait({working, leaving})
    return None if working.cancelled() else working.result()


async def respond(send: Send, status: int, body: object) -> None:
    """Answers with `body` as JSON."""
    await _respond(send, status, json.dumps(body).encode())


async def refuse(
    send: Send, status: int, message: str, *, kind: str | None = None, param: str | None = None
) -> None:
    """Answers with OpenAI's error object. `kind`: its type, by default the status's own; `param`:
    the field at fault."""
    body = messages.error_body(message, kind=kind or messages.kind_of(status), param=param)
    await _respond(send, status, body)


async def refuse_request(send: Send, error: RequestError) -> None:
    """Answers with the status, the headers and the text of one of our own errors."""
    head, body = messages.refusal(error)
    await _respond(send, head.status, body, head.headers)


async def _respond(
    send: Send, status: int, body: bytes, more: Mapping[str, str] | None = None
) -> None:
    """Whole, with the length that the body has."""
    fields = {"content-type": "application/json"} | dict(more or {})
    headers = [(name.encode(), value.encode()) for name, value in fields.items()]
    headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_bytes(send: Send, content_type: str, body: bytes) -> None:
    """Answers with a body that is no JSON of ours, whole."""
    await _respond(send, 200, body, {"content-type": content_type})


async def stream_bytes(send: Send, content_type: str, pieces: AsyncIterator[bytes]) -> None:
    """Answers with pieces as they come, without a length."""
    headers = [(b"content-type", content_type.encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    async for piece in pieces:
        if piece:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def stream_events(send: Send, events: AsyncIterator[object]) -> None:
    """Answers with server-sent events, each a JSON object."""

    async def lines() -> AsyncIterator[bytes]:
        async for event in events:
            yield b"data: " + json.dumps(event).encode() + b"\n\n"

    await stream_bytes(send, "text/event-stream", lines())
