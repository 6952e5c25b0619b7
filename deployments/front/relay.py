"""Carry one HTTP request to its capability and the answer back.

Always a stream inside, also for answers that are not: closing the stream is what cancels the work
down to the engine when a client goes away.

A client that asked for a stream and waits for its model hears how far it is, as comments of the
event stream. Its status is 200 from then on, so what is refused later comes as an event; hence the
first second is spent in silence, in which nearly every refusal still finds its own status.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, aclosing
from dataclasses import replace
from types import TracebackType
from typing import Any

from fastapi.responses import Response, StreamingResponse
from grpc.aio import AioRpcError
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from arbiter.errors import CapabilityFailed, EngineLost, QueueFull, RequestError
from arbiter.units import TicketId
from deployments import messages

logger = logging.getLogger("ray.serve")

Parts = AsyncGenerator[messages.Part, None]
Beginnings = messages.ResponseHead | messages.FullResponse
Send = Callable[[messages.InferenceCall], Any]

# A replica or engine that dies before the client saw anything has answered nothing, so the call is
# sent again; three times in all, for replica, engine and arbiter killed together are three causes.
TRIES = 3

# When a full queue may have room again: a short answer takes about this long.
RETRY_AFTER_S = 1.0

# Of comments while a model loads, if not configured. Proxies cut connections silent for 30-60 s;
# people look at a progress bar once a second.
BEAT_S = 1.0

SSE = "text/event-stream"
STARTING = messages.Progress("starting", 0, None)


class ReplicaBroken(Exception):
    """The capability's side is gone; `error` is what the client should hear, `again` whether
    another try may help."""

    def __init__(self, error: RequestError, *, again: bool) -> None:
        super().__init__(error, again)
        self.error, self.again = error, again


async def relay(call: messages.InferenceCall, send: Send, beat_s: float = BEAT_S) -> Response:
    """The answer as a response; every failure becomes OpenAI's error object. `send` starts the
    call and returns Serve's response generator."""
    parts = _answer(call, send)
    first: messages.Part | None
    try:
        if call.wants_progress:
            beginning = FirstPart(parts, beat_s)
            first = await beginning.first()
            if first is None:
                return StreamingResponse(beginning.told(), media_type=SSE)
        else:
            first = await anext(parts)
    except ReplicaBroken as broken:
        return _plain(messages.FullResponse(*messages.refusal(broken.error)))
    if isinstance(first, messages.FullResponse):
        await parts.aclose()
        return _plain(first)
    assert isinstance(first, messages.ResponseHead), "progress comes only where it is wanted"
    return _stream(first, parts)


class FirstPart:
    """The wait for an answer to begin, by a client that likes to hear how far it is."""

    def __init__(self, parts: Parts, beat_s: float) -> None:
        self._parts, self._beat_s = parts, beat_s
        self._began_s = self._heard_s = time.monotonic()
        self._progress = STARTING
        self._next = asyncio.ensure_future(anext(parts))

    async def first(self) -> Beginnings | None:
        """None: not within a beat. Raises Broken."""
        end_s = time.monotonic() + self._beat_s
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
                    self._progress, self._heard_s = progress, time.monotonic()
            self._next = asyncio.ensure_future(anext(self._parts))

    async def told(self) -> AsyncGenerator[bytes, None]:
        """The whole event stream: comments, then the answer, also where it is a refusal."""
        try:
            yield self._comment()
            while (first := await self.first()) is None:
                yield self._comment()
            if isinstance(first, messages.FullResponse):  # its status came too late
                yield b"data: " + first.body.replace(b"\n", b" ") + b"\n\n"
            else:
                async for part in _body(self._parts):
                    yield part
        except ReplicaBroken as broken:
            yield messages.stream_error(broken.error)
        finally:
            self._next.cancel()
            await asyncio.wait({self._next})
            await self._parts.aclose()

    def _comment(self) -> bytes:
        now_s, progress = time.monotonic(), self._progress
        if progress.estimate_s is not None:
            left_s = max(0.0, progress.estimate_s - (now_s - self._heard_s))
            progress = replace(progress, estimate_s=left_s)
        return progress.line(now_s - self._began_s)


def _stream(head: messages.ResponseHead, parts: Parts) -> Response:
    headers = {k: v for k, v in head.headers.items() if k != "content-type"}
    return StreamingResponse(_body(parts), head.status, headers, media_type=SSE)


def _plain(said: messages.FullResponse) -> Response:
    headers = {k: v for k, v in said.head.headers.items() if k != "content-length"}
    return Response(said.body, said.head.status, headers)


async def _body(parts: Parts) -> AsyncGenerator[bytes, None]:
    """An SSE body; a break becomes a last event, since the status has been sent."""
    try:
        async for part in parts:
            assert isinstance(part, bytes), "one head, then bytes"
            yield part
    except ReplicaBroken as broken:
        yield messages.stream_error(broken.error)
    finally:
        await parts.aclose()


async def _answer(call: messages.InferenceCall, send: Send) -> Parts:
    """Of the first try that gives one; after its head there is no other. Raises Broken."""
    for number in range(1, TRIES + 1):
        has_begun = False
        try:
            async with aclosing(_translated(send(call), call)) as parts:
                async for part in parts:
                    has_begun = has_begun or not isinstance(part, messages.Progress)
                    yield part
            return
        except ReplicaBroken as broken:
            if has_begun or not broken.again or number == TRIES:
                raise


async def _translated(response: Any, call: messages.InferenceCall) -> Parts:
    """Left before its end, by whatever way, it cancels the work behind it. Raises Broken."""
    ended = False
    try:
        with _Border(call):
            async for part in response:
                ended = isinstance(part, messages.FullResponse)  # nothing follows
                yield part
        ended = True
    except ReplicaBroken:
        ended = True
        raise
    finally:
        if not ended:
            response.cancel()


class _Border(AbstractContextManager["_Border", None]):
    """Between Serve and us. A call may fail in Serve's words, in Ray's, in gRPC's and, by gRPC, in
    those of whatever the replica raised: here all of them become ours."""

    def __init__(self, call: messages.InferenceCall) -> None:
        self._call = call

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            raise _translate_error(error, self._call) from error


def _translate_error(error: Exception, call: messages.InferenceCall) -> ReplicaBroken:
    match error:
        case BackPressureError(args=(int(queued), int(bound), *_)):
            return ReplicaBroken(QueueFull(call.model, queued, bound, RETRY_AFTER_S), again=False)
        case DeploymentUnavailableError():
            return ReplicaBroken(CapabilityFailed(call.model, "its deployment failed"), again=False)
        case RayActorError() | AioRpcError():
            return ReplicaBroken(EngineLost(call.model, TicketId(call.request_id)), again=True)
        case RayTaskError(cause=RequestError() as cause):
            return ReplicaBroken(cause, again=messages.is_transient(cause))
        case RequestError():
            return ReplicaBroken(error, again=messages.is_transient(error))
    logger.error("request %s: %r", call.request_id, error)
    return ReplicaBroken(CapabilityFailed(call.model, type(error).__name__), again=False)
