"""What travels between the front and a capability: a call, then a head, then bytes.

Raw JSON in, raw bytes out: neither side parses what the engine will parse again.
"""

import json
from dataclasses import dataclass

from arbiter.errors import EngineLost, RequestError
from arbiter.events import Priority


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request, forwarded."""

    path: str
    body: bytes
    headers: dict[str, str]
    request_id: str
    model: str
    deadline_s: float | None = None
    priority: Priority = Priority.NORMAL


@dataclass(frozen=True, slots=True)
class Head:
    """First item of every answer; bytes follow."""

    status: int
    headers: dict[str, str]

    @property
    def is_stream(self) -> bool:
        """Server-sent events: each piece is of use to the client as it comes."""
        return self.headers.get("content-type", "").startswith("text/event-stream")


def error_body(
    message: str, *, kind: str, code: str | None = None, param: str | None = None
) -> bytes:
    """OpenAI's error object."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    return json.dumps({"error": error}).encode()


def is_transient(error: RequestError) -> bool:
    """Whether sending the same call again at once may help: its process died, and another takes
    its place."""
    return isinstance(error, EngineLost)


def kind_of(status: int) -> str:
    """OpenAI's `type` for a status, as its client maps them to exceptions."""
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def refusal(error: RequestError) -> tuple[Head, bytes]:
    """The one seam where our errors become HTTP."""
    headers = {"content-type": "application/json"}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    param = "model" if error.code in ("model_not_found", "capability_not_found") else None
    body = error_body(str(error), kind=kind_of(error.status_code), code=error.code, param=param)
    return Head(error.status_code, headers), body


def stream_error(error: RequestError) -> bytes:
    """An SSE event for a stream that breaks after its head was sent."""
    _, body = refusal(error)
    return b"data: " + body + b"\n\n"
