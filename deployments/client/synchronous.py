"""Client: AsyncClient for scripts and notebooks, by plain calls. Each method is made of the method
of the same name there, with its signature; an event loop on a thread of its own does the work.

    with Client() as client:
        print(client.chat("What is a ticket?", model="small-chat").text)
"""

import asyncio
import functools
import weakref
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import ExitStack, contextmanager
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, Unpack

from anyio.from_thread import BlockingPortal, start_blocking_portal

from arbiter import leases
from deployments.client.asynchronous import WITHIN_S, AsyncClient, AsyncHeld
from deployments.client.batches import AsyncBatch, BatchStatus, Line, LineResult
from deployments.client.calls import AsyncCalls
from deployments.client.fields import Fields, Json
from deployments.client.jobs import AsyncJob, JobStatus
from deployments.messages import ACQUIRE_S

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A", bound=AsyncCalls)
_END: Any = object()


def plain(
    method: Callable[Concatenate[A, P], Awaitable[T]],
) -> Callable[Concatenate["Calls", P], T]:
    """The method as a plain call."""

    @functools.wraps(method)
    def call(self: "Calls", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return _result_of(self._portal, functools.partial(method, self._behind, *args, **kwargs))

    return call


def plain_stream(
    method: Callable[Concatenate[A, P], AsyncGenerator[T]],
) -> Callable[Concatenate["Calls", P], Generator[T, None, None]]:
    """The method as a plain generator; closing it, or leaving a loop over it, ends the work."""

    @functools.wraps(method)
    def iterate(self: "Calls", /, *args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
        yield from _iterated(self._portal, method(self._behind, *args, **kwargs))

    return iterate


def _iterated(portal: BlockingPortal, parts: AsyncGenerator[T]) -> Generator[T, None, None]:
    while (part := _result_of(portal, functools.partial(anext, parts, _END))) is not _END:
        try:
            yield part
        except GeneratorExit:
            portal.call(parts.aclose)
            raise


def _result_of(portal: BlockingPortal, work: Callable[[], Awaitable[T]]) -> T:
    """The result of `work`. An interrupt of the wait, as by Ctrl-C, ends the work, also if it
    comes while the work is handed to the loop, before there is a future to cancel."""
    task: asyncio.Task[Any] | None = None
    is_wanted = True

    async def while_wanted() -> T:
        nonlocal task
        if not is_wanted:
            raise asyncio.CancelledError
        task = asyncio.current_task()
        return await work()

    def end() -> None:
        nonlocal is_wanted
        is_wanted = False
        if task is not None:
            task.cancel()

    doing = None
    try:
        doing = portal.start_task_soon(while_wanted)
        return doing.result()
    finally:
        if doing is None or not doing.done():
            portal.start_task_soon(end)


class Calls:
    """See AsyncCalls."""

    _behind: Any
    _portal: BlockingPortal

    chat = plain(AsyncCalls.chat)
    stream_chat = plain_stream(AsyncCalls.stream_chat)
    complete = plain(AsyncCalls.complete)
    stream_complete = plain_stream(AsyncCalls.stream_complete)
    embed = plain(AsyncCalls.embed)
    rerank = plain(AsyncCalls.rerank)
    images = plain(AsyncCalls.images)
    stream_images = plain_stream(AsyncCalls.stream_images)
    describe = plain(AsyncCalls.describe)
    stream_describe = plain_stream(AsyncCalls.stream_describe)
    transcribe = plain(AsyncCalls.transcribe)
    stream_transcribe = plain_stream(AsyncCalls.stream_transcribe)
    speak = plain(AsyncCalls.speak)
    stream_speak = plain_stream(AsyncCalls.stream_speak)
    vad = plain(AsyncCalls.vad)
    request = plain(AsyncCalls.request)

    def within(self, budget_s: float) -> Self:
        """See AsyncCalls.within."""
        view = object.__new__(type(self))
        behind = self._behind.within(budget_s)
        # The view refers to this client, because the loop's thread ends with the client.
        view.__dict__ = self.__dict__ | {"_behind": behind, "_whole": self}
        return view


class Client(Calls):
    """See AsyncClient. One per program; `with`, or `close`."""

    models = plain(AsyncClient.models)
    status = plain(AsyncClient.status)
    plan = plain(AsyncClient.plan)
    residency = plain(AsyncClient.residency)
    set_floor = plain(AsyncClient.set_floor)
    load = plain(AsyncClient.load)
    unload = plain(AsyncClient.unload)
    host_copies = plain(AsyncClient.host_copies)
    drop_host_copy = plain(AsyncClient.drop_host_copy)
    subscribe = plain_stream(AsyncClient.subscribe)

    def __init__(
        self,
        url: str | None = None,
        *,
        key: str | None = None,
        handle: Any = None,
        model: str | None = None,
        timeout_s: float = WITHIN_S,
    ) -> None:
        """See AsyncClient.__init__."""
        self._behind: AsyncClient = AsyncClient(
            url, key=key, handle=handle, model=model, timeout_s=timeout_s
        )
        stack = ExitStack()
        self._portal = stack.enter_context(start_blocking_portal())
        stack.callback(self._portal.call, self._behind.close)
        # A script that forgets to close it ends as well: Python waits for the loop's thread
        self._close = weakref.finalize(self, stack.close)

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Job[T]":
        """See AsyncClient.submit: `submit(client.chat, "Hello")`."""
        bound = functools.partial(self._behind.submit, _behind(call), *args, **kwargs)
        return Job(_result_of(self._portal, bound), self._portal)

    def job(self, job_id: str) -> "Job[Json | bytes]":
        """See AsyncClient.job."""
        return Job(self._behind.job(job_id), self._portal)

    def line(
        self, custom_id: str, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Line[T]:
        """See AsyncClient.line."""
        bound = functools.partial(self._behind.line, custom_id, _behind(call), *args, **kwargs)
        return _result_of(self._portal, bound)

    def submit_batch(
        self,
        lines: Sequence[Line[T]],
        *,
        completion_window: str = "24h",
        metadata: Mapping[str, str] | None = None,
    ) -> "Batch[T]":
        """See AsyncClient.submit_batch."""
        bound = functools.partial(
            self._behind.submit_batch,
            lines,
            completion_window=completion_window,
            metadata=metadata,
        )
        return Batch(_result_of(self._portal, bound), self._portal)

    def batch(self, batch_id: str) -> "Batch[Json]":
        """See AsyncClient.batch."""
        return Batch(self._behind.batch(batch_id), self._portal)

    def close(self) -> None:
        """Idempotent."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def acquire(
        self, model: str | None = None, *, term_s: float = ACQUIRE_S, **fields: Unpack[Fields]
    ) -> Iterator["Held"]:
        """See AsyncClient.acquire."""
        acquired = self._behind.acquire(model, term_s=term_s, **fields)
        held = _result_of(self._portal, acquired.__aenter__)
        try:
            yield Held(held, self._portal)
        finally:
            self._portal.call(acquired.__aexit__, None, None, None)

    @contextmanager
    def lease(
        self, gb: float, *, within_s: float | None = None, **how: Any
    ) -> Iterator[leases.Lease]:
        """See AsyncClient.lease."""
        held = self._behind._lease(gb, how)
        try:
            yield held.acquire(within_s)
        finally:
            held.release()


def _behind(call: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """The method that a plain one is made of. Raises TypeError."""
    calls, method = getattr(call, "__self__", None), getattr(call, "__wrapped__", None)
    if not isinstance(calls, Calls) or method is None:
        raise TypeError(f"{call!r} is no call of a client")
    bound: Callable[..., Awaitable[Any]] = method.__get__(calls._behind)
    return bound


class Held(Calls):
    """See AsyncHeld."""

    release = plain(AsyncHeld.release)

    def __init__(self, behind: AsyncHeld, portal: BlockingPortal) -> None:
        self._behind, self._portal = behind, portal
        self.model = behind.model

    @property
    def ticket(self) -> str:
        return str(self._behind.ticket)

    @property
    def has_ended(self) -> bool:
        """See AsyncHeld.has_ended."""
        return bool(self._behind.has_ended)


class Job(Generic[T]):
    """See AsyncJob."""

    def __init__(self, behind: AsyncJob[T], portal: BlockingPortal) -> None:
        self._behind, self._portal = behind, portal
        self.id = behind.id

    def status(self) -> JobStatus:
        """See AsyncJob.status."""
        return _result_of(self._portal, self._behind.status)

    def cancel(self) -> JobStatus:
        """See AsyncJob.cancel."""
        return _result_of(self._portal, self._behind.cancel)

    def result(self) -> T:
        """See AsyncJob.result."""
        return _result_of(self._portal, self._behind.result)


class Batch(Generic[T]):
    """See AsyncBatch."""

    def __init__(self, behind: AsyncBatch[T], portal: BlockingPortal) -> None:
        self._behind, self._portal = behind, portal
        self.id = behind.id

    def status(self) -> BatchStatus:
        """See AsyncBatch.status."""
        return _result_of(self._portal, self._behind.status)

    def cancel(self) -> BatchStatus:
        """See AsyncBatch.cancel."""
        return _result_of(self._portal, self._behind.cancel)

    def wait(self) -> BatchStatus:
        """See AsyncBatch.wait."""
        return _result_of(self._portal, self._behind.wait)

    def results(self) -> Generator[LineResult[T], None, None]:
        """See AsyncBatch.results."""
        return _iterated(self._portal, self._behind.results())
