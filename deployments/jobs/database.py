"""Database: the tables of jobs in the state file, written by one process at a time.

The process that opens it takes the next epoch, and each transaction begins with a look at the
epoch: a process that was replaced, and does not know it yet, writes nothing more (Superseded).
Transactions are of some rows, because the arbiter writes the same file (SQLite, WAL).
"""

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from arbiter.server.state_path import default_path
from deployments.jobs import figures
from deployments.jobs.errors import Refused, StorageFailed, StorageFull, Superseded
from deployments.jobs.schema import migrate

LOCKED_S = 10.0  # the arbiter's own statements take 0.016 ms

# What SQLite says of a disk that takes no more: FULL, and of a failed write (a quota, EFBIG).
_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE)

WORK = """
SELECT EXISTS (SELECT 1 FROM jobs WHERE state IN ('queued', 'in_progress', 'cancelling'))
    OR EXISTS (SELECT 1 FROM batches
        WHERE state IN ('validating', 'in_progress', 'finalizing', 'cancelling'))
    OR EXISTS (SELECT 1 FROM jobs WHERE ended_s IS NOT NULL AND ended_s + keep_s <= :expired_s)
    OR EXISTS (SELECT 1 FROM job_files WHERE expires_s <= :expired_s)
"""


def state_path(configured: str | None) -> Path:
    """The state file of the table, or the arbiter's own default."""
    return Path(configured) if configured else default_path()


class Database:
    """One process's access. Every method blocks; one thread at a time. Raises StorageFull,
    StorageFailed, NewerStateFile; every write raises Superseded once another process has opened
    it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._translated():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            self._db = sqlite3.connect(
                path, isolation_level=None, timeout=LOCKED_S, check_same_thread=False
            )
            self._db.row_factory = sqlite3.Row
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            migrate(self._db, path)
            figures.prepare(self._db)
            more = "UPDATE jobs_owner SET epoch = epoch + 1 RETURNING epoch"
            self.epoch: int = self._db.execute(more).fetchall()[0][0]

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all of it, or nothing where it raises."""
        with self._translated():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._check_epoch()
                yield self._db
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    def rows(self, statement: str, *values: Any) -> list[sqlite3.Row]:
        with self._translated():
            return self._db.execute(statement, values).fetchall()

    def row(self, statement: str, *values: Any) -> sqlite3.Row | None:
        rows = self.rows(statement, *values)
        return rows[0] if rows else None

    def check_after(self, table: str, after: str, tenant: str | None) -> None:
        """Checks the `after` of a page: the id of the last row that the client has seen. Raises
        Refused where the tenant has no such row (any more): its page would be empty, which would
        read as the end of the list. `tenant` None: any."""
        mine = f"SELECT 1 FROM {table} WHERE id = ? AND tenant = coalesce(?, tenant)"
        if after and self.row(mine, after, tenant) is None:
            raise Refused(f"`after`: no {after!r} is there; list again from the start", "after")

    def close(self) -> None:
        self._db.close()

    def _check_epoch(self) -> None:
        if self._db.execute("SELECT epoch FROM jobs_owner").fetchone()[0] != self.epoch:
            raise Superseded(self.epoch)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise storage_error(self.path, error) from error


def storage_error(path: Path, error: Exception) -> StorageFull | StorageFailed:
    """Returns what clients are told of an error of SQLite or of the file system: StorageFull where
    the disk or a quota is full, else StorageFailed."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if getattr(error, "errno", None) in full or getattr(error, "sqlite_errorcode", 0) in _FULL:
        return StorageFull(str(path), str(error))
    return StorageFailed(str(path), str(error))


def has_work(path: Path, expired_s: float) -> bool:
    """Whether a state file has unfinished work, or a job or file to forget that expired by
    `expired_s` of the wall clock. The file is not opened for writing: False where there is none, or
    none with these tables."""
    try:
        db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=0.05)
        try:
            return bool(db.execute(WORK, {"expired_s": expired_s}).fetchone()[0])
        finally:
            db.close()
    except sqlite3.Error:
        return False
