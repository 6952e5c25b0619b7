"""The tables of jobs in a state file that other code has written."""

import json
import sqlite3
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from deployments.jobs import schema
from deployments.jobs.bodies import Bodies, folder_of
from deployments.jobs.client import JobsClient
from deployments.jobs.database import Database
from deployments.jobs.errors import NewerStateFile, StorageFailed
from deployments.jobs.server import JobsServer
from deployments.jobs.service import JobsService
from deployments.jobs.store import REQUEST, RESULT, JobState
from tests.support.jobs import CHAT, Capability, chat, ended, jobs_service, line, results
from tests.support.waits import eventually

pytestmark = pytest.mark.spec("J4")
OLD = Path(__file__).with_name("tables_without_version.sql")
TABLES = ("jobs", "job_files", "batches", "batch_lines")
LINES = 3


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A state file of earlier code: three jobs, of which the first has ended, the second waits, and
    the third has begun; and a batch with one of its three results."""
    path, now_s = tmp_path / "arbiter.sqlite", time.time()
    bodies = Bodies(folder_of(path))
    db = sqlite3.connect(path, isolation_level=None)
    db.executescript(OLD.read_text())
    for job_id, state, status in (
        ("done", "completed", 200),
        ("waits", "queued", None),
        ("begun", "in_progress", None),
    ):
        bodies.write(job_id + REQUEST, json.dumps(chat(job_id)).encode())
        ends = {} if status is None else {"ended_s": now_s, "status": status, "attempts": 1}
        insert(
            db,
            "jobs",
            **{"id": job_id, "tenant": "t", "kind": "async", "path": CHAT, "model": "one"},
            **{"headers": "{}", "meta": "{}", "state": state, "created_s": now_s},
            **{"deadline_s": now_s + 900, "keep_s": 900.0, "result_bytes": 7 if ends else 0},
            **ends,
        )
    bodies.write("done" + RESULT, b'"whole"')
    rows = [json.dumps(line(f"r{n}")).encode() + b"\n" for n in range(LINES)]
    bodies.write("file-in", b"".join(rows))
    first = {"custom_id": "r0", "response": {"status_code": 200, "body": "kept"}, "error": None}
    length = bodies.append("file-out", 0, json.dumps(first).encode() + b"\n")
    insert(
        db,
        "job_files",
        **{"id": "file-in", "tenant": "t", "filename": "in.jsonl", "purpose": "batch"},
        **{"state": "processed", "bytes": sum(map(len, rows)), "created_s": now_s},
    )
    insert(
        db,
        "batches",
        **{"id": "batch_a", "tenant": "t", "endpoint": CHAT, "input_file": "file-in"},
        **{"window": "1h", "metadata": "null", "output_expiry": 3_600.0, "state": "in_progress"},
        **{"total": LINES, "completed": 1, "models": '[["one", "one"]]'},
        **{"output_file": "file-out", "error_file": "file-err", "output_bytes": length},
        **{"created_s": now_s, "deadline_s": now_s + 3_600},
    )
    for n in range(1, LINES):
        offset = sum(map(len, rows[:n]))
        place = {"number": n + 1, "offset": offset, "length": len(rows[n])}
        insert(db, "batch_lines", batch="batch_a", model="one", served="one", **place)
    db.close()
    return path


def insert(db: sqlite3.Connection, table: str, **fields: Any) -> None:
    places = ", ".join("?" * len(fields))
    db.execute(f"INSERT INTO {table} ({', '.join(fields)}) VALUES ({places})", [*fields.values()])


def rows_of(path: Path) -> dict[str, list[dict[str, Any]]]:
    db = sqlite3.connect(path)
    db.row_factory = sqlite3.Row
    found = {t: [dict(row) for row in db.execute(f"SELECT * FROM {t} ORDER BY 1")] for t in TABLES}
    db.close()
    return found


def test_file_without_a_version_has_all_its_rows_and_gets_what_it_lacks(old: Path) -> None:
    before = rows_of(old)
    opened = Database(old)
    after = rows_of(old)
    for table in ("jobs", "batch_lines"):
        assert {row.pop("losses") for row in after[table]} == {0}
    assert after == before
    assert opened.rows("SELECT version FROM jobs_schema")[0][0] == len(schema.STEPS)
    counts = opened.rows("SELECT kind, state, count FROM job_totals WHERE kind = 'async'")
    assert {row["state"]: row["count"] for row in counts} == dict.fromkeys(
        ("completed", "queued", "in_progress"), 1
    )
    opened.close()


async def completed(service: JobsService, job_id: str) -> bool:
    return (await service.get("t", job_id)).state is JobState.COMPLETED


async def test_jobs_and_batches_of_earlier_code_come_to_their_end(old: Path) -> None:
    service = jobs_service(old.parent, Capability())
    try:
        assert await service.result("t", "done") == b'"whole"'
        for job_id in ("waits", "begun"):
            await eventually(partial(completed, service, job_id))
            assert json.loads(await service.result("t", job_id))["said"] == job_id
        batch = await ended(service)
        assert (batch.state, batch.completed, batch.failed) == ("completed", LINES, 0)
        found = await results(service, batch.output_file)
        assert sorted(row["custom_id"] for row in found) == [f"r{n}" for n in range(LINES)]
        assert found[0]["response"]["body"] == "kept"
    finally:
        await service.close()


ADDED = "ALTER TABLE jobs ADD COLUMN note TEXT NOT NULL DEFAULT 'none'"


def test_column_of_a_later_version_is_added_once_and_earlier_code_is_refused(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Database(old).close()
    before = rows_of(old)
    later = (*schema.STEPS, (ADDED, "UPDATE jobs SET note = 'told' WHERE id = 'done'"))
    with monkeypatch.context() as patched:
        patched.setattr(schema, "STEPS", later)
        for _ in range(2):
            Database(old).close()
    after = rows_of(old)
    assert {row["id"]: row["note"] for row in after["jobs"]} == {
        "begun": "none",
        "done": "told",
        "waits": "none",
    }
    assert [row | {"note": "told"} for row in before["jobs"]] == [
        row | {"note": "told"} for row in after["jobs"]
    ]
    newer = (
        f"of version {len(later)}, and this code knows {len(schema.STEPS)}; start the newer code"
    )
    with pytest.raises(NewerStateFile, match=newer):
        Database(old)
    assert rows_of(old) == after


async def test_caller_is_told_that_newer_code_wrote_the_state_file(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(schema, "STEPS", (*schema.STEPS, (ADDED,)))
        Database(old).close()
    before = rows_of(old)
    replica = JobsServer(str(old))
    calls = JobsClient(replica.answer)
    for method, *values in (("get", "t", "done"), ("page", "", None, "", 1)):
        with pytest.raises(NewerStateFile) as told:
            await calls.call(method, *values)
    assert (told.value.status_code, told.value.code) == (503, "newer_state_file")
    assert str(told.value) == (
        f"{old} has tables of jobs of version {len(schema.STEPS) + 1}, and this code knows"
        f" {len(schema.STEPS)};"
        " start the newer code again, or name another file as arbiter.state_file"
    )
    await replica.check_health()
    assert rows_of(old) == before


def test_step_that_fails_leaves_the_file_as_it_was(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Database(old).close()
    before = rows_of(old)
    with monkeypatch.context() as patched:
        patched.setattr(schema, "STEPS", (*schema.STEPS, (ADDED, "no statement")))
        with pytest.raises(StorageFailed, match="syntax error"):
            Database(old)
    assert rows_of(old) == before
    Database(old).close()
