"""The tables of jobs in the state file, by steps: a file of earlier code gets those that it lacks.

The arbiter's tables are beside them in the same file, so the version is a row of a table of its own
and not SQLite's `user_version`. A step is never changed once it was released; what a later version
wants otherwise is a step behind the others. Files that were written before there was a version
have the tables of the first step or of both, which is why these two make what is not there.
"""

import sqlite3
from pathlib import Path

from deployments.jobs.errors import NewerStateFile

_VERSION = """
CREATE TABLE IF NOT EXISTS jobs_schema (
    one INTEGER PRIMARY KEY CHECK (one = 1), version INTEGER NOT NULL) STRICT"""
_JOBS = (
    """CREATE TABLE IF NOT EXISTS jobs_owner (
    one INTEGER PRIMARY KEY CHECK (one = 1), epoch INTEGER NOT NULL) STRICT""",
    """INSERT OR IGNORE INTO jobs_owner VALUES (1, 0)""",
    """CREATE TABLE IF NOT EXISTS jobs (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, kind TEXT NOT NULL, path TEXT NOT NULL,
    model TEXT NOT NULL, headers TEXT NOT NULL, meta TEXT NOT NULL, state TEXT NOT NULL,
    created_s REAL NOT NULL, deadline_s REAL NOT NULL, keep_s REAL NOT NULL,
    begun_s REAL, ended_s REAL, epoch INTEGER NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0, body_bytes INTEGER NOT NULL DEFAULT 0,
    event_count INTEGER NOT NULL DEFAULT 0, event_bytes INTEGER NOT NULL DEFAULT 0,
    result_bytes INTEGER NOT NULL DEFAULT 0,
    status INTEGER, content_type TEXT, error TEXT) STRICT""",
    """CREATE INDEX IF NOT EXISTS jobs_by_tenant ON jobs (tenant, kind, created_s)""",
    """CREATE INDEX IF NOT EXISTS jobs_open ON jobs (created_s)
    WHERE state IN ('queued', 'in_progress', 'cancelling')""",
    """CREATE TABLE IF NOT EXISTS job_files (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL,
    state TEXT NOT NULL, bytes INTEGER NOT NULL, created_s REAL NOT NULL,
    expires_s REAL) STRICT""",
    """CREATE INDEX IF NOT EXISTS job_files_by_tenant ON job_files (tenant, created_s)""",
    """CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, endpoint TEXT NOT NULL, input_file TEXT NOT NULL,
    window TEXT NOT NULL, metadata TEXT NOT NULL, output_expiry REAL NOT NULL,
    state TEXT NOT NULL, errors TEXT NOT NULL DEFAULT '[]',
    total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0, usage TEXT NOT NULL DEFAULT '{}',
    models TEXT NOT NULL DEFAULT '[]', outcome TEXT NOT NULL DEFAULT '',
    output_file TEXT NOT NULL, error_file TEXT NOT NULL,
    output_bytes INTEGER NOT NULL DEFAULT 0, error_bytes INTEGER NOT NULL DEFAULT 0,
    created_s REAL NOT NULL, deadline_s REAL NOT NULL,
    times TEXT NOT NULL DEFAULT '{}') STRICT""",
    """CREATE INDEX IF NOT EXISTS batches_by_tenant ON batches (tenant, created_s)""",
    """CREATE INDEX IF NOT EXISTS batches_open ON batches (created_s)
    WHERE state IN ('validating', 'in_progress', 'finalizing', 'cancelling')""",
    """CREATE TABLE IF NOT EXISTS batch_lines (
    batch TEXT NOT NULL, model TEXT NOT NULL, served TEXT NOT NULL, number INTEGER NOT NULL,
    offset INTEGER NOT NULL, length INTEGER NOT NULL,
    PRIMARY KEY (batch, model, served, number)) STRICT, WITHOUT ROWID""",
)
_FIGURES = (
    """CREATE TABLE IF NOT EXISTS job_changes (
    number INTEGER PRIMARY KEY AUTOINCREMENT, change TEXT NOT NULL, id TEXT NOT NULL,
    kind TEXT NOT NULL, tenant TEXT NOT NULL, state TEXT NOT NULL, model TEXT NOT NULL,
    done INTEGER NOT NULL, failed INTEGER NOT NULL, total INTEGER NOT NULL, took_s REAL) STRICT""",
    """CREATE TABLE IF NOT EXISTS job_totals (
    kind TEXT, state TEXT, count INTEGER NOT NULL DEFAULT 0, bytes INTEGER NOT NULL DEFAULT 0,
    done INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
    total INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (kind, state)) STRICT""",
    """CREATE INDEX IF NOT EXISTS jobs_ended ON jobs (ended_s)
    WHERE ended_s IS NOT NULL AND (attempts > 0 OR state != 'completed')""",
    """CREATE INDEX IF NOT EXISTS batches_by_time ON batches (created_s)""",
)
# How often the engine died under a job or a line
_LOSSES = (
    """ALTER TABLE jobs ADD COLUMN losses INTEGER NOT NULL DEFAULT 0""",
    """ALTER TABLE batch_lines ADD COLUMN losses INTEGER NOT NULL DEFAULT 0""",
)
# What has expired is looked for each second (JobsPolicy)
_EXPIRIES = (
    """CREATE INDEX IF NOT EXISTS jobs_expiry ON jobs (ended_s + keep_s)
    WHERE ended_s IS NOT NULL""",
    """CREATE INDEX IF NOT EXISTS job_files_expiry ON job_files (expires_s)
    WHERE expires_s IS NOT NULL""",
)
# By version: the statements that make it of the one before.
STEPS: tuple[tuple[str, ...], ...] = (_JOBS, _FIGURES, _LOSSES, _EXPIRIES)


def migrate(db: sqlite3.Connection, path: Path) -> None:
    """Takes the steps that the file lacks, each in one transaction with its version. Raises
    NewerStateFile for a file that newer code has written, and leaves it as it is."""
    while not _is_whole(db, path):
        pass


def _is_whole(db: sqlite3.Connection, path: Path) -> bool:
    """Takes one step; True: there is none left."""
    db.execute("BEGIN IMMEDIATE")
    try:
        db.execute(_VERSION)
        db.execute("INSERT OR IGNORE INTO jobs_schema VALUES (1, 0)")
        version: int = db.execute("SELECT version FROM jobs_schema").fetchone()[0]
        if version > len(STEPS):
            raise NewerStateFile(str(path), version, len(STEPS))
        if version == len(STEPS):
            return True
        for name in _triggers(db):  # of earlier code; they are made anew, and would count the step
            db.execute(f"DROP TRIGGER {name}")
        for statement in STEPS[version]:
            db.execute(statement)
        db.execute("UPDATE jobs_schema SET version = ?", (version + 1,))
        db.execute("COMMIT")
        return False
    finally:
        if db.in_transaction:
            db.execute("ROLLBACK")


def _triggers(db: sqlite3.Connection) -> list[str]:
    tables = "('jobs', 'batches', 'job_files')"
    query = f"SELECT name FROM sqlite_master WHERE type = 'trigger' AND tbl_name IN {tables}"
    return [row[0] for row in db.execute(query)]
