"""Carry one HTTP request to its capability and the answer back.

Always a stream inside, also for answers that are not: closing the stream is what cancels the work
down to the engine when a client goes away.
"""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from fastapi.responses import Response, StreamingResponse
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from arbiter.errors import CapabilityFailed, EngineLost, QueueFull, RequestError
from arbiter.units import TicketId
from deployments import wire

logger = logging.getLogger("ray.serve")

Parts = AsyncGenerator[wire.Head | bytes, None]

# A replica or engine that dies before the client saw anything has answered nothing, so the call is
# sent again; three times in all, for replica, engine and arbiter killed together are three causes.
TRIES = 3

# When a full queue may have room again: a short answer takes about this long.
RETRY_AFTER_S = 1.0


class Broken(Exception):
    """The capability's side is gone; `error` is what the client should hear, `again` whether
    another try may help."""

    def __init__(self, error: RequestError, *, again: bool) -> None:
        super().__init__(error, again)
        self.error, self.again = error, again


async def relay(call: wire.Call, send: Callable[[wire.Call], Any]) -> Response:
    """The answer as a response; every failure becomes OpenAI's error object. `send` starts the
    call and returns Serve's response generator."""
    for number in range(1, TRIES + 1):
        try:
            return await _respond(_translated(send(call), call))
        except Broken as broken:
            if not broken.again or number == TRIES:
                return _plain(*wire.refusal(broken.error))
    raise AssertionError("the last try returns")


async def _respond(parts: Parts) -> Response:
    """A stream as it comes; anything else only when it is whole. Raises Broken."""
    head = await anext(parts)
    assert isinstance(head, wire.Head), "a capability sends its head first"
    if head.is_stream:
        return _stream(head, parts)
    return _plain(head, b"".join([part async for part in parts if isinstance(part, bytes)]))


def _stream(head: wire.Head, parts: Parts) -> Response:
    headers = {k: v for k, v in head.headers.items() if k != "content-type"}
    return StreamingResponse(_body(parts), head.status, headers, media_type="text/event-stream")


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


async def _translated(response: Any, call: wire.Call) -> Parts:
    """Serve's and Ray's ways of failing, in our words. Left before its end, by whatever way, it
    cancels the work behind it."""
    ended = False
    try:
        async for part in response:
            yield part
        ended = True
    except (RayError, BackPressureError, DeploymentUnavailableError) as error:
        ended = True
        raise _in_our_words(error, call) from error
    finally:
        if not ended:
            response.cancel()


def _in_our_words(error: Exception, call: wire.Call) -> Broken:
    match error:
        case BackPressureError(args=(int(queued), int(bound), *_)):
            return Broken(QueueFull(call.model, queued, bound, RETRY_AFTER_S), again=False)
        case DeploymentUnavailableError():
            return Broken(CapabilityFailed(call.model, "its deployment failed"), again=False)
        case RayActorError():
            return Broken(EngineLost(call.model, TicketId(call.request_id)), again=True)
        case RayTaskError(cause=RequestError() as cause):
            return Broken(cause, again=wire.is_transient(cause))
    logger.error("request %s: %r", call.request_id, error)
    return Broken(CapabilityFailed(call.model, type(error).__name__), again=False)
