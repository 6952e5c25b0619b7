"""BodyLimit: an ASGI middleware that bounds a request's body while it arrives, in bytes and in
seconds, and refuses a body that it would have to unpack."""

import asyncio

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.config.schema import FrontConfig
from deployments.front.http_errors import on_http_exception, refused
from deployments.front.request import BadRequest
from deployments.jobs.file_store import FILE_MOST_BYTES, UPLOAD_MOST_S

# One body of a generating route. OpenAI's own limits are of this order: 25 MB for audio, and less
# for JSON and images.
MAX_BODY_BYTES = 32 << 20
MAX_STEERING_BYTES = 16 << 10  # a lease, a floor, some settings: a few words and numbers
MAX_CONFIG_BYTES = 512 << 10  # 256 tasks of 16 rungs with names of a hundred letters
STEERING, CONFIG = "/arbiter/", "/api/v1/config"
FORM_BYTES = 64 << 10  # around a file: its other fields, their heads
# The parser holds 1 MB of it at a time.
FILES, MAX_FILE_FORM_BYTES = "/v1/files", FILE_MOST_BYTES + FORM_BYTES


ENCODING = "content-encoding"


class BodyLimit:
    """Answers 415 to an encoded body, whose size says nothing of what it unpacks to, and 413 to a
    declared length beyond the bound. See BoundedBody for the rest. Keeps nothing itself."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
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
        limits: FrontConfig = scope["app"].state.front.table.front
        whole_s = UPLOAD_MOST_S if scope["path"] == FILES else limits.body_s
        body = BoundedBody(receive, most_bytes, limits.body_piece_s, whole_s)
        await self._app(scope, body, send)


class BoundedBody:
    """The `receive` of one request. Raises HTTPException, which FastAPI lets pass: 413 where more
    arrives than was declared, 408 where the next piece or the end is late. A sender that is slow,
    or sends nothing more, would hold a place of the front, and the bytes so far, for ever."""

    def __init__(self, receive: Receive, most_bytes: int, piece_s: float, whole_s: float) -> None:
        self._receive, self._most_bytes = receive, most_bytes
        self._piece_s, self._whole_s = piece_s, whole_s
        self._loop = asyncio.get_running_loop()
        self._ends = self._loop.time() + whole_s
        self._size, self._is_whole = 0, False

    async def __call__(self) -> Message:
        if self._is_whole:  # the client is waited for only to leave
            return await self._receive()
        piece_ends = self._loop.time() + self._piece_s
        try:
            async with asyncio.timeout_at(min(piece_ends, self._ends)):
                message = await self._receive()
        except TimeoutError:
            is_piece = piece_ends < self._ends
            late = f"nothing in {self._piece_s:g} s" if is_piece else f"{self._whole_s:g} s"
            raise _too_slow(self._size, late) from None
        self._size += len(message.get("body", b""))
        if self._size > self._most_bytes:
            raise too_large(self._most_bytes)
        self._is_whole = not message.get("more_body", False)
        return message


def too_large(most_bytes: int) -> HTTPException:
    return HTTPException(413, f"the body is larger than {most_bytes} bytes")


def _too_slow(size: int, late: str) -> HTTPException:
    said = f"the body is not complete after {late}, at {size} bytes; send the request again"
    return HTTPException(408, said, {"connection": "close"})


def bound_of(path: str) -> int:
    if path.startswith(STEERING):
        return MAX_STEERING_BYTES
    return {FILES: MAX_FILE_FORM_BYTES, CONFIG: MAX_CONFIG_BYTES}.get(path, MAX_BODY_BYTES)
