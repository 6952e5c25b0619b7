"""FileStore: OpenAI's files, each a row of the state file and a body of the folder."""

import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deployments.jobs.bodies import PART, Bodies
from deployments.jobs.database import Database
from deployments.jobs.errors import (
    Conflict,
    NotFound,
    Refused,
    StorageFull,
    TenantLimitReached,
)

BATCH, BATCH_OUTPUT = "batch", "batch_output"
# OpenAI's, but for those that only its own services write
PURPOSES = (BATCH, "assistants", "fine-tune", "vision", "user_data", "evals")
FILE_MOST_BYTES = 512 << 20  # OpenAI's bound of one file, and of one of a batch
BATCH_MOST_BYTES = 200 << 20
BATCH_KEPT_S = 30 * 86_400.0  # OpenAI's default for files of batches; others stay
UPLOAD_MOST_S = 3_600.0  # an upload that has not ended then is forgotten
UPLOADING, PROCESSED = "uploading", "processed"
UNFINISHED_BATCH = "state IN ('validating', 'in_progress', 'finalizing', 'cancelling')"

# Of a tenant's files, one left out, and of the results of its unfinished batches
KEPT_BYTES = f"""
SELECT (SELECT coalesce(sum(bytes), 0) FROM job_files WHERE tenant = ? AND id != ?)
    + (SELECT coalesce(sum(output_bytes + error_bytes), 0) FROM batches
        WHERE tenant = ? AND {UNFINISHED_BATCH})
"""


@dataclass(frozen=True, slots=True)
class NewFile:
    """What an upload says. `id` is made by the asker, so that asking twice makes one file."""

    id: str
    tenant: str
    filename: str
    purpose: str
    size_bytes: int
    expires_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class File:
    """A row. Instants are seconds of the wall clock."""

    id: str
    tenant: str
    filename: str
    purpose: str
    state: str
    bytes: int
    created_s: float
    expires_s: float | None

    @property
    def plain(self) -> dict[str, Any]:
        """OpenAI's file object."""
        ends = {} if self.expires_s is None else {"expires_at": int(self.expires_s)}
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": int(self.created_s),
            "filename": self.filename,
            "purpose": self.purpose,
            "status": self.state,
            **ends,
        }


class FileStore:
    """Every method blocks; one thread at a time. All raise StorageFull, StorageFailed."""

    def __init__(
        self, db: Database, bodies: Bodies, clock: Callable[[], float] = time.time
    ) -> None:
        self._db, self._bodies, self._clock = db, bodies, clock

    def check_room(
        self, tenant: str, size_bytes: int, most_bytes: int, most_files: int, file_id: str = ""
    ) -> None:
        """Raises TenantLimitReached where a tenant may not keep another file of this size.
        `file_id`: of the file itself, which does not count."""
        mine = (tenant, file_id)
        query = "SELECT count(*) FROM job_files WHERE tenant = ? AND id != ?"
        if (count := self._db.rows(query, *mine)[0][0]) >= most_files:
            raise TenantLimitReached(f"{count} files", most_files)
        size = self._db.rows(KEPT_BYTES, *mine, tenant)[0][0]
        if size + size_bytes > most_bytes:
            raise TenantLimitReached(f"files of {size} bytes and adds {size_bytes}", most_bytes)

    def begin(self, new: NewFile, most_bytes: int, most_files: int) -> None:
        """Makes room for an upload. Raises Refused, TenantLimitReached."""
        most = BATCH_MOST_BYTES if new.purpose == BATCH else FILE_MOST_BYTES
        if new.size_bytes > most:
            raise Refused(f"`file` has {new.size_bytes} bytes; at most {most}", "file")
        now_s = self._clock()
        after_s = new.expires_after_s
        if after_s is None and new.purpose == BATCH:
            after_s = BATCH_KEPT_S
        ends_s = None if after_s is None else now_s + after_s
        with self._db.writing() as db:
            self.check_room(new.tenant, new.size_bytes, most_bytes, most_files, new.id)
            db.execute(
                "INSERT OR IGNORE INTO job_files VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(new.id, new.tenant, new.filename, new.purpose, UPLOADING),
                    *(new.size_bytes, now_s, ends_s),
                ),
            )

    def append(self, file_id: str, offset: int, piece: bytes) -> None:
        """The next piece of an upload. Raises NotFound, Conflict; StorageFull, after which nothing
        of the upload is there; Superseded, because a piece that a former process writes late would
        cut off what the next one has."""
        try:
            with self._db.writing():
                row = self._row(file_id)
                if row["state"] != UPLOADING:
                    raise Conflict("file", file_id, row["state"], "written")
                self._bodies.append(file_id + PART, offset, piece)
        except StorageFull:
            self._drop(file_id)
            raise

    def finish(self, file_id: str) -> File:
        """The upload is complete. Raises NotFound; Conflict where pieces are missing."""
        row = self._row(file_id)
        if row["state"] == UPLOADING:
            if row["bytes"] == 0:
                self._bodies.append(file_id + PART, 0, b"")
            size = max(self._bodies.size(file_id + PART), self._bodies.size(file_id))
            if size != row["bytes"]:
                raise Conflict("file", file_id, f"at byte {size} of {row['bytes']}", "finished")
        self._bodies.finish(file_id)
        with self._db.writing() as db:
            db.execute(
                "UPDATE job_files SET state = ? WHERE id = ? AND state = ?",
                (PROCESSED, file_id, UPLOADING),
            )
        return _file(self._row(file_id))

    def abandon(self, file_id: str) -> None:
        """Forgets an upload that goes no further; a file that is complete stays."""
        row = self._db.row("SELECT state FROM job_files WHERE id = ?", file_id)
        if row is not None and row["state"] == UPLOADING:
            self._drop(file_id)

    def get(self, tenant: str, file_id: str) -> File:
        """Raises NotFound, also for another tenant's, for an expired file and for an upload
        that has not ended."""
        row = self._db.row("SELECT * FROM job_files WHERE id = ?", file_id)
        if row is None or row["tenant"] != tenant or row["state"] != PROCESSED:
            raise NotFound("file", file_id)
        file = _file(row)
        if file.expires_s is not None and file.expires_s <= self._clock():
            raise NotFound("file", file_id)
        return file

    def page(
        self, tenant: str, purpose: str | None, after: str, limit: int, order: str
    ) -> list[File]:
        """A tenant's files by the time they were made; `order` is `asc` or `desc`. `after`: the id
        of the last one seen. Raises Refused."""
        self._db.check_after("job_files", after, tenant)
        wheres = ["tenant = ?", "state = ?", "coalesce(expires_s, 9e99) > ?"]
        values: list[Any] = [tenant, PROCESSED, self._clock()]
        if purpose:
            wheres.append("purpose = ?")
            values.append(purpose)
        sign, word = (">", "ASC") if order == "asc" else ("<", "DESC")
        if after:
            last = "(SELECT created_s, id FROM job_files WHERE id = ?)"
            wheres.append(f"(created_s, id) {sign} {last}")
            values.append(after)
        query = f"{' AND '.join(wheres)} ORDER BY created_s {word}, id {word} LIMIT {int(limit)}"
        return [
            _file(row) for row in self._db.rows(f"SELECT * FROM job_files WHERE {query}", *values)
        ]

    def content(self, tenant: str, file_id: str, offset: int) -> bytes:
        """A piece from an offset; empty at the end. Raises NotFound."""
        self.get(tenant, file_id)
        return self._bodies.read(file_id, offset)

    def delete(self, tenant: str, file_id: str) -> None:
        """Raises NotFound; Conflict while a batch reads it."""
        self.get(tenant, file_id)
        if self._readers([file_id]):
            raise Conflict("file", file_id, "read by an unfinished batch", "deleted")
        self._forget([file_id])

    def forget_old(self) -> int:
        """Forgets what has expired, and uploads that were left, some at a time."""
        now_s = self._clock()
        old = "expires_s <= ? OR (state = ? AND created_s <= ?) LIMIT 1000"
        values = (now_s, UPLOADING, now_s - UPLOAD_MOST_S)
        rows = self._db.rows(f"SELECT id FROM job_files WHERE {old}", *values)
        read = self._readers([row[0] for row in rows])
        ids = [row[0] for row in rows if row[0] not in read]
        self._forget(ids)
        return len(ids)

    def _readers(self, ids: list[str]) -> set[str]:
        """Those of `ids` that an unfinished batch reads."""
        rows = self._db.rows(f"SELECT input_file FROM batches WHERE {UNFINISHED_BATCH}")
        return {row[0] for row in rows}.intersection(ids)

    def _forget(self, ids: list[str]) -> None:
        with self._db.writing() as db:  # the row first: a body without one is swept
            db.executemany("DELETE FROM job_files WHERE id = ?", [(one,) for one in ids])
        for one in ids:
            self._bodies.remove(one, one + PART)

    def _drop(self, file_id: str) -> None:
        """Forgets an unfinished upload, also on a full disk."""
        self._bodies.remove(file_id + PART)  # first, so that the row has room to go
        self._forget([file_id])

    def _row(self, file_id: str) -> sqlite3.Row:
        row = self._db.row("SELECT * FROM job_files WHERE id = ?", file_id)
        if row is None:
            raise NotFound("file", file_id)
        return row


def _file(row: sqlite3.Row) -> File:
    return File(**dict(row))
