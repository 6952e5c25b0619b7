"""Calls that outlive their caller: the front keeps each as a job (`Prefer: respond-async`, J4).

job = await client.submit(client.images, "a red circle on blue", model="tiny-draw")
print(job.id, (await job.status()).state)
[circle] = await job.result()
"""

import asyncio
import copy
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Generic, ParamSpec, TypeVar

from arbiter.errors import RequestError
from deployments.client.calls import AsyncCalls
from deployments.client.connection import Connection, Read, Request
from deployments.client.fields import Json
from deployments.client.typed_errors import FrontUnreachable

P = ParamSpec("P")
T = TypeVar("T")

JOBS = "/v1/jobs"
RESPOND_ASYNC = {"prefer": "respond-async"}
AGAIN_S, AWAY_S = 0.5, 30.0  # as AsyncClient.subscribe
# Statuses after which a call is tried again: the front is full or away, or the jobs replica starts.
AGAIN_STATUS = (429, 503)
FINISHED = frozenset({"completed", "failed", "cancelled", "expired"})


@dataclass(frozen=True, slots=True)
class JobStatus:
    """How far a job is."""

    id: str
    state: str  # queued, in_progress, cancelling, completed, failed, cancelled, expired
    model: str
    queue_position: int | None  # while it is queued: how many are before it
    event_count: int  # events so far of a call that streams: tokens, partial pictures
    estimate_s: float | None  # until its model could answer, where that is known
    error: str  # why it failed; empty otherwise

    @property
    def is_finished(self) -> bool:
        return self.state in FINISHED


class AsyncJob(Generic[T]):
    """A call that the front makes when there is room, and whose answer it keeps for a day. It goes
    on when this object, its client or any process of the system ends."""

    def __init__(self, connection: Connection, job_id: str, read: Read[T]) -> None:
        self._connection, self.id, self._read = connection, job_id, read

    async def status(self) -> JobStatus:
        """Loads no model and waits for none. Raises RequestError."""
        return _status(await self._connection.read(Request("GET", f"{JOBS}/{self.id}")))

    async def cancel(self) -> JobStatus:
        """Ends it, between two steps of the engine. Raises RequestError."""
        return _status(await self._connection.read(Request("POST", f"{JOBS}/{self.id}/cancel")))

    async def result(self) -> T:
        """Waits for the answer and returns what the call would have returned. Raises what the call
        would have raised; a RequestError of code `conflict` for a job that was cancelled or has
        expired. A front that is away or full (AGAIN_STATUS) is asked again; its refusal, or
        FrontUnreachable, is raised after AWAY_S in which it gave no other answer."""
        answered_s = time.monotonic()
        has_followed = False
        while True:
            is_finished = False
            try:
                is_finished = (await self.status()).is_finished
                if is_finished:
                    request = Request("GET", f"{JOBS}/{self.id}/result")
                    return await self._connection.answer(request, self._read)
                answered_s = time.monotonic()
                if has_followed:  # its events ended before the job: they cannot be read
                    await asyncio.sleep(AGAIN_S)
                has_followed = True
                async with aclosing(self._connection.pieces(self._events)) as pieces:
                    async for _ in pieces:  # the front sends events or comments until the job ends
                        answered_s = time.monotonic()
            except RequestError as error:
                # A finished job may have been answered with such a status: then it is the result.
                # FrontUnreachable is no answer of the job, so it is always tried again.
                again = error.status_code in AGAIN_STATUS and not is_finished
                passes = again or isinstance(error, FrontUnreachable)
                if not passes or time.monotonic() - answered_s > AWAY_S:
                    raise
                await asyncio.sleep(AGAIN_S)

    @property
    def _events(self) -> Request:
        return Request("GET", f"{JOBS}/{self.id}/events")


class UnsentCall(Exception):
    """Carries the request of a call that was not sent, and the function that reads its answer."""

    def __init__(self, connection: Connection, request: Request, read: Read[Any]) -> None:
        super().__init__(connection, request, read)
        self.connection, self.request, self.read = connection, request, read


class CapturingConnection(Connection):
    """A connection that sends no call to a model: it raises the call as UnsentCall, so that
    `submit` and `line` can use each method of a client to write a request."""

    def __init__(self, behind: Connection) -> None:
        super().__init__(behind._http, behind._where, behind.lease_way)
        self._behind = behind

    async def answer(self, request: Request, read: Read[T]) -> T:
        """Raises UnsentCall."""
        if request.method != "POST":
            return await super().answer(request, read)
        raise UnsentCall(self._behind, request, read)


async def withheld(call: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> UnsentCall:
    """Returns what a call of a client would send. Raises BadRequest; TypeError where `call` is no
    method of a client, or asks no model."""
    calls = getattr(call, "__self__", None)
    if not isinstance(calls, AsyncCalls):
        raise TypeError(f"{call!r} is no call of a client")
    view = copy.copy(calls)
    view._connection = CapturingConnection(calls._connection)
    try:
        await getattr(view, call.__name__)(*args, **kwargs)
    except UnsentCall as unsent:
        return unsent
    raise TypeError(f"{call.__name__} asks no model, so there is nothing to keep")


async def submit(
    call: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
) -> AsyncJob[T]:
    """See AsyncClient.submit."""
    unsent = await withheld(call, *args, **kwargs)
    request = replace(unsent.request, headers={**unsent.request.headers, **RESPOND_ASYNC})
    reply = await unsent.connection.read(request)
    return AsyncJob(unsent.connection, reply["id"], unsent.read)


def job_by_id(connection: Connection, job_id: str) -> AsyncJob[Json | bytes]:
    """A job by its id; its answer is the fields of JSON, or bytes."""
    return AsyncJob(connection, job_id, _fields_or_bytes)


def _fields_or_bytes(raw: bytes, kind: str) -> Json | bytes:
    if kind.startswith("application/json"):
        fields: Json = json.loads(raw)
        return fields
    return raw


def _status(row: Json) -> JobStatus:
    return JobStatus(
        row["id"],
        row["status"],
        row["model"],
        row["queue_position"],
        row["progress"]["events"],
        row["estimate_s"],
        (row["error"] or {}).get("message", ""),
    )
