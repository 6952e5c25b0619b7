"""Calls that outlive their client: what `Prefer: respond-async` and `background` make of a request,
and how a job is shown. Knows no HTTP server.
"""

import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace

from arbiter.core.types import Priority
from deployments.config.schema import Table
from deployments.config.task_section import PREFIX
from deployments.front.inference.request import BadRequest, headers_for_later
from deployments.front.inference.schemas import DAY_S
from deployments.front.inference.service import AnyCall
from deployments.front.status import model_cards
from deployments.front.status.arbiter_gateway import Presence
from deployments.jobs.client import JobsClient
from deployments.jobs.errors import EventsRestarted
from deployments.jobs.responses import Json
from deployments.jobs.store import EventPage, Job, JobState, NewJob
from deployments.messages import InferenceCall
from deployments.remotes.offers import RemoteCall
from deployments.tasks.climb import TaskCall

ASYNC_KEEP_S = DAY_S  # results may be pictures and sound; a client that polls comes back
POLL_S = 10.0  # of one long poll; a stream that is silent for longer is sent a comment
CANCEL_S = 10.0  # what a call's end may take, down to the engine
COMMENT = b": waiting\n\n"
RESPOND_ASYNC = "respond-async"


def prefers_async(prefers: list[str]) -> bool:
    """True if the `Prefer` headers of a request ask for `respond-async` (RFC 7240)."""
    preferences = [
        one.partition(";")[0].strip().lower() for line in prefers for one in line.split(",")
    ]
    return RESPOND_ASYNC in preferences


def new_job(call: InferenceCall, headers: Mapping[str, str], priority: Priority | None) -> NewJob:
    """The job of a call. `priority`: that was asked for; None: batch."""
    return NewJob(
        *(f"job_{uuid.uuid4().hex}", call.tenant, "async", call.path, call.model),
        headers=headers_for_later(headers),
        meta={} if priority is None else {"priority": priority.name},
        keep_s=ASYNC_KEEP_S,
    )


async def for_later(call: AnyCall) -> InferenceCall:
    """The call, where a job may make it; of a task its path and tenant, with the task as the model,
    because its rungs are ordered anew when it is made. Raises BadRequest for what only another
    machine could answer, because the key may have lost its scope by then."""
    if isinstance(call, TaskCall):
        local = [rung for rung in call.ladder.rungs if not rung.state.is_remote]
        if not local:
            message = f"no model of this machine can have this request of {PREFIX}{call.task}"
            raise BadRequest(f"{message}; ask it live", "model")
        return replace(await call.call_of(local[0].name), model=PREFIX + call.task)
    if isinstance(call, RemoteCall):
        raise BadRequest(f"{call.remote} is no model of this machine; ask it live", "model")
    return call


async def shown(job: Job, table: Table) -> Json:
    """A job as its client sees it."""
    [row] = await shown_all([job], table)
    return row


async def shown_all(jobs: Sequence[Job], table: Table) -> list[Json]:
    """Jobs as their client sees them. Asks the arbiter, once for all of them, when the models of
    those could answer that have not ended; loads nothing, and reads no files."""
    waited_for = {job.model for job in jobs if not job.state.is_finished} & table.homes.keys()
    presences = await model_cards.presences(table, waited_for) if waited_for else {}
    return [_shown(job, presences) for job in jobs]


def _shown(job: Job, presences: Mapping[str, Presence]) -> Json:
    ends_s = None if job.ended_s is None else job.ended_s + job.keep_s
    is_waited_for = not job.state.is_finished and job.model in presences
    return {
        "id": job.id,
        "object": "job",
        "status": job.state.value,
        "path": job.path,
        "model": job.model,
        "created_at": int(job.created_s),
        "started_at": _whole(job.begun_s),
        "ended_at": _whole(job.ended_s),
        "deadline_at": int(job.deadline_s),
        "expires_at": _whole(ends_s),
        "attempts": job.attempts,
        "queue_position": job.position if job.state is JobState.QUEUED else None,
        "progress": {"events": job.event_count, "waiting": job.progress},
        "estimate_s": presences[job.model].estimate_s if is_waited_for else None,
        "response_status": job.status,
        "error": job.error,
        "events": f"/v1/jobs/{job.id}/events",
        "result": None if job.status is None else f"/v1/jobs/{job.id}/result",
    }


def _whole(instant_s: float | None) -> int | None:
    return None if instant_s is None else int(instant_s)


async def whole_result(jobs: JobsClient, tenant: str, job_id: str) -> bytes:
    """Raises NotFound, Conflict, JobsAway."""
    return b"".join([piece async for piece in result(jobs, tenant, job_id)])


async def result(jobs: JobsClient, tenant: str, job_id: str) -> AsyncGenerator[bytes, None]:
    """A job's answer in pieces. Raises NotFound, Conflict, JobsAway."""
    offset = 0
    while piece := await jobs.call("result", tenant, job_id, offset):
        offset += len(piece)
        yield piece


async def pages(
    jobs: JobsClient, tenant: str, job_id: str, after: int
) -> AsyncGenerator[EventPage, None]:
    """Pages of events as they come, until the job is finished; a page without events after a while
    of silence. A machine that lost its power may have lost the last events of a finished job: they
    are not waited for. Raises NotFound, JobsAway."""
    while True:
        page: EventPage = await jobs.call("events", tenant, job_id, after, POLL_S)
        if page.events:
            after = page.events[-1][0]
        yield page
        if page.job.state.is_finished and (not page.events or after >= page.job.event_count):
            return


async def events(
    jobs: JobsClient, tenant: str, job_id: str, after: int
) -> AsyncGenerator[bytes, None]:
    """A job's events as they were, each with its number as `id`. Raises NotFound, JobsAway;
    EventsRestarted where the reader has events of another attempt."""
    attempt: int | None = None  # whose events the reader has
    async for page in pages(jobs, tenant, job_id, after):
        job = page.job
        is_other = attempt not in (None, job.attempts) or after > job.event_count
        if after and is_other:
            raise EventsRestarted(job_id, after, job.attempts)
        attempt = job.attempts
        after = page.events[-1][0] if page.events else after
        yield b"".join(f"id: {number}\n{text}\n\n".encode() for number, text in page.events) or (
            COMMENT
        )


async def cancelled(jobs: JobsClient, tenant: str, job_id: str) -> Job:
    """Cancels it and waits a while for its call to end. Raises NotFound, JobsAway."""
    job: Job = await jobs.call("cancel", tenant, job_id)
    if not job.state.is_finished:
        page = await jobs.call("events", tenant, job_id, job.event_count, CANCEL_S)
        job = page.job
    return job
