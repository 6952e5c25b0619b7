"""Carry one HTTP request to its capability and the answer back.

Always a stream inside, also for answers that are not: closing the stream is what cancels the work
down to the engine when a client goes away.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from fastapi.responses import Response, StreamingResponse
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from arbiter.errors import ArbiterUnavailable, EngineLost, QueueFull, RequestError
from arbiter.units import TicketId
from deployments import wire

Parts = AsyncGenerator[wire.Head | bytes, None]

# A replica or engine that dies before its head was sent has answered nothing, so the call is sent
# again; three times, because a kill of replica, engine and arbiter together is three causes.
TRIES = 3


@dataclass(frozen=True, slots=True)
class Broken(Exception):
    """The capability's side is gone; `error` is what the client should hear."""

    error: RequestError
    again: bool


async def relay(call: wire.Call, send: Callable[[wire.Call], Any], bound: int) -> Response:
    """The answer as a response; every failure becomes OpenAI's error object. `send` starts the
    call and returns Serve's response generator; `bound` is the queue bound, for the message."""
    for number in range(1, TRIES + 1):
        parts = _translated(send(call), call, bound)
        try:
            head = await anext(parts)
        except Broken as broken:
            if broken.again and number < TRIES:
                continue
            return _plain(*wire.refusal(broken.error))
        assert isinstance(head, wire.Head), "a capability sends its head first"
        if head.headers.get("x-try-again") and number < TRIES:
            await parts.aclose()
            continue
        return await _respond(head, parts)
    raise AssertionError("the last try returns")


async def _respond(head: wire.Head, parts: Parts) -> Response:
    if head.headers.get("content-type", "").startswith("text/event-stream"):
        headers = {k: v for k, v in head.headers.items() if k != "content-type"}
        return StreamingResponse(_body(parts), head.status, headers, media_type="text/event-stream")
    try:
        body = b"".join([part async for part in parts if isinstance(part, bytes)])
    except Broken as broken:
        return _plain(*wire.refusal(broken.error))
    return _plain(head, body)


def _plain(head: wire.Head, body: bytes) -> Response:
    headers = {k: v for k, v in head.headers.items() if k != "content-length"}
    return Response(body, head.status, headers)


async def _body(parts: Parts) -> AsyncIterator[bytes]:
    """An SSE body; a break becomes a last event, since the status has been sent."""
    try:
        async for part in parts:
            assert isinstance(part, bytes), "one head, then bytes"
            yield part
    except Broken as broken:
        yield wire.stream_error(broken.error)
    finally:
        await parts.aclose()


async def _translated(response: Any, call: wire.Call, bound: int) -> Parts:
    """Serve's and Ray's ways of failing, in our words. Left before its end, by whatever way, it
    cancels the work behind it."""
    ended = False
    try:
        async for part in response:
            yield part
        ended = True
    except (RayError, BackPressureError, DeploymentUnavailableError) as error:
        ended = True
        raise _in_our_words(error, call, bound) from error
    finally:
        if not ended:
            response.cancel()


def _in_our_words(error: Exception, call: wire.Call, bound: int) -> Exception:
    match error:
        case BackPressureError():
            return Broken(QueueFull(call.model, bound, bound, 1.0), again=False)
        case DeploymentUnavailableError():
            return Broken(ArbiterUnavailable(0.0), again=False)
        case RayActorError():
            return Broken(EngineLost(call.model, TicketId(call.request_id)), again=True)
        case RayTaskError(cause=RequestError() as cause):
            return Broken(cause, again=wire.is_transient(cause))
    return error
