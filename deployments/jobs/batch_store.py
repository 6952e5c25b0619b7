"""BatchStore: OpenAI's batches and their lines.

    validating -> in_progress -> finalizing -> completed | expired
         |             '-------> cancelling -> cancelled
         '-> failed

A batch that is validated may be cancelled, or expire, as one in progress may. A batch whose files
are lost goes by `finalizing` to `failed`, from wherever it needs them.

A line is a row until its result is in the output or error file: one transaction deletes the row,
counts it, and moves the length of the file that counts. So each line has one result, whatever dies
when: a result whose transaction did not come through lies behind that length and is written over.
"""

import json
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from deployments.jobs.bodies import Bodies
from deployments.jobs.database import Database
from deployments.jobs.errors import BodyLost, Conflict, NotFound, TenantLimitReached
from deployments.jobs.file_store import (
    BATCH_KEPT_S,
    BATCH_OUTPUT,
    KEPT_BYTES,
    PROCESSED,
    UNFINISHED_BATCH,
)

KEPT_S = 30 * 86_400.0  # a finished batch's row, as long as its files
FINISHED_MOST = 500  # of one tenant: what failed may have 70 kB of errors in its row
# Of results, in one transaction: the disk takes them while the arbiter waits for the file.
PORTION_BYTES = 4 << 20
OPEN = UNFINISHED_BATCH
_LINE = "number, offset, length, model, served, losses"
_KEY = "batch = ? AND model = ? AND served = ? AND number = ?"


class BatchState(StrEnum):
    """OpenAI's `status`."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class NewBatch:
    """What a client asks for; ids are made by the asker, so that asking twice makes one batch."""

    id: str
    tenant: str
    endpoint: str
    input_file: str
    window: str  # as the client writes it
    window_s: float
    output_file: str
    error_file: str
    metadata: dict[str, str] | None = None
    output_kept_s: float = BATCH_KEPT_S


@dataclass(frozen=True, slots=True)
class Line:
    """Where one request is in the input file, whose model it needs, and what its engine is asked
    for: an adapter, or the model."""

    number: int  # from 1
    offset: int
    length: int
    model: str
    served: str
    losses: int = 0  # how often the engine died under it


@dataclass(frozen=True, slots=True)
class LineError:
    """What is wrong with a line, or with the file (no line)."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class FinishedLine:
    """The result of one line, as it is to be written."""

    batch: str
    line: Line
    text: bytes  # a line of the output file, or of the error file
    is_error: bool
    usage: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Batch:
    """A row. Instants are seconds of the wall clock."""

    id: str
    tenant: str
    endpoint: str
    input_file: str
    window: str
    metadata: dict[str, str] | None
    output_expiry: float
    state: BatchState
    errors: tuple[dict[str, Any], ...]
    total: int
    completed: int
    failed: int
    usage: dict[str, int]
    models: tuple[tuple[str, str], ...]
    outcome: str
    output_file: str
    error_file: str
    output_bytes: int
    error_bytes: int
    created_s: float
    deadline_s: float
    times: dict[str, float]

    @property
    def plain(self) -> dict[str, Any]:
        """OpenAI's batch object."""
        is_ended = self.state in (
            BatchState.COMPLETED,
            BatchState.EXPIRED,
            BatchState.CANCELLED,
            BatchState.FAILED,
        )
        output = self.output_file if is_ended and self.output_bytes else None
        errors = self.error_file if is_ended and self.error_bytes else None
        names = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling")
        times = {
            f"{name}_at": int(self.times[name]) if name in self.times else None
            for name in (*names, "cancelled")
        }
        models = {served for _, served in self.models}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": models.pop() if len(models) == 1 else None,
            "errors": {"object": "list", "data": list(self.errors)} if self.errors else None,
            "input_file_id": self.input_file,
            "completion_window": self.window,
            "status": self.state,
            "output_file_id": output,
            "error_file_id": errors,
            "created_at": int(self.created_s),
            "expires_at": int(self.deadline_s),
            **times,
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "usage": usage_object(self.usage),
            "metadata": self.metadata,
        }


def usage_object(usage: Mapping[str, int]) -> dict[str, Any]:
    """OpenAI's usage of a batch."""
    return {
        "input_tokens": usage.get("input", 0),
        "input_tokens_details": {"cached_tokens": usage.get("cached", 0)},
        "output_tokens": usage.get("output", 0),
        "output_tokens_details": {"reasoning_tokens": usage.get("reasoning", 0)},
        "total_tokens": usage.get("input", 0) + usage.get("output", 0),
    }


class BatchStore:
    """Keeps batches and lines. Every method blocks; one thread at a time. All raise StorageFull,
    StorageFailed."""

    def __init__(
        self, db: Database, bodies: Bodies, clock: Callable[[], float] = time.time
    ) -> None:
        self._db, self._bodies, self._clock = db, bodies, clock

    # -- what clients ask ----------------------------------------------------------------------

    def create(self, new: NewBatch, most_unfinished: int) -> Batch:
        """Makes a batch; called again, it returns the first. Raises TenantLimitReached."""
        now_s = self._clock()
        with self._db.writing() as db:
            mine = (new.tenant, new.id)
            query = f"SELECT count(*) FROM batches WHERE tenant = ? AND id != ? AND {OPEN}"
            if (count := db.execute(query, mine).fetchone()[0]) >= most_unfinished:
                raise TenantLimitReached(f"{count} unfinished batches", most_unfinished)
            self._trim(db, new.tenant)
            db.execute(
                "INSERT OR IGNORE INTO batches (id, tenant, endpoint, input_file, window, metadata,"
                " output_expiry, state, output_file, error_file, created_s, deadline_s)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, 'validating', ?, ?, ?, ?)",
                (
                    *(new.id, new.tenant, new.endpoint, new.input_file, new.window),
                    *(json.dumps(new.metadata), new.output_kept_s),
                    *(new.output_file, new.error_file, now_s, now_s + new.window_s),
                ),
            )
        return self.get(new.tenant, new.id)

    def _trim(self, db: sqlite3.Connection, tenant: str) -> None:
        """Forgets a tenant's oldest finished batches; their files stay as long as files do."""
        finished = f"SELECT id FROM batches WHERE tenant = ? AND NOT ({OPEN})"
        beyond = f"{finished} ORDER BY created_s DESC, id DESC LIMIT -1 OFFSET ?"
        db.execute(f"DELETE FROM batches WHERE id IN ({beyond})", (tenant, FINISHED_MOST))

    def get(self, tenant: str, batch_id: str) -> Batch:
        """Returns a batch of a tenant. Raises NotFound, also for a batch of another tenant."""
        row = self._db.row("SELECT * FROM batches WHERE id = ?", batch_id)
        if row is None or row["tenant"] != tenant:
            raise NotFound("batch", batch_id)
        return _batch(row)

    def tenant_of(self, batch_id: str) -> str | None:
        """Returns whose batch it is; None: there is no such batch."""
        row = self._db.row("SELECT tenant FROM batches WHERE id = ?", batch_id)
        return None if row is None else str(row[0])

    def page(self, tenant: str | None, after: str, limit: int) -> list[Batch]:
        """Returns batches, the newest first; `tenant` None: of all tenants. Raises Refused for an
        `after` that names no batch."""
        self._db.check_after("batches", after, tenant)
        wheres, values = ["1"], []
        if tenant is not None:
            wheres.append("tenant = ?")
            values.append(tenant)
        if after:
            wheres.append("(created_s, id) < (SELECT created_s, id FROM batches WHERE id = ?)")
            values.append(after)
        query = f"{' AND '.join(wheres)} ORDER BY created_s DESC, id DESC LIMIT {int(limit)}"
        return [
            _batch(row) for row in self._db.rows(f"SELECT * FROM batches WHERE {query}", *values)
        ]

    def cancel(self, tenant: str, batch_id: str) -> Batch:
        """Begins to cancel an unfinished batch, which `end` ends; a finished batch stays as it
        is."""
        batch = self.get(tenant, batch_id)
        if batch.state in (BatchState.VALIDATING, BatchState.IN_PROGRESS):
            self._enter(batch_id, BatchState.CANCELLING, "cancelled")
        return self.get(tenant, batch_id)

    # -- what the runner does ------------------------------------------------------------------

    def check_room(self, tenant: str, most_bytes: int) -> None:
        """Raises TenantLimitReached where the files and results of a tenant fill all that it may
        keep."""
        [row] = self._db.rows(KEPT_BYTES, tenant, "", tenant)
        if row[0] >= most_bytes:
            raise TenantLimitReached(f"files of {row[0]} bytes", most_bytes)

    def unfinished(self) -> list[Batch]:
        """Returns the unfinished batches, the oldest first."""
        query = f"SELECT * FROM batches WHERE {OPEN} ORDER BY created_s, id"
        return [_batch(row) for row in self._db.rows(query)]

    def expire_overdue(self) -> None:
        """Begins to end the batches that are past their deadline."""
        late = "state IN ('validating', 'in_progress') AND deadline_s <= ?"
        for row in self._db.rows(f"SELECT id FROM batches WHERE {late}", self._clock()):
            self._enter(row[0], BatchState.FINALIZING, "expired")

    def clear_lines(self, batch_id: str) -> None:
        """Deletes the lines of a validation that did not come to its end, or that found an
        error."""
        with self._db.writing() as db:
            db.execute("DELETE FROM batch_lines WHERE batch = ?", (batch_id,))

    def add_lines(self, batch_id: str, lines: Iterable[Line]) -> None:
        with self._db.writing() as db:
            db.executemany(
                "INSERT OR REPLACE INTO batch_lines (batch, model, served, number, offset, length)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                [
                    (batch_id, one.model, one.served, one.number, one.offset, one.length)
                    for one in lines
                ],
            )

    def start(self, batch_id: str, total: int, models: Sequence[tuple[str, str]]) -> None:
        """Begins a batch whose lines are all valid."""
        now_s = self._clock()
        with self._db.writing() as db:
            db.execute(
                "UPDATE batches SET state = 'in_progress', total = ?, models = ?,"
                " times = json_set(times, '$.in_progress', ?)"
                " WHERE id = ? AND state = 'validating'",
                (total, json.dumps(list(models)), now_s, batch_id),
            )

    def fail(self, batch_id: str, errors: Sequence[LineError]) -> None:
        """Ends a batch that has wrong lines: none of its lines is run."""
        self.clear_lines(batch_id)
        with self._db.writing() as db:
            db.execute(
                "UPDATE batches SET state = 'failed', errors = ?,"
                " times = json_set(times, '$.failed', ?) WHERE id = ? AND state = 'validating'",
                (_errors(errors), self._clock(), batch_id),
            )

    def give_up(self, batch_id: str, error: LineError) -> None:
        """Begins to fail a batch that cannot go on, whatever its lines; `end` ends it, with the
        results so far."""
        with self._db.writing() as db:
            db.execute(
                "UPDATE batches SET state = 'finalizing', outcome = 'failed', errors = ?"
                " WHERE id = ? AND state IN ('validating', 'in_progress', 'finalizing')",
                (_errors([error]), batch_id),
            )

    def lines(self, batch_id: str, model: str, served: str, after: int, limit: int) -> list[Line]:
        """Returns lines of one model that have no result yet, with a number above `after`."""
        rows = self._db.rows(
            f"SELECT {_LINE} FROM batch_lines WHERE batch = ?"
            " AND model = ? AND served = ? AND number > ? ORDER BY number LIMIT ?",
            *(batch_id, model, served, after, limit),
        )
        return [Line(*row) for row in rows]

    def some_lines(self, batch_id: str, limit: int) -> list[Line]:
        """Returns some of the lines that have no result yet, of any model."""
        rows = self._db.rows(
            f"SELECT {_LINE} FROM batch_lines WHERE batch = ? LIMIT ?",
            *(batch_id, limit),
        )
        return [Line(*row) for row in rows]

    def note_losses(self, batch_id: str, line: Line) -> None:
        """Keeps how often the engine died under a line."""
        with self._db.writing() as db:
            values = (line.losses, *_key(batch_id, line))
            db.execute(f"UPDATE batch_lines SET losses = ? WHERE {_KEY}", values)

    def keep(self, finished: Sequence[FinishedLine]) -> int:
        """Writes results: one append to each file, one transaction for each batch. A line that has
        its result, or whose batch ends, is left out. Returns how many were kept. Raises
        BodyLost."""
        by_batch: dict[str, list[FinishedLine]] = defaultdict(list)
        for one in finished:
            by_batch[one.batch].append(one)
        return sum(
            self._keep(batch_id, some)
            for batch_id, mine in by_batch.items()
            for some in _portions(mine)
        )

    def _keep(self, batch_id: str, finished: Sequence[FinishedLine]) -> int:
        with self._db.writing() as db:
            row = db.execute("SELECT * FROM batches WHERE id = ?", (batch_id,)).fetchone()
            mine = [one for one in finished if self._take(db, one)]
            usage: dict[str, int] = json.loads(row["usage"])
            for one in mine:
                usage = {
                    name: usage.get(name, 0) + one.usage.get(name, 0)
                    for name in usage.keys() | one.usage.keys()
                }
            lengths = []
            for name, is_error in (("output", False), ("error", True)):
                text = b"".join(one.text for one in mine if one.is_error is is_error)
                length = row[f"{name}_bytes"]
                if text:
                    length = self._append(row[f"{name}_file"], length, text)
                lengths.append(length)
            failed = sum(one.is_error for one in mine)
            db.execute(
                "UPDATE batches SET completed = completed + ?, failed = failed + ?, usage = ?,"
                " output_bytes = ?, error_bytes = ? WHERE id = ?",
                (len(mine) - failed, failed, json.dumps(usage), *lengths, batch_id),
            )
        return len(mine)

    def _append(self, file: str, length: int, text: bytes) -> int:
        """Appends to a file of results, and returns its new length. Raises BodyLost where not all
        is there that the row counts."""
        try:
            return self._bodies.append(file, length, text, is_synced=True)
        except Conflict as gap:
            raise BodyLost(str(self._bodies.path(file)), str(gap)) from gap

    def _take(self, db: sqlite3.Connection, one: FinishedLine) -> bool:
        key = _key(one.batch, one.line)
        return db.execute(f"DELETE FROM batch_lines WHERE {_KEY}", key).rowcount == 1

    def finalize(self, batch_id: str) -> None:
        """Notes that every line has its result; `end` ends the batch."""
        self._enter(batch_id, BatchState.FINALIZING, "completed")

    def end(self, batch: Batch) -> None:
        """Gives the tenant the output and error files, and enters the last state. A batch that has
        failed gives what is whole of them."""
        now_s = self._clock()
        names = [
            ("output", batch.output_file, batch.output_bytes),
            ("error", batch.error_file, batch.error_bytes),
        ]
        if batch.outcome == "failed":
            names = [
                (kind, file, length if self._bodies.size(file) >= length else 0)
                for kind, file, length in names
            ]
        with self._db.writing() as db:
            for kind, file, length in names:
                self._bodies.cut(file, length)
                if length:
                    db.execute(
                        "INSERT OR IGNORE INTO job_files VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                        (
                            *(file, batch.tenant, f"{batch.id}_{kind}.jsonl", BATCH_OUTPUT),
                            *(PROCESSED, length, now_s, now_s + batch.output_expiry),
                        ),
                    )
            db.execute("DELETE FROM batch_lines WHERE batch = ?", (batch.id,))
            db.execute(
                "UPDATE batches SET state = outcome, times = json_set(times, '$.' || outcome, ?),"
                " output_bytes = ?, error_bytes = ? WHERE id = ? AND outcome != ''",
                (now_s, *(length for _, _, length in names), batch.id),
            )
        for _, file, length in names:
            if not length:
                self._bodies.remove(file)

    def forget_old(self) -> int:
        """Forgets batches that ended KEPT_S ago; their files have expiries of their own. Returns
        how many."""
        with self._db.writing() as db:
            return db.execute(
                f"DELETE FROM batches WHERE NOT ({OPEN}) AND deadline_s <= ?",
                (self._clock() - KEPT_S,),
            ).rowcount

    def _enter(self, batch_id: str, state: BatchState, outcome: str) -> None:
        with self._db.writing() as db:
            db.execute(
                f"UPDATE batches SET state = ?, outcome = ?,"
                f" times = json_set(times, '$.{state}', ?)"
                " WHERE id = ? AND state IN ('validating', 'in_progress')",
                (state, outcome, self._clock(), batch_id),
            )


def _errors(errors: Sequence[LineError]) -> str:
    """The column of a batch's errors, in OpenAI's form."""
    plain = [
        {"code": one.code, "line": one.line, "message": one.message, "param": one.param}
        for one in errors
    ]
    return json.dumps(plain)


def _key(batch_id: str, line: Line) -> tuple[str, str, str, int]:
    return batch_id, line.model, line.served, line.number


def _batch(row: sqlite3.Row) -> Batch:
    plain = dict(row)
    return Batch(
        **{
            **plain,
            "metadata": json.loads(row["metadata"]),
            "state": BatchState(row["state"]),
            "errors": tuple(json.loads(row["errors"])),
            "usage": json.loads(row["usage"]),
            "models": tuple((model, served) for model, served in json.loads(row["models"])),
            "times": json.loads(row["times"]),
        }
    )


def _portions(finished: Sequence[FinishedLine]) -> Iterator[list[FinishedLine]]:
    """Divides results, in their order, into portions of about PORTION_BYTES; a larger result is one
    of its own."""
    portion: list[FinishedLine] = []
    size = 0
    for one in finished:
        if portion and size + len(one.text) > PORTION_BYTES:
            yield portion
            portion, size = [], 0
        portion.append(one)
        size += len(one.text)
    yield portion
