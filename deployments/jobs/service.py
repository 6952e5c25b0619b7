"""JobsService: what the one `jobs` replica answers, and the runner beside it. Knows no Ray.

    client = JobsClient()                                  # in a front (deployments.jobs.client)
    job = await client.call("create", NewJob(id, tenant, kind, path, model), body)
    job = await client.call("get", tenant, job.id)         # with its position while it is queued
    page = await client.call("events", tenant, job.id, after, wait_s)     # a long poll
    piece = await client.call("result", tenant, job.id, offset)           # b"" at the end
    job = await client.call("cancel", tenant, job.id)
    jobs = await client.call("page", tenant, kind, after_id, limit)
    await client.call("keep", NewJob(...), request, result)   # was answered already
    await client.call("delete", tenant, job.id)

Files and batches have methods of their own, by the names of OpenAI's operations.

Every method may be called twice with the same arguments. Each raises RequestErrors
(deployments.jobs.errors). None but `create` has a model loaded.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from deployments.config.jobs_section import JobsConfig
from deployments.front.inference.service import InferenceService
from deployments.jobs import operator_rows, removal
from deployments.jobs.batch_runner import BatchRunner
from deployments.jobs.batch_store import Batch, BatchStore, NewBatch
from deployments.jobs.bodies import Bodies, folder_of
from deployments.jobs.database import Database
from deployments.jobs.errors import NotFound, Refused, StorageFailed, StorageFull
from deployments.jobs.file_store import BATCH, File, FileStore, NewFile
from deployments.jobs.kept_answers import KeptAnswers
from deployments.jobs.runner import Blocking, Runner
from deployments.jobs.store import EventPage, Job, JobStore, NewJob
from deployments.jobs.suspects import Suspects
from deployments.jobs.sweep import sweep

logger = logging.getLogger("ray.serve")

EVENTS_WAIT_MOST_S = 20.0  # of one long poll, below the 30 s after which calls are given up
FORGET_EVERY_S = 3_600.0  # between two looks for rows that have been kept for long enough
REMOVE_EVERY_S = 0.5  # the same while there are some, or a removed tenant's work is being ended
REMOVED_WITHIN_S = 10.0  # a caller waits so long for that work, well below the 30 s of any call
BATCH_PREFIX = "batch_"  # of a batch's id
ServiceOf = Callable[[], Awaitable[InferenceService]]


class JobsService:
    """Answers for jobs, files and batches. One per process; the newest process has the jobs
    (Database)."""

    def __init__(
        self, state_file: Path, service: ServiceOf, config: JobsConfig | None = None
    ) -> None:
        """`service` gives the front's service with the table as it is now."""
        self.config = config or JobsConfig()
        self._db = Database(state_file)
        self._bodies = bodies = Bodies(folder_of(state_file))
        self._blocking = Blocking()
        self._store = JobStore(self._db, bodies)
        self._kept = KeptAnswers(self._db, bodies, self._store)
        self._changed = asyncio.Event()
        suspects = Suspects()
        self._runner = Runner(
            self._store,
            self._blocking,
            service,
            lambda: self.config,
            suspects,
            self._tell_change,
            self._trim,
        )
        self._files = FileStore(self._db, bodies)
        self._batches = BatchStore(self._db, bodies)
        self._batch_runner = BatchRunner(
            self._batches, bodies, self._blocking, service, lambda: self.config, suspects
        )
        self._removal = asyncio.Event()  # a tenant is to be forgotten
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins to work on what is queued."""
        self._tasks = [
            asyncio.create_task(work())
            for work in (self._runner.run, self._batch_runner.run, self._forget)
        ]

    async def check_health(self) -> None:
        """Raises what ended this replica's work: Superseded, or a bug. Serve asks, and then
        replaces the replica."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def close(self) -> None:
        """Queues again what is in progress, for the next process."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._runner.close()
        await self._batch_runner.close()

    async def create(self, new: NewJob, body: bytes) -> Job:
        """Queues a job; called again, it returns the first. Raises TenantLimitReached,
        StorageFull."""
        most = self.config.tenant_jobs, self.config.tenant_job_bytes
        job = await self._blocking(self._store.create, new, body, *most)
        self._runner.wake()
        await self._trim(new.tenant)
        return job

    async def keep(self, new: NewJob, request: bytes, result: bytes) -> None:
        """Keeps an answer that was given already. Raises StorageFull."""
        await self._blocking(self._kept.keep, new, request, result)
        await self._trim(new.tenant)

    async def _trim(self, tenant: str) -> None:
        """Forgets the tenant's oldest finished jobs beyond its bounds."""
        most = self.config.tenant_results, self.config.tenant_result_bytes
        await self._blocking(self._kept.trim, tenant, *most)

    async def get(self, tenant: str, job_id: str) -> Job:
        """Raises NotFound."""
        job = await self._blocking(self._store.get, tenant, job_id)
        return replace(job, progress=self._runner.progress.get(job_id))

    async def page(
        self, tenant: str | None, kind: str | None = None, after: str = "", limit: int = 20
    ) -> list[Job]:
        """Returns jobs, the newest first; `tenant` None: of all tenants. `after`: the id of the
        last job seen."""
        return await self._blocking(self._store.page, tenant, kind, after, limit)

    async def cancel(self, tenant: str, job_id: str) -> Job:
        """Ends a job's call down to the engine; a finished job stays as it is. Raises NotFound."""
        job = await self._blocking(self._store.cancel, tenant, job_id)
        self._runner.cancel(job_id)
        self._tell_change()
        return job

    async def delete(self, tenant: str, job_id: str) -> None:
        """Deletes a finished job. Raises NotFound; Conflict where it is unfinished."""
        await self._blocking(self._store.delete, tenant, job_id)

    async def request(self, tenant: str, job_id: str) -> bytes:
        """Returns the body of a job's call. Raises NotFound."""
        await self.get(tenant, job_id)
        return await self._blocking(self._store.request, job_id)

    async def result(self, tenant: str, job_id: str, offset: int = 0) -> bytes:
        """Returns a piece of a job's answer; empty at the end. Raises NotFound; Conflict without an
        answer."""
        return await self._blocking(self._store.result, tenant, job_id, offset)

    async def events(
        self, tenant: str, job_id: str, after: int = 0, wait_s: float = 0.0
    ) -> EventPage:
        """Returns events with a number above `after`. Without any it waits for one, or for the
        job's end, for `wait_s` at most. Raises NotFound."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(wait_s, EVENTS_WAIT_MOST_S)):
                while True:
                    changed = self._changed
                    page = await self._blocking(self._store.events, tenant, job_id, after)
                    if page.events or page.job.state.is_finished:
                        return page
                    await changed.wait()
        return await self._blocking(self._store.events, tenant, job_id, after)

    # -- files ---------------------------------------------------------------------------------

    async def check_upload(self, tenant: str, size_bytes: int) -> None:
        """Checks that an upload of at least this size may begin. Raises TenantLimitReached."""
        most = self.config.tenant_bytes, self.config.tenant_files
        await self._blocking(self._files.check_room, tenant, size_bytes, *most)

    async def begin_file(self, new: NewFile) -> None:
        """Makes room for an upload. Raises Refused, TenantLimitReached."""
        most = self.config.tenant_bytes, self.config.tenant_files
        await self._blocking(self._files.begin, new, *most)

    async def append_file(self, file_id: str, offset: int, piece: bytes) -> None:
        """Appends the next piece, of at most PIECE_BYTES. Raises NotFound, Conflict,
        StorageFull."""
        await self._blocking(self._files.append, file_id, offset, piece)

    async def finish_file(self, file_id: str) -> File:
        """Ends a complete upload. Raises NotFound."""
        return await self._blocking(self._files.finish, file_id)

    async def abandon_file(self, file_id: str) -> None:
        """Forgets an upload that goes no further. A file that is complete, or is not there, is left
        as it is."""
        await self._blocking(self._files.abandon, file_id)

    async def file(self, tenant: str, file_id: str) -> File:
        """Raises NotFound."""
        return await self._blocking(self._files.get, tenant, file_id)

    async def files(
        self, tenant: str, purpose: str | None, after: str, limit: int, order: str
    ) -> list[File]:
        """Returns files of a tenant. `order`: `asc` or `desc`, by the time when they were made."""
        return await self._blocking(self._files.page, tenant, purpose, after, limit, order)

    async def file_content(self, tenant: str, file_id: str, offset: int) -> bytes:
        """Returns a piece of a file; empty at the end. Raises NotFound."""
        return await self._blocking(self._files.content, tenant, file_id, offset)

    async def delete_file(self, tenant: str, file_id: str) -> None:
        """Deletes a file. Repeated, it is done once. Raises NotFound; Conflict while a batch reads
        it."""
        await self._blocking(self._files.delete, tenant, file_id)

    # -- batches -------------------------------------------------------------------------------

    async def create_batch(self, new: NewBatch) -> Batch:
        """Makes a batch, and begins to validate it. Raises Refused for a wrong input file,
        TenantLimitReached."""
        batch = await self._blocking(self._begin_batch, new)
        self._batch_runner.wake()
        return batch

    def _begin_batch(self, new: NewBatch) -> Batch:
        """Checks the file and makes the batch in one turn of the thread, because the file may be
        deleted in the next."""
        try:
            file = self._files.get(new.tenant, new.input_file)
        except NotFound as error:
            raise Refused(str(error), "input_file_id") from error
        if file.purpose != BATCH:
            message = (
                f"file {file.id} is for {file.purpose!r}; a batch reads files of purpose 'batch'"
            )
            raise Refused(message, "input_file_id")
        if self._batches.tenant_of(new.id) is None:  # asked for once
            self._batches.check_room(new.tenant, self.config.tenant_bytes)
        return self._batches.create(new, self.config.tenant_batches)

    async def batch(self, tenant: str, batch_id: str) -> Batch:
        """Raises NotFound."""
        return await self._blocking(self._batches.get, tenant, batch_id)

    async def batches(self, tenant: str | None, after: str, limit: int) -> list[Batch]:
        """Returns batches, the newest first; `tenant` None: of all tenants."""
        return await self._blocking(self._batches.page, tenant, after, limit)

    async def cancel_batch(self, tenant: str, batch_id: str) -> Batch:
        """Ends a batch's calls; the results so far stay. A finished batch stays as it is. Raises
        NotFound."""
        batch = await self._blocking(self._batches.cancel, tenant, batch_id)
        self._batch_runner.wake()
        return batch

    # -- what an operator sees -----------------------------------------------------------------

    async def overview(self, limit: int) -> dict[str, Any]:
        """Returns the newest batches and jobs of all tenants, and how many calls they have in
        flight."""
        batches = await self.batches(None, "", limit)
        jobs = await self.page(None, None, "", limit)
        rows = [*map(operator_rows.batch, batches), *map(operator_rows.job, jobs)]
        rows.sort(key=lambda row: -row["created_s"])
        calls = {"batch_calls": self._batch_runner.in_flight, "job_calls": self._runner.in_flight}
        return {"jobs": rows[:limit], **calls}

    async def row(self, any_id: str) -> dict[str, Any]:
        """Returns a batch or job of any tenant. Raises NotFound."""
        if (tenant := await self._blocking(self._batches.tenant_of, any_id)) is not None:
            return operator_rows.batch(await self.batch(tenant, any_id))
        return operator_rows.job(await self._blocking(self._store.get_of_any, any_id))

    async def cancel_any(self, any_id: str) -> dict[str, Any]:
        """Cancels a job or batch of any tenant. Raises NotFound."""
        tenant = (await self.row(any_id))["tenant"]
        if any_id.startswith(BATCH_PREFIX):
            return operator_rows.batch(await self.cancel_batch(tenant, any_id))
        return operator_rows.job(await self.cancel(tenant, any_id))

    async def remove_tenant(self, tenant: str) -> int:
        """Ends the tenant's work and erases its jobs, batches, files and responses. Returns how
        many of them are still to come to their end, after which they are erased as well. Raises
        StorageFull, StorageFailed."""
        await self._blocking(removal.end_all, self._db, tenant)
        self._runner.wake()
        self._batch_runner.wake()
        self._removal.set()
        ends_s = time.monotonic() + REMOVED_WITHIN_S
        while (
            rows_left := await self._blocking(removal.left, self._db)
        ) and time.monotonic() < ends_s:
            await asyncio.sleep(REMOVE_EVERY_S / 5)
        return rows_left

    def _tell_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _forget(self) -> None:
        """Raises Superseded."""
        while True:
            self._removal.clear()
            try:
                due_s = await self._blocking(self._forget_old)
            except (StorageFull, StorageFailed) as error:
                logger.error("nothing old is forgotten: %s", error)
                due_s = FORGET_EVERY_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(due_s):
                    await self._removal.wait()

    def _forget_old(self) -> float:
        """Returns after how many seconds there may be more to forget."""
        count = sum(store.forget_old() for store in (self._store, self._batches, self._files))
        sweep(self._db, self._bodies)
        return REMOVE_EVERY_S if count or removal.left(self._db) else FORGET_EVERY_S
