"""BodyLimit: an ASGI middleware that bounds a request's body while it arrives, and refuses a body
that it would have to unpack."""

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.front.http_errors import on_http_exception, refused
from deployments.front.request import BadRequest
from deployments.jobs.file_store import FILE_MOST_BYTES

# One body of a generating route. OpenAI's own limits are of this order: 25 MB for audio, and less
# for JSON and images.
MAX_BODY_BYTES = 32 << 20
MAX_STEERING_BYTES = 16 << 10  # a lease, a floor, some settings: a few words and numbers
MAX_CONFIG_BYTES = 512 << 10  # 256 tasks of 16 rungs with names of a hundred letters
STEERING, CONFIG = "/arbiter/", "/api/v1/config"
# A file and the form around it; the parser holds 1 MB of it at a time.
FILES, MAX_FILE_FORM_BYTES = "/v1/files", FILE_MOST_BYTES + (64 << 10)


ENCODING = "content-encoding"


class BodyLimit:
    """Answers 415 to an encoded body, whose size says nothing of what it unpacks to, and 413 to a
    declared length beyond the bound, and raises it (as HTTPException, which FastAPI lets pass)
    where more arrives than was declared. Keeps nothing itself."""

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
        too_large = HTTPException(413, f"the body is larger than {most_bytes} bytes")
        declared = headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > most_bytes:
            answer = await on_http_exception(Request(scope), too_large)
            await answer(scope, receive, send)
            return
        size = 0

        async def bounded() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > most_bytes:
                raise too_large
            return message

        await self._app(scope, bounded, send)


def bound_of(path: str) -> int:
    if path.startswith(STEERING):
        return MAX_STEERING_BYTES
    return {FILES: MAX_FILE_FORM_BYTES, CONFIG: MAX_CONFIG_BYTES}.get(path, MAX_BODY_BYTES)
