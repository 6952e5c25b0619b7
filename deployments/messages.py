"""What travels between the front and a capability: a call, then a whole answer, or the head of a
stream and its bytes.

Raw JSON in, raw bytes out: neither side parses what the engine will parse again.
"""

import json
from dataclasses import dataclass

from arbiter.core.types import Priority
from arbiter.errors import EngineLost, RequestError

# In the headers of every call, set by the front whatever the client wrote: whose adapters are seen.
TENANT_HEADER = "x-arbiter-tenant"


@dataclass(frozen=True, slots=True)
class InferenceCall:
    """One HTTP request, forwarded."""

    path: str
    body: bytes
    headers: dict[str, str]
    request_id: str
    model: str  # the one to make resident
    deadline_s: float | None = None
    priority: Priority = Priority.NORMAL
    tenant: str = "default"
    client_id: str = ""  # as the client calls itself
    conversation_id: str | None = None
    stay_warm_s: float = 0.0  # after it ends, before the model's keep-warm begins to count
    wants_progress: bool = False  # while the model is brought, say how far it is
    served: str = ""  # what the engine is asked for: the model (also if empty), or an adapter of it


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the model of a waiting call is; may come before the head, for those that want it."""

    phase: str  # starting (no replica yet), queued, loading
    position: int  # in its holder's line; 0 when it is this model's turn
    estimate_s: float | None  # until the model serves, where anything is known of it

    def line(self, waited_s: float) -> bytes:
        """A comment of the event stream, which clients skip."""
        left = "unknown" if self.estimate_s is None else f"{self.estimate_s:.1f}"
        words = f"phase={self.phase} position={self.position} estimate_s={left}"
        return f": {words} waited_s={waited_s:.1f}\n\n".encode()


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Begins every answer; where it is a stream, bytes follow."""

    status: int
    headers: dict[str, str]

    @property
    def is_stream(self) -> bool:
        """Server-sent events: each piece is of use to the client as it comes."""
        return self.headers.get("content-type", "").startswith("text/event-stream")


@dataclass(frozen=True, slots=True)
class FullResponse:
    """An answer that is no stream. One message, whatever its size: each costs proxy, front and
    replica about a millisecond, and its client can use none of it before the last byte."""

    head: ResponseHead
    body: bytes


Part = Progress | ResponseHead | FullResponse | bytes  # of an answer; progress only before all else


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


def refusal(error: RequestError) -> tuple[ResponseHead, bytes]:
    """The one seam where our errors become HTTP."""
    headers = {"content-type": "application/json"}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    param = "model" if error.code in ("model_not_found", "capability_not_found") else None
    body = error_body(str(error), kind=kind_of(error.status_code), code=error.code, param=param)
    return ResponseHead(error.status_code, headers), body


def stream_error(error: RequestError) -> bytes:
    """An SSE event for a stream that breaks after its head was sent."""
    _, body = refusal(error)
    return b"data: " + body + b"\n\n"
