"""KeptAnswers: answers that were given live and are kept as finished jobs, and how much of all that
is finished one tenant may keep: the oldest are forgotten first."""

import json
import time
from collections.abc import Callable

from deployments.jobs.bodies import Bodies
from deployments.jobs.database import Database
from deployments.jobs.errors import StorageFull
from deployments.jobs.store import REQUEST, RESULT, JobState, JobStore, NewJob


class KeptAnswers:
    """Every method blocks; one thread at a time."""

    def __init__(
        self,
        db: Database,
        bodies: Bodies,
        store: JobStore,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._db, self._bodies, self._store, self._clock = db, bodies, store, clock

    def keep(self, new: NewJob, request: bytes, result: bytes) -> None:
        """A completed job that no runner ran; the second time it changes nothing. Raises
        StorageFull, after which nothing of it is there."""
        if self._db.row("SELECT 1 FROM jobs WHERE id = ?", new.id) is not None:
            return
        try:
            self._bodies.write(new.id + REQUEST, request)
            self._bodies.write(new.id + RESULT, result)
            self._insert(new, len(request), len(result))
        except StorageFull:
            self._bodies.remove(new.id + REQUEST, new.id + RESULT)
            raise

    def _insert(self, new: NewJob, request_bytes: int, result_bytes: int) -> None:
        now_s = self._clock()
        with self._db.writing() as db:
            db.execute(
                "INSERT OR IGNORE INTO jobs (id, tenant, kind, path, model, headers, meta, state,"
                " created_s, deadline_s, keep_s, begun_s, ended_s, body_bytes, result_bytes,"
                " status, content_type) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 200,"
                " 'application/json')",
                (
                    *(new.id, new.tenant, new.kind, new.path, new.model),
                    *(json.dumps(new.headers), json.dumps(new.meta), JobState.COMPLETED),
                    *(now_s, now_s, new.keep_s, now_s, now_s, request_bytes, result_bytes),
                ),
            )

    def trim(self, tenant: str, most_count: int, most_bytes: int) -> int:
        """Forgets a tenant's oldest finished jobs beyond either bound. Returns how many."""
        sums = (
            "SELECT id, row_number() OVER newest AS count,"
            " sum(body_bytes + result_bytes + event_bytes) OVER newest AS bytes FROM jobs"
            " WHERE tenant = ? AND ended_s IS NOT NULL"
            " WINDOW newest AS (ORDER BY ended_s DESC, id ROWS UNBOUNDED PRECEDING)"
        )
        beyond = f"SELECT id FROM ({sums}) WHERE count > ? OR bytes > ?"
        rows = self._db.rows(beyond, tenant, most_count, most_bytes)
        for row in rows:
            self._store.delete(tenant, row[0])
        return len(rows)
