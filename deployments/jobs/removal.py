"""Removal of a tenant: in one transaction all it has is past its time, so what ends late work and
sweeps what is old does the rest, in the next process as well."""

from deployments.jobs.database import Database

_END = (
    "UPDATE jobs SET deadline_s = 0, keep_s = 0 WHERE tenant = ?",
    "UPDATE batches SET deadline_s = 0, output_expiry = 0 WHERE tenant = ?",
    "UPDATE job_files SET expires_s = 0 WHERE tenant = ?",
)
# A file that a batch makes at its end, whose `output_expiry` is 0, expires as it is made.
_LEFT = """
SELECT (SELECT count(*) FROM jobs WHERE deadline_s = 0)
    + (SELECT count(*) FROM batches WHERE deadline_s = 0)
    + (SELECT count(*) FROM job_files WHERE expires_s = 0 OR expires_s = created_s)
"""


def end_all(db: Database, tenant: str) -> None:
    """All jobs, batches and files that the tenant has now; what it begins later is new. Raises
    StorageFull, StorageFailed, Superseded."""
    with db.writing() as rows:
        for statement in _END:
            rows.execute(statement, (tenant,))


def left(db: Database) -> int:
    """How many jobs, batches and files of removed tenants are still there."""
    count: int = db.rows(_LEFT)[0][0]
    return count
