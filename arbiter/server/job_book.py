"""JobBook: what the arbiter knows of files, batches and jobs, from the state file that both have
open. No process is asked: the replica that keeps the jobs is away while there is no work, and
neither a scrape nor a viewer may start it.

Each look is of some rows by an index or of sums that triggers keep (deployments/jobs/figures.py).
A file that no job was ever in has no such tables, and a locked or broken one tells nothing; the
next look is a second later.
"""

import logging
import sqlite3
from pathlib import Path

from arbiter.core.decisions import EventKind, LogEvent
from arbiter.metrics.samples import JobTotal
from arbiter.protocol.messages import Plain
from arbiter.units import seconds

logger = logging.getLogger("arbiter")

READ_LOCKED_S = 0.05  # readers of a WAL wait for no writer, but for a checkpoint
CHANGES_MOST = 500  # told in one look, so that a burst takes some looks, and no holder waits
OPEN_SHOWN, ENDED_SHOWN = 50, 20
KINDS = {
    "accepted": EventKind.JOB_ACCEPTED,
    "begun": EventKind.JOB_BEGUN,
    "ended": EventKind.JOB_ENDED,
}
_JOB = (
    "SELECT id, kind, tenant, state, model, state = 'completed' AS done,"
    " state = 'failed' AS failed, 1 AS total, created_s, ended_s FROM jobs"
)
_BATCH = (
    "SELECT id, 'batch' AS kind, tenant, state, (SELECT substr(coalesce(group_concat(DISTINCT"
    " json_extract(value, '$[1]')), ''), 1, 200) FROM json_each(models)) AS model,"
    " completed AS done, failed, total, created_s, json_extract(times, '$.' || state) AS ended_s"
    " FROM batches"
)
_OPEN_JOB = "state IN ('queued', 'in_progress', 'cancelling')"
_OPEN_BATCH = "state IN ('validating', 'in_progress', 'finalizing', 'cancelling')"
_ENDED_JOB = "ended_s IS NOT NULL AND (attempts > 0 OR state != 'completed')"


class JobBook:
    """Reads jobs in the state file. Every method blocks for some tenths of a millisecond, and all
    are called from one thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None
        self._last_number = 0  # of the last change returned, whose row may not have been removed

    def changes(self) -> list[LogEvent]:
        """Returns what has happened to jobs since the last call, each change once in this process's
        life; a process that dies between telling and removing tells it twice."""
        query = "SELECT * FROM job_changes WHERE number > ? ORDER BY number LIMIT ?"
        rows = self._rows(query, self._last_number, CHANGES_MOST)
        if rows:
            self._last_number = rows[-1]["number"]
            self._write("DELETE FROM job_changes WHERE number <= ?", self._last_number)
        return [_event(row) for row in rows]

    def totals(self) -> tuple[JobTotal, ...]:
        """Returns a count for each kind and state of job that there ever was."""
        names = "kind, state, count, bytes, done, failed, total"
        return tuple(JobTotal(*row) for row in self._rows(f"SELECT {names} FROM job_totals"))

    def shown(self) -> list[Plain]:
        """Returns the oldest unfinished jobs and the newest that have ended, batches and jobs
        alike."""
        plain_rows: list[Plain] = []
        for rows, opened, ended, at in (
            (_JOB, _OPEN_JOB, _ENDED_JOB, "ended_s"),
            (_BATCH, _OPEN_BATCH, f"NOT ({_OPEN_BATCH})", "created_s"),
        ):
            oldest = f"{rows} WHERE {opened} ORDER BY created_s LIMIT {OPEN_SHOWN}"
            newest = f"{rows} WHERE {ended} ORDER BY {at} DESC LIMIT {ENDED_SHOWN}"
            plain_rows += [dict(row) for query in (oldest, newest) for row in self._rows(query)]
        return plain_rows

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
        self._db = None

    def _opened(self) -> sqlite3.Connection:
        """Returns the database, which the arbiter's store has made. Raises sqlite3.Error."""
        if self._db is None:
            uri = f"file:{self._path}?mode=rw"
            self._db = sqlite3.connect(
                uri, uri=True, isolation_level=None, timeout=READ_LOCKED_S, check_same_thread=False
            )
            self._db.row_factory = sqlite3.Row
            self._db.execute("PRAGMA synchronous=NORMAL")
        return self._db

    def _rows(self, statement: str, *values: str | int) -> list[sqlite3.Row]:
        """Returns the rows of a query; none where there is no such table or file."""
        try:
            return self._opened().execute(statement, values).fetchall()
        except sqlite3.Error as error:
            if "no such table" not in str(error):
                logger.warning("the jobs in %s cannot be read: %s", self._path, error)
                self.close()
            return []

    def _write(self, statement: str, *values: int) -> None:
        try:
            self._opened().execute(statement, values)
        except sqlite3.Error as error:  # the next life of the arbiter tells these again
            logger.info("told changes of jobs stay in %s: %s", self._path, error)


def _event(row: sqlite3.Row) -> LogEvent:
    names = ("tenant", "state", "model", "done", "failed", "total")
    data = {"job": row["id"], "job_kind": row["kind"], **{name: row[name] for name in names}}
    took = None if row["took_s"] is None else seconds(max(0.0, row["took_s"]))
    return LogEvent(KINDS[row["change"]], data, took=took)
