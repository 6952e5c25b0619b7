"""Removes bodies that no row names, because a process died after the body and before the row."""

import re
import time
from collections.abc import Callable

from deployments.jobs.bodies import PART, Bodies
from deployments.jobs.database import Database
from deployments.jobs.file_store import UPLOAD_MOST_S
from deployments.jobs.store import EVENTS, REQUEST, RESULT

DRAFTED = re.compile(RESULT + r"-\d+$")  # the draft of a result; it ends with its process's epoch

NAMED = """
SELECT id FROM jobs UNION SELECT id FROM job_files
UNION SELECT output_file FROM batches UNION SELECT error_file FROM batches
"""


def sweep(db: Database, bodies: Bodies, clock: Callable[[], float] = time.time) -> int:
    """Removes what is older than any upload and has no row. Returns how many."""
    named = {row[0] for row in db.rows(NAMED)}
    old_s = clock() - UPLOAD_MOST_S
    expired = [
        name
        for name in bodies.names()
        if owner_of(name) not in named and bodies.changed_s(name) < old_s
    ]
    bodies.remove(*expired)
    return len(expired)


def owner_of(name: str) -> str:
    """The id of the job or file that a body belongs to."""
    whole = name.removesuffix(PART)
    whole = DRAFTED.sub(RESULT, whole)
    for suffix in (REQUEST, RESULT, EVENTS):
        whole = whole.removesuffix(suffix)
    return whole
