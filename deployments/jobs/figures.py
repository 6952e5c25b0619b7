"""What others may know of the jobs without a call to the process that keeps them: triggers of the
state file write it, in the transaction that changes a row.

`job_changes` has a row for each job or batch that was accepted, has begun or has ended, until the
arbiter has told of it (K1); `job_totals` has counts, lines and bytes by kind and state, so that a
scrape sums up nothing (K2). The arbiter reads both (arbiter/server/job_book.py), which has the same
file open. None of them holds what a request or an answer says.
"""

import sqlite3

CHANGES_MOST = 4_096  # rows that no arbiter has read; as many as its event log keeps

# By table, the SQL of what a row adds to job_totals: its kind, its bytes, and its lines completed,
# failed and in total. Results count as bytes of their batch until it has ended, because they are
# files from then on.
_OPEN_BATCH = "{row}.state IN ('validating', 'in_progress', 'finalizing', 'cancelling')"
COUNTED = {
    "jobs": (
        "{row}.kind",
        "{row}.body_bytes + {row}.event_bytes + {row}.result_bytes",
        ("0", "0", "0"),
    ),
    "batches": (
        "'batch'",
        f"iif({_OPEN_BATCH}, {{row}}.output_bytes + {{row}}.error_bytes, 0)",
        ("{row}.completed", "{row}.failed", "{row}.total"),
    ),
    "job_files": ("'file'", "{row}.bytes", ("0", "0", "0")),
}
_MODELS = (
    "(SELECT substr(coalesce(group_concat(DISTINCT json_extract(value, '$[1]')), ''), 1, 200)"
    " FROM json_each(new.models))"
)
_JOB = "new.id, new.kind, new.tenant, new.state, new.model, new.state = 'completed',"
_JOB += " new.state = 'failed', 1"
_BATCH = f"new.id, 'batch', new.tenant, new.state, {_MODELS}, new.completed, new.failed, new.total"
_ENDED = "('completed', 'failed', 'cancelled', 'expired')"
# The triggers that write job_changes: name, event of SQLite, change, the columns of the row, and
# the seconds from its acceptance.
CHANGES = (
    ("jobs_accepted", "INSERT ON jobs WHEN new.ended_s IS NULL", "accepted", _JOB, "NULL"),
    (
        "jobs_begun",
        "UPDATE OF state ON jobs WHEN new.state = 'in_progress' AND old.begun_s IS NULL",
        *("begun", _JOB, "new.begun_s - new.created_s"),
    ),
    (
        "jobs_ended_now",
        f"UPDATE OF state ON jobs WHEN new.state IN {_ENDED} AND old.state NOT IN {_ENDED}",
        *("ended", _JOB, "new.ended_s - new.created_s"),
    ),
    ("batches_accepted", "INSERT ON batches", "accepted", _BATCH, "NULL"),
    (
        "batches_begun",
        "UPDATE OF state ON batches WHEN new.state = 'in_progress' AND old.state = 'validating'",
        *("begun", _BATCH, "json_extract(new.times, '$.in_progress') - new.created_s"),
    ),
    (
        "batches_ended",
        f"UPDATE OF state ON batches WHEN new.state IN {_ENDED} AND old.state NOT IN {_ENDED}",
        *("ended", _BATCH, "json_extract(new.times, '$.' || new.state) - new.created_s"),
    ),
)


def prepare(db: sqlite3.Connection) -> None:
    """Makes the triggers anew, and counts what is there, in one transaction: a file of earlier code
    has none or others, and a count that was ever wrong is right again."""
    db.execute("BEGIN IMMEDIATE")
    try:
        for name, statement in _triggers():
            db.execute(f"DROP TRIGGER IF EXISTS {name}")
            db.execute(statement)
        db.execute("DELETE FROM job_totals")
        for table in COUNTED:
            kind, size, lines = _counted(table, table)
            sums = ", ".join(f"sum({one})" for one in (size, *lines))
            db.execute(
                f"INSERT INTO job_totals SELECT {kind}, state, count(*), {sums}"
                f" FROM {table} GROUP BY 1, 2"
            )
        db.execute("COMMIT")
    finally:
        if db.in_transaction:
            db.execute("ROLLBACK")


def _triggers() -> list[tuple[str, str]]:
    triggers = []
    for name, when, change, row, took in CHANGES:
        insert = f"INSERT INTO job_changes VALUES (NULL, '{change}', {row}, {took})"
        newest = f"(SELECT max(number) FROM job_changes) - {CHANGES_MOST}"
        trim = f"DELETE FROM job_changes WHERE number <= {newest}"
        triggers.append((name, f"CREATE TRIGGER {name} AFTER {when} BEGIN {insert}; {trim}; END"))
    for table in COUNTED:
        added, removed = _add(table, "new", "+"), _add(table, "old", "-")
        for event, steps in (
            ("INSERT", added),
            ("UPDATE", f"{removed} {added}"),
            ("DELETE", removed),
        ):
            name = f"{table}_total_{event.lower()}"
            statement = f"CREATE TRIGGER {name} AFTER {event} ON {table} BEGIN {steps} END"
            triggers.append((name, statement))
    return triggers


def _add(table: str, row: str, sign: str) -> str:
    kind, size, lines = _counted(table, row)
    values = zip(("count", "bytes", "done", "failed", "total"), ("1", size, *lines), strict=True)
    sums = ", ".join(f"{name} = {name} {sign} ({value})" for name, value in values)
    return (
        f"INSERT OR IGNORE INTO job_totals (kind, state) VALUES ({kind}, {row}.state);"
        f" UPDATE job_totals SET {sums} WHERE kind = {kind} AND state = {row}.state;"
    )


def _counted(table: str, row: str) -> tuple[str, str, tuple[str, ...]]:
    kind, size, lines = COUNTED[table]
    return kind.format(row=row), size.format(row=row), tuple(x.format(row=row) for x in lines)
