"""JobStore: calls that outlive their client, each a row of the state file and up to three bodies.

A *job* is one call (path, body, tenant) that the runner makes with priority batch. Its states:

    queued -> in_progress -> completed | failed     the call was answered, or refused for good
       |  \\         |  \\--> queued                  the process died or the refusal was transient
       |   \\        '-----> cancelling -> cancelled
       '----> cancelled     any unfinished -> expired   at its deadline

While it is in progress *events* may be appended, which others read by number while it runs and
afterwards; a new attempt begins with none, and `attempts` tells a reader. Its answer is a body of
its own. Rows and bodies are kept for `keep_s` after the end.

A job in progress is leased to the process that began it, by its epoch: the next process puts what
it finds in progress back into the queue, and no write of the former is taken any more.
"""

import json
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from arbiter.core.types import Priority
from deployments.jobs.bodies import PART, Bodies
from deployments.jobs.database import Database
from deployments.jobs.errors import (
    Conflict,
    NotFound,
    Refused,
    StorageFull,
    TenantLimitReached,
)

EVENTS_MOST_BYTES = 64 << 20  # of one job: 100,000 tokens' events, or ten pictures as they form
# Remembered places to which readers have read a job's events, 200 bytes each. A second reader of
# the same events begins from the places of the first.
PLACES_MOST = 10_000
QUEUED_MOST = 1_000  # jobs that are read in one look at what is next, above all that run at once
PAGE_BYTES, PAGE_COUNT = 1 << 20, 1_000  # of the events in one message
REQUEST, RESULT, EVENTS = "-request", "-result", "-events"  # behind a job's id: its bodies

# The queued jobs; their order is by urgency, then by turns of the tenants, then by age. A suspect
# goes behind its tenant's other jobs.
_VALUES = " ".join(f"WHEN '{one.name}' THEN {one.value}" for one in Priority)
_URGENCY = f"CASE json_extract(meta, '$.priority') {_VALUES} ELSE {Priority.BATCH.value} END"
_QUEUED = (
    f"SELECT *, {_URGENCY} AS urgency, row_number() OVER"
    f" (PARTITION BY tenant, {_URGENCY} ORDER BY losses > 0, created_s, id) AS turn"
    " FROM jobs WHERE state = 'queued'"
)
_ORDER = ("urgency", "turn", "created_s", "id")
_BEFORE = (
    f"WITH queued AS ({_QUEUED}) SELECT count(*)"
    " FROM queued, (SELECT * FROM queued WHERE id = ?) AS mine WHERE"
    f" ({', '.join(f'queued.{one}' for one in _ORDER)})"
    f" < ({', '.join(f'mine.{one}' for one in _ORDER)})"
)


class JobState(StrEnum):
    """The state of a job; the first three are unfinished."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def is_finished(self) -> bool:
        return self not in (JobState.QUEUED, JobState.IN_PROGRESS, JobState.CANCELLING)


@dataclass(frozen=True, slots=True)
class NewJob:
    """What a client asks for. `id` is made by the asker, so that asking twice makes one job."""

    id: str
    tenant: str
    kind: str  # who made it: `response`, `async`
    path: str
    model: str  # the one to make resident, for the order and for the display
    headers: dict[str, str] = field(default_factory=dict)  # as parse reads them
    meta: dict[str, Any] = field(default_factory=dict)  # of its kind; JSON, a few kB
    window_s: float = 86_400.0  # within which it must end
    keep_s: float = 30 * 86_400.0  # after its end


@dataclass(frozen=True, slots=True)
class Job:
    """A row. Instants are seconds of the wall clock (Unix), because they outlive machines."""

    id: str
    tenant: str
    kind: str
    path: str
    model: str
    headers: dict[str, str]
    meta: dict[str, Any]
    state: JobState
    created_s: float
    deadline_s: float
    keep_s: float
    begun_s: float | None
    ended_s: float | None
    attempts: int
    event_count: int  # of this attempt; events are numbered from 1
    status: int | None  # HTTP's, of the answer; its body is the result
    content_type: str | None
    error: dict[str, Any] | None  # OpenAI's error object; None: none
    position: int = 0  # jobs that are queued before it, of all tenants
    progress: dict[str, Any] | None = None  # while its model loads; kept by no file
    losses: int = 0  # how often the engine died under it

    @property
    def priority(self) -> Priority:
        return Priority[self.meta.get("priority", Priority.BATCH.name)]


@dataclass(frozen=True, slots=True)
class EventPage:
    """Events of a job from a number on; `job` is as it is now."""

    job: Job
    events: tuple[tuple[int, str], ...]  # number and text


class JobStore:
    """Keeps jobs, their bodies and events. Every method blocks; one thread at a time."""

    def __init__(
        self, db: Database, bodies: Bodies, clock: Callable[[], float] = time.time
    ) -> None:
        self._db, self._bodies, self._clock = db, bodies, clock
        self._places: dict[tuple[str, int, int], tuple[int, int]] = {}  # of readers of events

    # -- what clients ask ----------------------------------------------------------------------

    def create(
        self,
        new: NewJob,
        body: bytes,
        most_unfinished: int = 1_000,
        most_bytes: int = 1 << 30,
    ) -> Job:
        """Queues a job; called again, it returns the first. Raises TenantLimitReached, also where
        the bodies of the tenant's unfinished jobs exceed `most_bytes`; StorageFull."""
        if (existing := self._find(new.id)) is not None:
            return self._job_of(existing, new.tenant, new.id)
        self._bodies.write(new.id + REQUEST, body)
        try:
            self._insert(new, len(body), most_unfinished, most_bytes)
        except (TenantLimitReached, StorageFull):
            self._bodies.remove(new.id + REQUEST)
            raise
        return self.get(new.tenant, new.id)

    def _insert(self, new: NewJob, body_bytes: int, most_unfinished: int, most_bytes: int) -> None:
        now_s = self._clock()
        with self._db.writing() as db:
            unfinished = "tenant = ? AND state IN ('queued', 'in_progress', 'cancelling')"
            sums = f"SELECT count(*), coalesce(sum(body_bytes), 0) FROM jobs WHERE {unfinished}"
            waiting, size = db.execute(sums, (new.tenant,)).fetchone()
            if waiting >= most_unfinished:
                raise TenantLimitReached(f"{waiting} unfinished jobs", most_unfinished)
            if size + body_bytes > most_bytes:
                message = f"unfinished jobs of {size} bytes and adds {body_bytes}"
                raise TenantLimitReached(message, most_bytes)
            db.execute(
                "INSERT INTO jobs (id, tenant, kind, path, model, headers, meta, state, created_s,"
                " deadline_s, keep_s, body_bytes) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(new.id, new.tenant, new.kind, new.path, new.model),
                    *(json.dumps(new.headers), json.dumps(new.meta), JobState.QUEUED),
                    *(now_s, now_s + new.window_s, new.keep_s, body_bytes),
                ),
            )

    def get(self, tenant: str, job_id: str) -> Job:
        """Returns a job of a tenant with its position. Raises NotFound, also for a job of another
        tenant, or that has been kept for its `keep_s`."""
        job = self._kept(tenant, job_id)
        if job.state is not JobState.QUEUED:
            return job
        return replace(job, position=self._db.rows(_BEFORE, job_id)[0][0])

    def get_of_any(self, job_id: str) -> Job:
        """Returns the job with this id, of any tenant. Raises NotFound."""
        row = self._find(job_id)
        if row is None:
            raise NotFound("job", job_id)
        return _job(row)

    def page(
        self, tenant: str | None, kind: str | None = None, after: str = "", limit: int = 20
    ) -> list[Job]:
        """Returns jobs, the newest first; `tenant` None: of all tenants. `after`: the id of the
        last job seen. Raises Refused."""
        self._db.check_after("jobs", after, tenant)
        wheres: list[str] = ["coalesce(ended_s + keep_s, 9e99) > ?"]
        values: list[Any] = [self._clock()]
        for name, value in (("tenant", tenant), ("kind", kind)):
            if value is not None:
                wheres.append(f"{name} = ?")
                values.append(value)
        if after:
            wheres.append("(created_s, id) < (SELECT created_s, id FROM jobs WHERE id = ?)")
            values.append(after)
        query = f"WHERE {' AND '.join(wheres)} ORDER BY created_s DESC, id DESC LIMIT {int(limit)}"
        return [_job(row) for row in self._db.rows(f"SELECT * FROM jobs {query}", *values)]

    def cancel(self, tenant: str, job_id: str) -> Job:
        """Cancels a queued job at once; a job in progress is cancelling until the runner has ended
        it, and a finished job stays as it is. Raises NotFound."""
        self.get(tenant, job_id)
        with self._db.writing() as db:
            db.execute(
                "UPDATE jobs SET state = 'cancelled', ended_s = ?"
                " WHERE id = ? AND state = 'queued'",
                (self._clock(), job_id),
            )
            db.execute(
                "UPDATE jobs SET state = 'cancelling' WHERE id = ? AND state = 'in_progress'",
                (job_id,),
            )
        return self.get(tenant, job_id)

    def delete(self, tenant: str, job_id: str) -> None:
        """Forgets a finished job and its bodies. Raises NotFound, Conflict."""
        job = self._job_of(self._find(job_id), tenant, job_id)
        if not job.state.is_finished:
            raise Conflict("job", job_id, job.state, "deleted; cancel it first")
        self._forget([job_id])

    def request(self, job_id: str) -> bytes:
        """Returns the body of a job's call."""
        return b"".join(self._pieces(job_id + REQUEST))

    def result(self, tenant: str, job_id: str, offset: int = 0) -> bytes:
        """Returns a piece of a job's answer from an offset; empty at the end. Raises NotFound;
        Conflict where the job has no answer."""
        job = self._kept(tenant, job_id)
        if job.status is None:
            raise Conflict("job", job_id, job.state, "read: it has no answer")
        return self._bodies.read(job_id + RESULT, offset)

    def events(self, tenant: str, job_id: str, after: int = 0) -> EventPage:
        """Returns events with a number above `after`, as many as one message takes. Raises
        NotFound."""
        job = self._kept(tenant, job_id)
        events: list[tuple[int, str]] = []
        size = 0
        if job.event_count > max(after, 0):
            before, offset = self._reader_at(job, after)
            for number, line in enumerate(self._bodies.lines(job_id + EVENTS, offset), before + 1):
                if number > job.event_count or len(events) >= PAGE_COUNT or size >= PAGE_BYTES:
                    break
                if not line.endswith(b"\n"):
                    break  # cut where a machine lost its power: what follows is lost
                offset += len(line)
                if number > after:
                    events.append((number, json.loads(line)))
                    size += len(line)
            last = events[-1][0] if events else after
            self._places[job.id, job.attempts, last] = last, offset
        return EventPage(job, tuple(events))

    def _reader_at(self, job: Job, after: int) -> tuple[int, int]:
        """Returns a number up to `after`, and where the event behind it begins. Readers come back
        to where they were, so that what lies before is not read again."""
        while len(self._places) > PLACES_MOST:
            del self._places[next(iter(self._places))]
        return self._places.get((job.id, job.attempts, after), (0, 0))

    # -- what the runner does ------------------------------------------------------------------

    def recover(self) -> int:
        """Takes over what a former process had in progress. Returns how many are queued again."""
        with self._db.writing() as db:
            values = (self._db.epoch,)
            again = db.execute(
                "UPDATE jobs SET state = 'queued' WHERE state = 'in_progress' AND epoch < ?", values
            ).rowcount
            db.execute(
                "UPDATE jobs SET state = 'cancelled', ended_s = ?"
                " WHERE state = 'cancelling' AND epoch < ?",
                (self._clock(), *values),
            )
        return again

    def queued(
        self, without: Collection[str] = (), without_models: Collection[str] = ()
    ) -> Sequence[Job]:
        """Returns queued jobs in their order, QUEUED_MOST at most, but for the ids of `without` and
        the jobs for the models of `without_models`: they would hide later jobs."""
        mine = (
            f"{_QUEUED} AND id NOT IN (SELECT value FROM json_each(?))"
            " AND model NOT IN (SELECT value FROM json_each(?))"
            f" ORDER BY {', '.join(_ORDER)} LIMIT ?"
        )
        left_out = json.dumps([*without]), json.dumps([*without_models])
        return [_job(row) for row in self._db.rows(mine, *left_out, QUEUED_MOST)]

    def begin(self, job_id: str) -> Job | None:
        """Begins a job in this process, with no events yet; None where it is no longer queued."""
        with self._db.writing() as db:
            begun = db.execute(
                "UPDATE jobs SET state = 'in_progress', begun_s = coalesce(begun_s, ?), epoch = ?,"
                " attempts = attempts + 1, event_count = 0, event_bytes = 0"
                " WHERE id = ? AND state = 'queued'",
                (self._clock(), self._db.epoch, job_id),
            ).rowcount
        row = self._find(job_id) if begun else None
        return None if row is None else _job(row)

    def append_events(self, job_id: str, events: Sequence[str]) -> int:
        """Appends events to a job, and returns the number of the last. Raises Conflict where the
        job is not in progress, Refused beyond EVENTS_MOST_BYTES, StorageFull."""
        text = "".join(json.dumps(event) + "\n" for event in events).encode()
        with self._db.writing() as db:
            row = db.execute("SELECT * FROM jobs WHERE id = ?", (job_id,)).fetchone()
            if row is None or row["state"] != JobState.IN_PROGRESS:
                raise Conflict("job", job_id, row["state"] if row else "gone", "added to")
            if row["event_bytes"] + len(text) > EVENTS_MOST_BYTES:
                raise Refused(f"the events of {job_id} are more than {EVENTS_MOST_BYTES} bytes")
            length = self._bodies.append(job_id + EVENTS, row["event_bytes"], text)
            count: int = row["event_count"] + len(events)
            db.execute(
                "UPDATE jobs SET event_count = ?, event_bytes = ? WHERE id = ?",
                (count, length, job_id),
            )
        return count

    def complete(
        self, job_id: str, status: int, body: bytes, content_type: str = "application/json"
    ) -> bool:
        """Keeps its answer; failed from status 400 on. False: it is not in progress any more, and
        nothing was kept. The body has its name only where the row takes it: a process that was
        replaced, and does not know it, spoils no other's answer."""
        draft = f"{job_id}{RESULT}-{self._db.epoch}"
        self._bodies.draft(draft, body)
        state = JobState.FAILED if status >= 400 else JobState.COMPLETED
        error = _error_of(body) if status >= 400 else None
        with self._db.writing() as db:
            ended = db.execute(
                "UPDATE jobs SET state = ?, status = ?, content_type = ?, error = ?, ended_s = ?,"
                " result_bytes = ?"
                " WHERE id = ? AND state = 'in_progress' AND epoch = ?",
                (
                    *(state, status, content_type, json.dumps(error), self._clock()),
                    *(len(body), job_id, self._db.epoch),
                ),
            ).rowcount
            if ended:
                self._bodies.adopt(draft, job_id + RESULT)
        if not ended:
            self._bodies.remove(draft + PART)
        return bool(ended)

    def requeue(self, job_id: str, losses: int = 0) -> None:
        """Queues a job that is to be tried again; a job that is being cancelled is cancelled.
        `losses`: how often the engine died under it, in addition."""
        with self._db.writing() as db:
            db.execute(
                "UPDATE jobs SET state = iif(state = 'cancelling', 'cancelled', 'queued'),"
                " ended_s = iif(state = 'cancelling', ?, NULL), losses = losses + ?"
                " WHERE id = ? AND state IN ('in_progress', 'cancelling')",
                (self._clock(), losses, job_id),
            )

    def requeue_all_but(self, running: Collection[str]) -> None:
        """Queues the jobs again that this process has in progress and that are not among `running`,
        by id: the end of such a job found no room on the disk, or its call was cancelled before its
        first step."""
        query = "SELECT id FROM jobs WHERE state IN ('in_progress', 'cancelling') AND epoch = ?"
        for row in self._db.rows(query, self._db.epoch):
            if row["id"] not in running:
                self.requeue(row["id"])

    def expire_overdue(self) -> list[str]:
        """Ends the jobs that are past their deadline. Returns the ids of those in progress, whose
        calls the runner ends."""
        late = "state IN ('queued', 'in_progress', 'cancelling') AND deadline_s <= ?"
        now_s = self._clock()
        with self._db.writing() as db:
            rows = db.execute(f"SELECT id, state FROM jobs WHERE {late}", (now_s,)).fetchall()
            db.execute(f"UPDATE jobs SET state = 'expired', ended_s = ? WHERE {late}", (now_s,) * 2)
        return [row["id"] for row in rows if row["state"] != JobState.QUEUED]

    def forget_old(self) -> int:
        """Forgets jobs that have been finished for their `keep_s`, some at a time."""
        old = "ended_s IS NOT NULL AND ended_s + keep_s <= ? LIMIT 1000"
        ids = [row[0] for row in self._db.rows(f"SELECT id FROM jobs WHERE {old}", self._clock())]
        self._forget(ids)
        return len(ids)

    # -- the rows ------------------------------------------------------------------------------

    def _forget(self, ids: Sequence[str]) -> None:
        if not ids:
            return
        with self._db.writing() as db:  # the row first: a body without one is swept
            db.executemany("DELETE FROM jobs WHERE id = ?", [(one,) for one in ids])
        for one in ids:
            self._bodies.remove(one + REQUEST, one + RESULT, one + EVENTS, one + RESULT + PART)

    def _find(self, job_id: str) -> sqlite3.Row | None:
        return self._db.row("SELECT * FROM jobs WHERE id = ?", job_id)

    def _kept(self, tenant: str, job_id: str) -> Job:
        """Raises NotFound, also for a job that no process has forgotten yet."""
        job = self._job_of(self._find(job_id), tenant, job_id)
        if job.ended_s is not None and job.ended_s + job.keep_s <= self._clock():
            raise NotFound("job", job_id)
        return job

    def _job_of(self, row: sqlite3.Row | None, tenant: str, job_id: str) -> Job:
        if row is None or row["tenant"] != tenant:
            raise NotFound("job", job_id)
        return _job(row)

    def _pieces(self, name: str) -> Iterator[bytes]:
        offset = 0
        while piece := self._bodies.read(name, offset):
            offset += len(piece)
            yield piece


def _job(row: sqlite3.Row) -> Job:
    fields = {name: value for name, value in dict(row).items() if name in Job.__slots__}
    read = {name: json.loads(row[name] or "null") for name in ("headers", "meta", "error")}
    return Job(**{**fields, **read, "state": JobState(row["state"])})


def _error_of(body: bytes) -> dict[str, Any]:
    """Returns OpenAI's error object from the body of an answer; of an answer that has none, its
    text as one."""
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError, RecursionError):
        error = None
    if isinstance(error, dict):
        return error
    text = error if isinstance(error, str) else body[:1_000].decode(errors="replace")
    return {"message": text, "type": "server_error"}
