"""From the parts of a response to an HTTP response.

A client that asked for an event stream and waits for its model gets progress as comments of that
stream. The status is 200 from then on, so a later refusal comes as an event. The first second
therefore passes in silence: nearly every refusal still gets a status of its own.

Other streams (speech, images) have no place for comments or error events. A stream that breaks ends
without its last chunk, which HTTP clients report as an incomplete response.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, aclosing, nullcontext
from dataclasses import replace
from typing import Any, Protocol

from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from arbiter.errors import CapabilityFailed, RequestError
from deployments import messages
from deployments.front.inference.service import Parts
from deployments.front.sockets import side_stream

FirstPart = messages.ResponseHead | messages.FullResponse

# Between two comments while a model loads, if not configured. Proxies cut connections silent for
# 30-60 s; people look at a progress bar once a second.
PROGRESS_S = 1.0

SSE = "text/event-stream"


async def relay(
    parts: Parts, model: str, *, wants_progress: bool, progress_s: float = PROGRESS_S
) -> Response:
    """Makes the HTTP response of these parts. `model`: as it was asked for, for errors. Raises
    RequestError where no status has been sent yet."""
    if wants_progress:
        awaited = AwaitedResponse(parts, model, progress_s)
        first = await awaited.first_part()
        if first is None:
            return ClosingStream(awaited.events(), media_type=SSE, holds=awaited)
    else:
        part = await anext(parts)
        assert isinstance(part, messages.ResponseHead | messages.FullResponse), "no progress here"
        first = part
    if isinstance(first, messages.FullResponse):
        await parts.aclose()
        return whole_response(first)
    return ClosingStream(_body(first, parts), first.status, first.headers, holds=parts)


def event_stream(
    events: AsyncGenerator[bytes, None], holds: "Closable", check: Callable[[], object]
) -> "ClosingStream":
    """The response that streams `events` and closes `holds` at its end. `check` is called before
    each event; a RequestError of it or of the events becomes the last event."""
    allowed = while_allowed(events, check)
    return ClosingStream(_with_error_event(allowed), media_type=SSE, holds=holds)


async def while_allowed(
    pieces: AsyncGenerator[bytes, None], check: Callable[[], object]
) -> AsyncGenerator[bytes, None]:
    """Yields the same pieces, with a call of `check` before each: it raises once the caller's key
    is no longer valid. Raises what `check` raises."""
    async with aclosing(pieces):
        async for piece in pieces:
            check()
            yield piece


def closing_json(value: Any, holds: "Closable") -> "ClosingStream":
    """A JSON response of one piece, which closes `holds` when its client has it."""
    body = bytes(JSONResponse(value).body)

    async def piece() -> AsyncGenerator[bytes, None]:
        yield body

    headers = {"content-length": str(len(body))}
    return ClosingStream(piece(), 200, headers, "application/json", holds=holds)


async def after_first(pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Reads the first piece and returns a generator of all, so that an error before the first piece
    still gets a status of its own. Raises what reading raises."""
    first = await anext(pieces, b"")

    async def whole() -> AsyncGenerator[bytes, None]:
        async with aclosing(pieces):
            yield first
            async for piece in pieces:
                yield piece

    return whole()


async def _with_error_event(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The same events; a RequestError becomes the last one, since the status has been sent."""
    try:
        async with aclosing(events):
            async for event in events:
                yield event
    except RequestError as error:
        yield messages.stream_error(error)


class Closable(Protocol):
    async def aclose(self) -> None: ...


class ClosingStream(StreamingResponse):
    """A stream that closes the generator of its parts when the client leaves. Starlette leaves that
    to the garbage collector where a part is being sent, and until then the engine would work on.

    `holds`: what the generator closes at its end. The response closes it as well, because a
    generator that was never started does not run its `finally`."""

    body_iterator: AsyncGenerator[Any, None]

    def __init__(
        self,
        parts: AsyncGenerator[Any, None],
        status_code: int = 200,
        headers: Mapping[str, str] | None = None,
        media_type: str | None = None,
        *,
        holds: Closable | None = None,
    ) -> None:
        super().__init__(parts, status_code, headers, media_type)
        self._holds = holds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as ends:
            if self._holds is not None:
                ends.push_async_callback(self._holds.aclose)
            ends.push_async_callback(self.body_iterator.aclose)
            await super().__call__(scope, receive, send)


class AwaitedResponse:
    """A response that has not begun, and whose client reads progress comments meanwhile."""

    def __init__(self, parts: Parts, model: str, progress_s: float) -> None:
        self._parts, self._model, self._progress_s = parts, model, progress_s
        self._began_s = self._progress_at_s = time.monotonic()
        self._progress = messages.STARTING
        self._next = asyncio.ensure_future(anext(parts))

    async def first_part(self) -> FirstPart | None:
        """Waits for the first part; None: it did not come within the time between two comments.
        Raises RequestError."""
        end_s = time.monotonic() + self._progress_s
        while True:
            try:
                await asyncio.wait({self._next}, timeout=max(0.0, end_s - time.monotonic()))
            except asyncio.CancelledError:
                self._next.cancel()
                raise
            if not self._next.done():
                return None
            match self._next.result():
                case messages.ResponseHead() | messages.FullResponse() as first:
                    return first
                case messages.Progress() as progress:
                    self._progress, self._progress_at_s = progress, time.monotonic()
            self._next = asyncio.ensure_future(anext(self._parts))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The whole event stream: comments, then the response, also where it is a refusal."""
        try:
            yield self._comment()
            while (first := await self.first_part()) is None:
                yield self._comment()
            if isinstance(first, messages.FullResponse):  # a status of 200 was sent already
                yield messages.response_event(first.head, first.body)
            elif not first.is_event_stream:
                content_type = first.headers.get("content-type", "no content type")
                yield messages.stream_error(
                    CapabilityFailed(self._model, f"it streams {content_type}")
                )
            else:
                read = _with_side_stream(first, self._parts, self._model)
                async for part in _body(first, read):
                    yield part
        except RequestError as error:
            yield messages.stream_error(error)
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Ends the wait and closes the response."""
        self._next.cancel()
        await asyncio.wait({self._next})
        await self._parts.aclose()

    def _comment(self) -> bytes:
        now_s, progress = time.monotonic(), self._progress
        if progress.estimate_s is not None:
            left_s = max(0.0, progress.estimate_s - (now_s - self._progress_at_s))
            progress = replace(progress, estimate_s=left_s)
        return progress.line(now_s - self._began_s)


class WholeResponse(Response):
    """A response of one piece. `sending` makes the context in which it is sent. The context lasts
    until the client has read nearly all of it: uvicorn takes the piece into its buffer at once, and
    lets the empty last message wait until the buffer has room."""

    sending: Callable[[], AbstractContextManager[None]] = nullcontext

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = {"status": self.status_code, "headers": self.raw_headers}
        with self.sending():
            await send({"type": "http.response.start", **head})
            await send({"type": "http.response.body", "body": self.body, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


def whole_response(response: messages.FullResponse) -> WholeResponse:
    """A response of one piece."""
    headers = {k: v for k, v in response.head.headers.items() if k != "content-length"}
    return WholeResponse(response.body, response.head.status, headers)


async def _with_side_stream(head: messages.ResponseHead, parts: Parts, model: str) -> Parts:
    """Yields the bytes of a stream. Where `head` names a side stream, its bytes are read here, not
    by the proxy, to which the head of the response was sent before this one came. Where the side
    stream is lost, `parts` raise the cause. Raises RequestError."""
    async with aclosing(parts):
        is_lost = False
        if place := head.headers.get(messages.SIDE_STREAM):
            try:
                async with aclosing(side_stream.read(place)) as pieces:
                    async for piece in pieces:
                        yield piece
            except side_stream.SideStreamLost:
                is_lost = True
        async for part in parts:
            yield part
        if is_lost:
            raise CapabilityFailed(model, "its stream could not be read")


async def _body(head: messages.ResponseHead, parts: Parts) -> AsyncGenerator[bytes, None]:
    """The bytes of a stream. A break becomes a last event, since the status has been sent; in other
    streams it is raised, which ends the connection. Raises RequestError."""
    try:
        async for part in parts:
            assert isinstance(part, bytes), "one head, then bytes"
            yield part
    except RequestError as error:
        if not head.is_event_stream:
            raise
        yield messages.stream_error(error)
    finally:
        await parts.aclose()
