"""What travels between the front and a capability: a call, then a whole response, or the head of a
stream and its bytes.

Raw bytes in, raw bytes out, of whatever content type: neither side parses what the engine will
parse again.
"""

import json
import math
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, fields, replace
from typing import Any

from arbiter.core.types import Priority
from arbiter.errors import EngineLost, RequestError
from deployments.requests.prefixes import PrefixEnd

# In the headers of every call: the tenant, whose adapters the engine may serve. The front sets it
# and drops what the client wrote.
TENANT_HEADER = "x-arbiter-tenant"

# In the headers of every call, from the replica to the engine: the priority as a number, and, where
# the call has a deadline, the seconds that are left of it. What the client wrote is dropped too.
PRIORITY_HEADER = "x-arbiter-priority"
DEADLINE_HEADER = "x-arbiter-deadline-s"

# From a replica to its engine: a fresh word, under which the body of an event stream waits at
# SIDE_STREAM_PATH for the process that hands it to the client
# (deployments.engines.side_streams). In the head of such a stream from there on: the engine's
# socket and the word.
SIDE_STREAM, SIDE_STREAM_PATH = "x-arbiter-side-stream", "/control/side_stream/"

# The pieces of an event stream that are never held to be sent with the next: vLLM's first piece
# names the role, and the second is the first token.
FIRST_PIECES = 2

# By which an event of a stream ends, as engines write their lines.
BLANK_LINES = (b"\n\n", b"\n\r\n", b"\r\r")
# Of an event that has not ended: a picture of four megapixels has 16 MiB, not compressed and in
# base64.
MOST_HELD_BYTES = 32 << 20

# In the headers of a multipart call, whose body the front leaves as it is: the name that the engine
# serves (an alias of a profile, or a bare adapter name, may stand in the form).
SERVED_HEADER = "x-arbiter-served-model"

# In the `kv_transfer_params` of a body: the class of term of the KV it uses (arbiter.pool.Term), in
# small letters. Absent: `long`.
KV_TERM = "term"


# Served by every capability: the model is in use until the client hangs up, so long at most. That
# is the longest generation, which is in use as well.
ACQUIRE, ACQUIRE_S = "/v1/acquire", 600.0

# From the front to a replica and its engine, whose model is resident: `{"names": [FULL NAME]}` is
# answered by `{"tiers": {FULL NAME: hot, warm or cold}}`, with all that are hot. Nothing is loaded.
ADAPTERS = "/adapters"


@dataclass(frozen=True, slots=True)
class InferenceCall:
    """One request for one model, as the front sends it to a capability."""

    path: str
    body: bytes
    headers: dict[str, str]
    request_id: str
    model: str  # the one to make resident
    deadline_s: float | None = None  # from when the replica sees the call
    priority: Priority = Priority.NORMAL
    tenant: str = "default"
    client_id: str = ""  # as the client calls itself
    key: str = ""  # of its KV (deployments.front.inference.kv_use); empty: it has none
    pieces: bytes = b""  # hashes of its prompt (deployments.routing.pieces)
    kv_stays_s: float = math.inf  # for which a slab keeps its KV after it
    stay_warm_s: float = 0.0  # after the call, before the model's keep-warm begins to count
    wants_progress: bool = False  # the client reads progress comments while the model loads
    served: str = ""  # the name the engine serves: an adapter, or the model (also where empty)
    stable: PrefixEnd | None = None  # the prefix that other requests share with it
    reader_node: str = ""  # where a side stream would be read; empty: it reads none
    # Nodes that refused this call, because a pinned model stays there.
    refused_nodes: tuple[str, ...] = ()
    due_s: float | None = None  # when its deadline ends, monotonic; never sent

    def __getstate__(self) -> list[Any]:
        """Returns the fields as another process gets them: with what is left of the deadline when
        Serve sends the call, which it may have held for minutes until a replica had room."""
        sent = self
        if self.due_s is not None:
            left_s = max(0.0, self.due_s - time.monotonic())
            sent = replace(self, deadline_s=left_s, due_s=None)
        return [getattr(sent, field.name) for field in fields(sent)]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the model of a waiting call is. Precedes the head, only in calls that want it."""

    # starting (no replica has said anything, perhaps because there is none yet), queued, loading
    # (the model, or what the call needs besides it), running (the model serves, and its engine has
    # not begun to answer)
    phase: str
    position: int  # how many models the same replica queued before; not the arbiter's queue
    estimate_s: float | None  # until the model serves; None where nothing is known

    @property
    def is_queued(self) -> bool:
        """The model waits for memory, or for its hours."""
        return self.phase == "queued"

    def line(self, waited_s: float) -> bytes:
        """A comment of the event stream, which clients skip."""
        estimate = "unknown" if self.estimate_s is None else f"{self.estimate_s:.1f}"
        words = f"phase={self.phase} position={self.position} estimate_s={estimate}"
        return f": {words} waited_s={waited_s:.1f}\n\n".encode()


STARTING, LOADING = Progress("starting", 0, None), Progress("loading", 0, None)
RUNNING = Progress("running", 0, 0.0)
# What a replica says first of a call with a deadline, which it keeps from then on.
TAKEN = STARTING


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Begins every response; where it is a stream, bytes follow."""

    status: int
    headers: dict[str, str]
    is_chunked: bool = False  # the engine declared no length: bytes come as they are made

    @property
    def is_event_stream(self) -> bool:
        """Server-sent events: comments and a last event may be added to it."""
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def is_stream(self) -> bool:
        """Each piece is of use to the client as it comes."""
        return self.is_chunked or self.is_event_stream


@dataclass(frozen=True, slots=True)
class FullResponse:
    """A response that is no stream. It is one message, whatever its size: each message costs proxy,
    front and replica about a millisecond, and the client can use none before the last byte."""

    head: ResponseHead
    body: bytes


Part = Progress | ResponseHead | FullResponse | bytes  # Progress only before all others
Parts = AsyncGenerator[Part, None]


class WholeEvents:
    """Holds back an event of a stream until its blank line has come. Half an event that went out
    would be read as one with the error event that follows where the stream breaks."""

    def __init__(self) -> None:
        self._held = bytearray()

    def whole(self, piece: bytes) -> bytes:
        """Returns what may go out once this piece has come: nearly always just that piece, because
        engines write whole events. More than MOST_HELD_BYTES are not held."""
        if not self._held and piece.endswith(BLANK_LINES):
            return piece
        searched = max(0, len(self._held) - 2)  # where half a blank line may stand
        self._held += piece
        found = ((blank, self._held.rfind(blank, searched)) for blank in BLANK_LINES)
        end = max((at + len(blank) for blank, at in found if at >= 0), default=0)
        if len(self._held) - end > MOST_HELD_BYTES:
            end = len(self._held)
        whole = bytes(self._held[:end])
        del self._held[:end]
        return whole

    def rest(self) -> bytes:
        """Returns what is held, for a stream that ends well without a blank line."""
        return bytes(self._held)


class NotServedHere(RequestError):
    """The model exists, and its capability serves other paths."""

    status_code, code, param = 404, "model_not_supported", "model"

    def __init__(self, model: str, path: str, paths: tuple[str, ...]) -> None:
        super().__init__(model, path, paths)
        self.model, self.path, self.paths = model, path, paths

    def __str__(self) -> str:
        return f"{self.model} is served at {', '.join(self.paths)}, not at {self.path}"


def error_body(
    message: str, *, kind: str, code: str | None = None, param: str | None = None
) -> bytes:
    """OpenAI's error object."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    return json.dumps({"error": error}).encode()


def is_transient(error: RequestError) -> bool:
    """True if the same call, sent again at once, may succeed: an engine or its replica died, and
    another process takes its place."""
    return isinstance(error, EngineLost)


def kind_of(status: int) -> str:
    """OpenAI's `type` for a status, as its client maps them to exceptions."""
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def refusal(error: RequestError) -> tuple[ResponseHead, bytes]:
    """Turns an error into OpenAI's form; the one place where errors become HTTP."""
    headers = {"content-type": "application/json"}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    if error.status_code == 401:
        headers["www-authenticate"] = "Bearer"
    body = error_body(
        str(error), kind=kind_of(error.status_code), code=error.code, param=error.param
    )
    return ResponseHead(error.status_code, headers), body


def stream_error(error: RequestError) -> bytes:
    """An SSE event for a stream that breaks after its head was sent."""
    return response_event(*refusal(error))


def response_event(head: ResponseHead, body: bytes) -> bytes:
    """An SSE event for a whole response behind a head of status 200. Its error object says its own
    status, which is told nowhere else."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        fields = None
    if isinstance(fields, dict) and isinstance(fields.get("error"), dict) and head.status >= 400:
        body = json.dumps({**fields, "error": {**fields["error"], "status": head.status}}).encode()
    return b"data: " + body.replace(b"\n", b" ") + b"\n\n"
