"""Runner: makes the calls of queued jobs, as many at a time as the table says. The most urgent is
next, then the job of the tenant with the fewest calls in flight, then the oldest.
Where all of these are taken, a call whose model has waited for a turn makes room (Waits).

A transient refusal puts a job back into the queue for some seconds; nothing but its deadline ends
the tries. What blocks (the state file, the folder) runs in one thread, one thing after another.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any, Protocol, TypeVar

from arbiter.errors import RequestError
from deployments import messages
from deployments.config.jobs_section import JobsConfig
from deployments.front.inference.service import InferenceService
from deployments.front.status.forecasts import Forecasts
from deployments.jobs import responses
from deployments.jobs.calls import (
    AGAIN_MOST_S,
    Answer,
    EngineDied,
    RetryLater,
    StreamCut,
    attempt,
    refused,
)
from deployments.jobs.errors import Conflict, StorageFailed, StorageFull, Superseded
from deployments.jobs.store import Job, JobStore
from deployments.jobs.suspects import DEATHS_MOST, Suspects
from deployments.jobs.waits import Call, CallsInFlight
from deployments.replica.background import log_failure

logger = logging.getLogger("ray.serve")
T = TypeVar("T")

SWEEP_S = 5.0  # between two looks for deadlines, while there is work
STORAGE_AGAIN_S = 5.0  # between two tries of a write that the disk refused
CUT_TRIES = 5  # attempts of one process at a call whose streams end with StreamCut


async def rounds(
    run_round: Callable[[], Awaitable[float | None]], wake: asyncio.Event, what: str
) -> None:
    """Runs a round at each wake, and after as many seconds as the last round returned (None: only
    at a wake). A round that the disk refuses is run again after STORAGE_AGAIN_S. `what`: names in
    the log what waits meanwhile. Raises Superseded."""
    while True:
        wake.clear()
        wait_s: float | None = STORAGE_AGAIN_S
        try:
            wait_s = await run_round()
        except (StorageFull, StorageFailed) as error:
            logger.error("%s wait: %s", what, error)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await wake.wait()


class Blocking:
    """One thread for all that blocks, so that one thing at a time touches the store."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "jobs")

    async def __call__(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)


class JobKind(Protocol):
    """How one kind of job differs from a plain call; see KINDS."""

    def request(self, job: Job, body: bytes) -> bytes:
        """The body that is sent."""
        ...

    def answer(self, job: Job, answer: Answer, events: list[str]) -> Answer:
        """Returns what is kept as the result. `events`: all events of a call that streams. Raises
        StreamCut."""
        ...


# By the `kind` of a job; a kind that is not named here is a plain call.
KINDS: dict[str, JobKind] = {
    responses.KIND: responses.ResponseKind(),
    "async": responses.StreamKind(),
}


class Runner:
    """Runs queued jobs, a bounded number at a time. `service` returns the front's service with the
    table as it is now."""

    def __init__(
        self,
        store: JobStore,
        blocking: Blocking,
        service: Callable[[], Awaitable[InferenceService]],
        config: Callable[[], JobsConfig],
        suspects: Suspects,
        on_change: Callable[[], None],
        trim: Callable[[str], Awaitable[None]],
    ) -> None:
        """`on_change`: called when a job has new events or another state. `trim`: forgets what a
        tenant has beyond its bounds."""
        self._on_change, self._trim = on_change, trim
        self._store, self._blocking, self._service = store, blocking, service
        self._config, self._suspects = config, suspects
        self._running: dict[str, asyncio.Task[None]] = {}
        self._tenants: Counter[str] = Counter()  # calls in flight
        # By job id: how far a model is that does not serve yet; when a job may be tried again, on
        # the monotonic clock; how many streams of a job were cut.
        self.progress: dict[str, dict[str, Any]] = {}
        self._not_before: dict[str, float] = {}
        self._cuts: Counter[str] = Counter()
        self._waits = CallsInFlight()
        self._wake = asyncio.Event()
        self._forecasts = Forecasts()

    @property
    def in_flight(self) -> int:
        return len(self._running)

    def wake(self) -> None:
        """Has the runner look for something to do."""
        self._wake.set()

    async def close(self) -> None:
        """Ends every call; the jobs of these calls are queued again."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def cancel(self, job_id: str) -> None:
        """Ends the call of a job that is cancelling, down to the engine."""
        if task := self._running.get(job_id):
            task.cancel()

    async def run(self) -> None:
        """Runs jobs for as long as this process has them. Raises Superseded."""
        await self._blocking(self._store.recover)
        await rounds(self._round, self._wake, "jobs")

    async def _round(self) -> float | None:
        """Begins what there is room for. Returns after how many seconds there may be more to do
        without a wake; None: never."""
        for job_id in await self._blocking(self._store.expire_overdue):
            self.cancel(job_id)
        await self._blocking(self._store.requeue_all_but, frozenset(self._running))
        now = time.monotonic()
        self._not_before = {one: s for one, s in self._not_before.items() if s > now}
        config = self._config()
        alone = set(self._suspects.models)
        late = tuple(self._waits.models(config.turn_s) | alone)
        queued = await self._blocking(self._store.queued, tuple(self._not_before), late)
        left = [job for job in queued if job.id not in self._running]
        while left:
            if len(self._running) >= config.in_flight:
                self._waits.give_way(config.turn_s, config.in_flight)
                break
            left.remove(job := min(left, key=self._rank))
            if job.model not in alone:
                await self._begin(job.id)
                if job.losses:
                    alone.add(job.model)
        if not (queued or late or self._running or self._not_before):
            return None
        return min([SWEEP_S, *(s - now for s in self._not_before.values())])

    def _rank(self, job: Job) -> tuple[int, int]:
        """By what a queued job goes before others; equal ones keep the order of the store."""
        return job.priority, self._tenants[job.tenant]

    async def _begin(self, job_id: str) -> None:
        job = await self._blocking(self._store.begin, job_id)
        if job is not None:
            self._on_change()
            task = asyncio.create_task(self._carry(job))
            self._running[job_id] = task
            self._tenants[job.tenant] += 1
            task.add_done_callback(log_failure)
            # No `finally` of the task, because a task cancelled before its first step has none.
            task.add_done_callback(partial(self._ended, job))

    def _ended(self, job: Job, task: asyncio.Task[None]) -> None:
        del self._running[job.id]
        self._tenants[job.tenant] -= 1
        # The task has failed by a bug, or because the store could not note what became of the job.
        if not task.cancelled() and task.exception() is not None:
            self._not_before[job.id] = time.monotonic() + AGAIN_MOST_S
        self.progress.pop(job.id, None)
        self._on_change()
        self.wake()

    async def _carry(self, job: Job) -> None:
        """Makes one attempt, and notes in the store what became of it."""
        try:
            answer = await self._attempt(job)
            if await self._blocking(
                self._store.complete, job.id, answer.status, answer.body, answer.content_type
            ):
                await self._trim(job.tenant)
            else:
                await self._blocking(self._store.requeue, job.id)  # it was cancelled meanwhile
        except asyncio.CancelledError:
            # The job was cancelled, or this process ends and leaves the job to the next one.
            await asyncio.shield(self._blocking(self._store.requeue, job.id))
        except RetryLater as again:
            logger.info("job %s is tried again in %.0f s: %s", job.id, again.after_s, again.why)
            self._not_before[job.id] = time.monotonic() + again.after_s
            losses = again.deaths if isinstance(again, EngineDied) else 0
            await self._blocking(self._store.requeue, job.id, losses)
        except (StorageFull, StorageFailed) as error:
            self._not_before[job.id] = time.monotonic() + STORAGE_AGAIN_S
            await self._keep_refusal(job, error)
        except Superseded as error:
            logger.warning("%s", error)

    async def _attempt(self, job: Job) -> Answer:
        """Makes one attempt. The error of the last of CUT_TRIES cut streams, or of DEATHS_MOST
        deaths of the engine, is taken for the answer. Raises RetryLater, StorageFull,
        StorageFailed, Superseded."""
        try:
            answer = await self._answer(job)
        except EngineDied as died:
            if job.losses + died.deaths < DEATHS_MOST:
                raise
            answer = died.answer
        except StreamCut as cut:
            self._cuts[job.id] += 1
            if self._cuts[job.id] < CUT_TRIES:
                raise
            answer = cut.answer
        self._cuts.pop(job.id, None)
        return answer

    async def _answer(self, job: Job) -> Answer:
        """Raises RetryLater, StreamCut, StorageFull, StorageFailed, Superseded."""
        try:
            service = await self._service()
        except RequestError as error:  # the arbiter is away
            raise RetryLater(error.retry_after_s, str(error)) from error
        kind = KINDS.get(job.kind)
        body = await self._blocking(self._store.request, job.id)
        sent = kind.request(job, body) if kind else body
        writer = EventWriter(self._store, self._blocking, job.id, self._on_change)
        try:
            async with (
                self._suspects.call(job.model, job.losses),
                self._waits.call(job.model) as call,
            ):
                answer = await attempt(
                    service,
                    job.path,
                    sent,
                    job.headers,
                    job.tenant,
                    writer.add,
                    on_progress=partial(self._tell_progress, job.id, call),
                    priority=job.priority,
                    forecasts=self._forecasts,
                    waited_s=max(0.0, time.time() - job.created_s),
                )
            await writer.written()
        except (StorageFull, StorageFailed, Superseded):
            raise
        except RequestError as error:  # the job has too many events, or is not in progress any more
            if isinstance(error, Conflict):
                raise RetryLater(None, str(error)) from error
            return refused(error)
        finally:
            await writer.ended()
        return kind.answer(job, answer, writer.all) if kind else answer

    def _tell_progress(self, job_id: str, call: Call, progress: messages.Progress | None) -> None:
        call.note(progress)
        if progress is None or progress == messages.RUNNING:
            self.progress.pop(job_id, None)
        else:
            self.progress[job_id] = asdict(progress)

    async def _keep_refusal(self, job: Job, error: RequestError) -> None:
        """Keeps a refusal in place of an answer for which there was no room: it is small."""
        answer = refused(error)
        try:
            await self._blocking(self._store.complete, job.id, answer.status, answer.body)
        except (StorageFull, StorageFailed):
            logger.error("job %s has no room for its answer: %s", job.id, error)
            await self._blocking(self._store.requeue, job.id)


class EventWriter:
    """Appends a job's events; those that come while one write runs go together in the next."""

    def __init__(
        self, store: JobStore, blocking: Blocking, job_id: str, on_change: Callable[[], None]
    ) -> None:
        self._store, self._blocking, self._job_id = store, blocking, job_id
        self._on_change = on_change
        self.all: list[str] = []
        self._kept = 0
        self._writing: asyncio.Task[None] | None = None

    async def add(self, events: list[str]) -> None:
        """Keeps events with the next write. Raises what the write before it raised."""
        self.all += events
        if self._writing is None or self._writing.done():
            if self._writing is not None:
                self._writing.result()
            self._writing = asyncio.create_task(self._write())

    async def written(self) -> None:
        """Waits until all events are kept. Raises StorageFull, StorageFailed, Superseded, Conflict,
        Refused."""
        if self._writing is not None:
            await self._writing
        await self._write()

    async def ended(self) -> None:
        """Waits for the end of the last write, whatever became of it."""
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)

    async def _write(self) -> None:
        while new := self.all[self._kept :]:
            await self._blocking(self._store.append_events, self._job_id, new)
            self._kept += len(new)
            self._on_change()
