"""Removal of a tenant: one transaction sets the deadlines and expiries of all that it has to 0. The
rules that end overdue work and forget old rows do the rest, also in the next process."""

from deployments.jobs.database import Database

_END = (
    "UPDATE jobs SET deadline_s = 0, keep_s = 0 WHERE tenant = ?",
    "UPDATE batches SET deadline_s = 0, output_expiry = 0 WHERE tenant = ?",
    "UPDATE job_files SET expires_s = 0 WHERE tenant = ?",
)
# A batch whose `output_expiry` is 0 makes its files at its end with `expires_s` = `created_s`.
_LEFT = """
SELECT (SELECT count(*) FROM jobs WHERE deadline_s = 0)
    + (SELECT count(*) FROM batches WHERE deadline_s = 0)
    + (SELECT count(*) FROM job_files WHERE expires_s = 0 OR expires_s = created_s)
"""


def end_all(db: Database, tenant: str) -> None:
    """Lets all jobs, batches and files expire that the tenant has now, and none that it begins
    later. Raises StorageFull, StorageFailed, Superseded."""
    with db.writing() as rows:
        for statement in _END:
            rows.execute(statement, (tenant,))


def left(db: Database) -> int:
    """How many jobs, batches and files of removed tenants are still there."""
    count: int = db.rows(_LEFT)[0][0]
    return count
