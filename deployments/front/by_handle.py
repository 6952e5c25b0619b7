"""The front's application called by a Serve handle: the same routes, keys, bounds and errors as
over HTTP, without a socket or Serve's proxy in between."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from urllib.parse import unquote

import anyio
from anyio.streams.memory import MemoryObjectSendStream
from starlette.types import ASGIApp, Message, Scope

from arbiter.errors import RequestError
from deployments.messages import ResponseHead

BODY = "http.response.body"
# Pieces that wait for their reader. One is a token's event: the engine is a line of text ahead.
AHEAD_MOST = 16


@dataclass(frozen=True, slots=True)
class HandleRequest:
    """One HTTP request as a handle carries it."""

    method: str
    target: str  # the path with its query
    headers: tuple[tuple[str, str], ...]  # names in lower case
    body: bytes


class ResponseBroken(RequestError):
    """The response ended before its end: over HTTP the connection breaks off."""

    code, retry_after_s = "response_broken", 1.0  # as of an engine that died

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.target = target

    def __str__(self) -> str:
        return f"the response of {self.target} broke off; send the request again"


async def respond(
    app: ASGIApp, request: HandleRequest
) -> AsyncGenerator[ResponseHead | bytes, None]:
    """The head of the response, then its bytes as they are made. Closing it cancels the work, as a
    client that hangs up does. Raises ResponseBroken."""
    outlet, inlet = anyio.create_memory_object_stream[Message](AHEAD_MOST)
    running = asyncio.create_task(_run(app, request, outlet))
    is_complete = False
    try:
        async for message in inlet:
            is_complete = message["type"] == BODY and not message["more_body"]
            if message["type"] != BODY:
                yield _head(message)
            elif message["body"]:
                yield message["body"]
        await asyncio.wait({running})
        if not is_complete:
            raise ResponseBroken(request.target) from running.exception()
    finally:
        inlet.close()
        running.cancel()
        await asyncio.wait({running})


async def _run(
    app: ASGIApp, request: HandleRequest, outlet: MemoryObjectSendStream[Message]
) -> None:
    is_read = False

    async def receive() -> Message:
        nonlocal is_read
        if is_read:
            await asyncio.Event().wait()  # until the task is cancelled: nothing else follows
        is_read = True
        return {"type": "http.request", "body": request.body, "more_body": False}

    async def send(message: Message) -> None:
        await outlet.send({"body": b"", "more_body": False, **message})

    with outlet:
        await app(_scope(request), receive, send)


def _scope(request: HandleRequest) -> Scope:
    path, _, query = request.target.partition("?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in request.headers],
        "client": None,
        "server": None,
    }


def _head(message: Message) -> ResponseHead:
    headers = {
        name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]
    }
    return ResponseHead(message["status"], headers)
