"""BodyLimit: an ASGI middleware that bounds a request's body while it arrives, in bytes and in
seconds, and all bodies together in bytes; it refuses a body that it would have to unpack."""

import asyncio

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from arbiter.units import Bytes, human
from deployments.config.front_section import FrontConfig
from deployments.front.inference.request import BadRequest
from deployments.front.inference.service import RETRY_AFTER_S
from deployments.front.middleware.http_errors import on_http_exception, refused
from deployments.front.middleware.http_middleware import HttpMiddleware
from deployments.jobs.file_store import FILE_MOST_BYTES, UPLOAD_MOST_S

# One body of a generating route. OpenAI's own limits are of this order: 25 MB for audio, and less
# for JSON and images.
MAX_BODY_BYTES = 32 << 20
MAX_STEERING_BYTES = 16 << 10  # a lease, a floor: a few words and numbers
# 256 tasks of 16 rungs with names of a hundred letters; settings with thousands of tenants.
MAX_CONFIG_BYTES = 512 << 10
STEERING, CONFIG, SETTINGS = "/arbiter/", "/api/v1/config", "/arbiter/settings"
FORM_BYTES = 64 << 10  # around a file: its other fields, their heads
# The parser holds 1 MB of it at a time.
FILES, MAX_FILE_FORM_BYTES = "/v1/files", FILE_MOST_BYTES + FORM_BYTES
# A body of at most so many bytes is taken whatever others hold: 64 MiB for 1,000 requests in
# flight, about what these cost the front without their bodies.
SMALL_BYTES = 64 << 10
# A body is slow while it gets no SMALL_BYTES in so many seconds: a tenth of the 1 Mbit/s that
# `front.body_s` allows for. Two lost packets that are sent again take 3 s.
SLOW_S = 5.0

ENCODING = "content-encoding"


class HeldBodies:
    """Counts the bytes of bodies that one front has in memory, of all requests together. A body
    counts until its request is answered, which keeps it so that it can be sent again. What lies
    on disk (/v1/files) does not count."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self.arriving: dict[BoundedBody, None] = {}  # those that are not whole

    def have_room(self, piece_bytes: int, most_bytes: int) -> bool:
        """Whether `piece_bytes` more fit within `most_bytes`. Where they fit only without bodies
        that are slow, this ends as many of those as it takes, the slowest first."""
        short_bytes = self.size_bytes + piece_bytes - most_bytes
        slow = sorted(
            (body for body in self.arriving if body.is_slow), key=lambda body: body.progress_s
        )
        if short_bytes > sum(body.held_bytes for body in slow):
            return False
        for body in slow:
            if self.size_bytes + piece_bytes <= most_bytes:
                break
            body.end()
        return True


class BodyLimit(HttpMiddleware):
    """Answers 415 to an encoded body, whose size says nothing of what it unpacks to, and 413 to a
    declared length beyond the bound. See BoundedBody for the rest. Keeps nothing itself."""

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        encoding = headers.get(ENCODING.encode(), b"").decode("latin-1").strip()
        if encoding.lower() not in ("", "identity"):
            why = f"`{ENCODING}`: {encoding!r} is not unpacked; send the body as it is"
            await refused(BadRequest(why, ENCODING, 415))(scope, receive, send)
            return
        most_bytes = bound_of(scope["path"])
        declared = headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > most_bytes:
            answer = await on_http_exception(Request(scope), too_large(most_bytes))
            await answer(scope, receive, send)
            return
        front = scope["app"].state.front
        limits: FrontConfig = front.table.front
        body = BoundedBody(receive, scope["path"], limits, front.bodies)
        try:
            await self._app(scope, body, send)
        finally:
            body.forget()


class BoundedBody:
    """The `receive` of one request. Raises HTTPException, which FastAPI lets pass: 413 where more
    arrives than was declared, 408 where the next piece or the end is late, 429 where all bodies
    together would be too much. A sender that is slow, or sends nothing more, would hold a place of
    the front, and the bytes so far, for ever. While others need its bytes, a slow body ends with
    408 at once."""

    def __init__(
        self, receive: Receive, path: str, limits: FrontConfig, bodies: HeldBodies
    ) -> None:
        self._receive, self._most_bytes = receive, bound_of(path)
        self._piece_s = limits.body_piece_s
        self._whole_s = UPLOAD_MOST_S if path == FILES else limits.body_s
        self._bodies = None if path == FILES else bodies
        self._bodies_most_bytes = limits.bodies_bytes
        self._loop = asyncio.get_running_loop()
        self._ends = self._loop.time() + self._whole_s
        self._size, self.held_bytes, self._is_whole = 0, 0, False
        self.progress_s, self._progress_size = self._loop.time(), 0
        self._bound: asyncio.Timeout | None = None  # None while no piece is waited for
        self._is_ended = False

    async def __call__(self) -> Message:
        if self._is_whole:  # the only message still to come is that the client has left
            return await self._receive()
        piece_ends = self._loop.time() + self._piece_s
        try:
            async with asyncio.timeout_at(min(piece_ends, self._ends)) as self._bound:
                message = await self._receive()
            if self._is_ended:
                raise TimeoutError
        except TimeoutError:
            raise _too_slow(self._size, self._late(is_piece=piece_ends < self._ends)) from None
        finally:
            self._bound = None
        self._size += len(message.get("body", b""))
        if self._size > self._most_bytes:
            raise too_large(self._most_bytes)
        if self._size >= self._progress_size + SMALL_BYTES:
            self.progress_s, self._progress_size = self._loop.time(), self._size
        self._is_whole = not message.get("more_body", False)
        self._hold(len(message.get("body", b"")))
        return message

    def _late(self, *, is_piece: bool) -> str:
        if self._is_ended:
            little = f"less than {SMALL_BYTES >> 10} KiB in {SLOW_S:g} s"
            return f"{little}, while another request needs the memory that it holds"
        return f"nothing in {self._piece_s:g} s" if is_piece else f"{self._whole_s:g} s"

    @property
    def is_slow(self) -> bool:
        """Whether it holds more than SMALL_BYTES, a piece of it is waited for, and it has made no
        progress in SLOW_S."""
        is_awaited = self._bound is not None and not self._bound.expired()
        is_late = self._loop.time() - self.progress_s >= SLOW_S
        return is_awaited and is_late and self.held_bytes > SMALL_BYTES

    def end(self) -> None:
        """Ends a slow body, with 408, and gives its bytes to others."""
        assert self._bound is not None, "it is slow"
        self._is_ended = True
        self._bound.reschedule(self._loop.time())
        self.forget()

    def _hold(self, piece_bytes: int) -> None:
        if (bodies := self._bodies) is None:
            return
        is_small = self._size <= SMALL_BYTES
        if not is_small and not bodies.have_room(piece_bytes, self._bodies_most_bytes):
            error = _full(bodies.size_bytes, self._bodies_most_bytes)
            self.forget()  # now, so that no other body is refused for the bytes of this one
            raise error
        bodies.size_bytes += piece_bytes
        self.held_bytes += piece_bytes
        if self._is_whole:
            bodies.arriving.pop(self, None)
        else:
            bodies.arriving[self] = None

    def forget(self) -> None:
        """Called once the body is needed no more; a second call changes nothing."""
        if self._bodies is not None:
            self._bodies.size_bytes -= self.held_bytes
            self.held_bytes = 0
            self._bodies.arriving.pop(self, None)


def too_large(most_bytes: int) -> HTTPException:
    return HTTPException(413, f"the body is larger than {most_bytes} bytes")


def _full(size_bytes: int, most_bytes: int) -> HTTPException:
    message = (
        f"the front holds {human(Bytes(size_bytes))} of bodies of requests, and takes at most "
        f"{human(Bytes(most_bytes))} (`front.bodies_bytes`); send the request again in "
        f"{RETRY_AFTER_S:.0f} s; at most {SMALL_BYTES >> 10} KiB are taken at any time"
    )
    return HTTPException(429, message, {"retry-after": f"{RETRY_AFTER_S:.0f}"})


def _too_slow(size: int, late: str) -> HTTPException:
    message = f"the body is not complete after {late}, at {size} bytes; send the request again"
    return HTTPException(408, message, {"connection": "close"})


def bound_of(path: str) -> int:
    usual = MAX_STEERING_BYTES if path.startswith(STEERING) else MAX_BODY_BYTES
    special = {FILES: MAX_FILE_FORM_BYTES, CONFIG: MAX_CONFIG_BYTES, SETTINGS: MAX_CONFIG_BYTES}
    return special.get(path, usual)
