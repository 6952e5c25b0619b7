"""Errors in the form of the API that was asked: OpenAI's, Anthropic's, or Ollama's.

Everything behind this middleware speaks OpenAI's form. Anthropic's clients read a request's id in a
header, and in errors in a field, of their own. Which API a request belongs to is told by
its path alone, so that unknown paths, missing keys and bodies too large are answered in form, too.

Sources: docs.claude.com/en/api/errors, docs.ollama.com/api/errors.
"""

import json
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ANTHROPIC, OLLAMA = "/v1/messages", "/api/"
OURS = "/api/v1/"  # no route of Ollama begins so
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

Form = Callable[[int, str, str], bytes]  # of a status, a message and the request's id: the body


def anthropic(status: int, message: str, request_id: str) -> bytes:
    kind = _ANTHROPIC_TYPES.get(status) or (
        "invalid_request_error" if status < 500 else "api_error"
    )
    error = {"type": kind, "message": message}
    return json.dumps({"type": "error", "error": error, "request_id": request_id or None}).encode()


def ollama(status: int, message: str, request_id: str) -> bytes:
    return json.dumps({"error": message}).encode()


def form_of(path: str) -> Form | None:
    """None: OpenAI's, in which all errors come."""
    if path == ANTHROPIC or path.startswith(f"{ANTHROPIC}/"):
        return anthropic
    return ollama if path.startswith(OLLAMA) and not path.startswith(OURS) else None


class ErrorForms:
    """An ASGI middleware around all that answers; see deployments.front.application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        form = form_of(scope["path"]) if scope["type"] == "http" else None
        if form is not None:
            send = ErrorFormatter(form, send, Headers(scope=scope).get("x-request-id", ""))
        await self._app(scope, receive, send)


class ErrorFormatter:
    """A `send` that gives errors their form, and a response to Anthropic's client its id; all else
    passes as it comes. `request_id`: as Serve's proxy has it, which gives each request one."""

    def __init__(self, form: Form, send: Send, request_id: str) -> None:
        self._form, self._send, self._request_id = form, send, request_id
        self._start: Message | None = None  # of an error, kept until its body is known
        self._body = b""
        self._is_event_stream = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif self._start is not None:
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                await self._refuse(self._start)
        elif self._is_event_stream and _is_our_error(message.get("body", b"")):
            await self._send({**message, "body": self._event(message["body"])})
        else:
            await self._send(message)

    async def _begin(self, message: Message) -> None:
        if self._form is anthropic and self._request_id:
            own_id = b"request-id", self._request_id.encode("latin-1")
            message = {**message, "headers": [*message["headers"], own_id]}
        if message["status"] >= 400:
            self._start = message
            return
        kind = dict(message["headers"]).get(b"content-type", b"")
        self._is_event_stream = kind.startswith(b"text/event-stream")
        await self._send(message)

    async def _refuse(self, start: Message) -> None:
        body = self._form(start["status"], message_of(self._body), self._request_id)
        headers = [pair for pair in start["headers"] if pair[0].lower() != b"content-length"]
        length = (b"content-length", b"%d" % len(body))
        await self._send({**start, "headers": [*headers, length]})
        await self._send({"type": "http.response.body", "body": body})

    def _event(self, event: bytes) -> bytes:
        """Writes the event for an error in a stream whose status was sent. Anthropic's events have
        names, so one without is our own last word."""
        data = event.removeprefix(b"data: ").strip()
        body = self._form(_status_of(data), message_of(data), self._request_id)
        return b"event: error\ndata: " + body + b"\n\n"


def _is_our_error(piece: bytes) -> bool:
    """An event without a name that has an `error`; also a piece of an engine's stream may begin
    with data, where the stream was cut behind the name of an event."""
    if not piece.startswith(b"data: {"):
        return False
    try:
        return "error" in json.loads(piece.removeprefix(b"data: "))
    except ValueError:
        return False


def message_of(body: bytes) -> str:
    """The message of an error in any of the forms."""
    try:
        error: Any = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")


def _status_of(body: bytes) -> int:
    """The status of an error in a stream, whose head has another: as our own errors say it, as
    vLLM's have it for a code, else by OpenAI's `type`."""
    error = json.loads(body)["error"]
    if not isinstance(error, dict):
        return 500
    kind = str(error.get("type"))
    by_type = {"rate_limit_error": 429, "invalid_request_error": 400}.get(kind, 500)
    candidates = [error.get("status"), error.get("code"), by_type]
    return next(status for status in candidates if isinstance(status, int))
