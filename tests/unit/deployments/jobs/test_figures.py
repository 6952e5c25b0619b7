"""What the arbiter knows of the jobs from the state file: changes for its event log, sums for its
metrics, rows for the console; told without a call to the process that keeps them."""

import json
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from arbiter.core.decisions import EventKind, LogEvent
from arbiter.metrics.counters import Counters
from arbiter.server.job_book import JobBook
from deployments.jobs.batch_store import NewBatch
from deployments.jobs.database import Database
from deployments.jobs.file_store import NewFile
from deployments.jobs.service import JobsService
from deployments.jobs.store import NewJob
from deployments.monitoring.story import event_row
from tests.support.core_driver import CoreDriver
from tests.support.jobs import CHAT, Capability, chat, ended, jobs_service
from tests.support.metrics import scrape
from tests.support.waits import eventually

SECRET = "what only the client may read"


@pytest.fixture
def capability() -> Capability:
    return Capability()


@pytest.fixture
async def service(tmp_path: Path, capability: Capability) -> AsyncIterator[JobsService]:
    made = jobs_service(tmp_path, capability)
    yield made
    await made.close()


@pytest.fixture
def book(tmp_path: Path) -> JobBook:
    return JobBook(tmp_path / "arbiter.sqlite")


async def job(service: JobsService, job_id: str = "a", **fields: Any) -> None:
    new = NewJob(job_id, "t", "async", CHAT, "one")
    await service.create(new, json.dumps(chat(SECRET) | fields).encode())


async def batch(service: JobsService, *models: str) -> None:
    lines = [
        {"custom_id": str(n), "method": "POST", "url": CHAT, "body": chat(SECRET, model)}
        for n, model in enumerate(models)
    ]
    text = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    await service.begin_file(NewFile("file-in", "t", "in.jsonl", "batch", len(text), None))
    await service.append_file("file-in", 0, text)
    await service.finish_file("file-in")
    await service.create_batch(
        NewBatch("batch_a", "t", CHAT, "file-in", "24h", 86_400.0, "file-out", "file-err")
    )


async def told(book: JobBook, count: int) -> list[LogEvent]:
    found: list[LogEvent] = []

    async def look() -> bool:
        found.extend(book.changes())
        return len(found) >= count

    await eventually(look)
    return found


def sums(book: JobBook) -> dict[tuple[str, str], tuple[int, int, int, int, int]]:
    return {
        (t.kind, t.state): (t.rows_count, t.size_bytes, t.done_count, t.failed_count, t.total_count)
        for t in book.totals()
        if t.rows_count or t.size_bytes
    }


def recounted(path: Path) -> dict[tuple[str, str], tuple[int, int, int, int, int]]:
    """As a process that opens the file counts them anew."""
    Database(path).close()
    return sums(JobBook(path))


@pytest.mark.spec("J4", "K1")
async def test_job_is_told_of_when_accepted_begun_and_ended(
    service: JobsService, book: JobBook
) -> None:
    await job(service)
    events = await told(book, 3)
    assert [e.kind for e in events] == [
        *(EventKind.JOB_ACCEPTED, EventKind.JOB_BEGUN, EventKind.JOB_ENDED)
    ]
    last = events[-1].data
    assert last == {
        **{"job": "a", "job_kind": "async", "tenant": "t", "model": "one"},
        **{"state": "completed", "done": 1, "failed": 0, "total": 1},
    }
    assert events[0].took is None and events[-1].took is not None
    assert book.changes() == []  # each once
    text = event_row({"seq": 1, "unix_s": 0.0, "kind": "job_ended", **last}).text
    assert text == "job a of t for one is completed: 1 done and 0 failed of 1"


@pytest.mark.spec("J4", "K1", "K2")
async def test_batch_is_told_of_with_its_counts_and_models(
    service: JobsService, book: JobBook
) -> None:
    await batch(service, "one", "two", "one")
    await ended(service)
    events = await told(book, 3)
    begun, over = events[1].data, events[2].data
    assert [e.data["state"] for e in events] == ["validating", "in_progress", "completed"]
    assert sorted(str(begun["model"]).split(",")) == ["one", "two"]
    assert (over["done"], over["failed"], over["total"]) == (3, 0, 3)
    counters = Counters()
    for event in events:
        counters.note(event)
    samples = scrape(CoreDriver(), counters, jobs=book.totals())
    assert samples["arbiter_jobs_ended_total"][("batch", "completed")] == 1
    assert samples["arbiter_jobs"][("batch", "completed")] == 1
    assert samples["arbiter_batch_lines"] == {("done",): 3, ("failed",): 0, ("left",): 0}


@pytest.mark.spec("J4", "K1")
async def test_neither_events_nor_rows_hold_what_a_request_says(
    service: JobsService, book: JobBook, capability: Capability
) -> None:
    await job(service, "wrong", messages=SECRET)  # its error repeats it
    await batch(service, "one")
    await ended(service)
    events = await told(book, 6)
    assert SECRET not in repr(events) and SECRET not in repr(book.shown())
    assert {e.data["state"] for e in events} >= {"failed", "completed"}


@pytest.mark.spec("J4", "K2")
async def test_sums_are_what_a_count_of_all_rows_says(
    service: JobsService, book: JobBook, capability: Capability, tmp_path: Path
) -> None:
    capability.stream = [b"data: 1\n\n", b"data: 2\n\n"]
    await job(service, "streams", stream=True)
    await told(book, 3)
    capability.stream = None
    await job(service, "forgotten")
    await told(book, 3)
    await service.delete("t", "forgotten")
    await service.keep(NewJob("kept", "t", "response", CHAT, "one"), b"12", b"345")
    await batch(service, "one", "two")
    await ended(service)
    capability.gate.clear()
    await job(service, "runs")
    await eventually(lambda: capability.at_once)
    before = sums(book)
    assert before[("async", "in_progress")][0] == 1
    assert before[("response", "completed")][:2] == (1, 5)
    assert before[("batch", "completed")] == (1, 0, 2, 0, 2)  # its results are a file now
    assert before[("file", "processed")][0] == 2
    assert before == recounted(tmp_path / "arbiter.sqlite")


@pytest.mark.spec("J4", "K2")
def test_file_of_earlier_code_is_counted_when_it_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "arbiter.sqlite"
    with sqlite3.connect(path) as db:
        db.executescript(Path(__file__).with_name("tables_without_version.sql").read_text())
        db.execute("INSERT INTO job_files VALUES ('f', 't', 'x', 'batch', 'processed', 7, 0, NULL)")
    assert recounted(path) == {("file", "processed"): (1, 7, 0, 0, 0)}


@pytest.mark.spec("J4", "K1")
async def test_changes_outlive_the_arbiter_and_each_is_told_once(
    service: JobsService, book: JobBook, tmp_path: Path
) -> None:
    await job(service, "a")
    await told(book, 3)
    await job(service, "b")
    await eventually(lambda: any(row["id"] == "b" and row["ended_s"] for row in book.shown()))
    after = JobBook(tmp_path / "arbiter.sqlite").changes()  # of the arbiter's next life
    assert [e.data["job"] for e in after] == ["b", "b", "b"]


@pytest.mark.spec("J4", "K1")
async def test_unread_changes_are_bounded(
    service: JobsService, book: JobBook, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("deployments.jobs.figures.CHANGES_MOST", 4)
    Database(tmp_path / "arbiter.sqlite").close()
    monkeypatch.undo()
    with sqlite3.connect(tmp_path / "arbiter.sqlite") as db:
        for n in range(9):
            db.execute(
                "INSERT INTO jobs (id, tenant, kind, path, model, headers, meta, state, created_s,"
                f" deadline_s, keep_s) VALUES ('{n}', 't', 'async', '/', 'm', '{{}}', '{{}}',"
                " 'queued', 0, 9e9, 1)"
            )
    assert [e.data["job"] for e in book.changes()] == ["5", "6", "7", "8"]


@pytest.mark.spec("K2")
def test_state_file_without_jobs_says_nothing_of_them(tmp_path: Path) -> None:
    book = JobBook(tmp_path / "none.sqlite")
    assert (book.changes(), book.totals(), book.shown()) == ([], (), [])
    assert not (tmp_path / "none.sqlite").exists()
    sqlite3.connect(tmp_path / "old.sqlite").execute("CREATE TABLE x (y)")
    assert JobBook(tmp_path / "old.sqlite").totals() == ()


@pytest.mark.spec("J4", "K2")
async def test_a_look_at_the_jobs_queues_nothing_and_writes_nothing(
    service: JobsService, book: JobBook, capability: Capability, tmp_path: Path
) -> None:
    await job(service)
    await told(book, 3)
    with sqlite3.connect(tmp_path / "arbiter.sqlite") as db:
        [before] = db.execute("PRAGMA data_version").fetchone()
        for _ in range(3):
            book.totals(), book.shown(), book.changes()
        assert db.execute("PRAGMA data_version").fetchone() == (before,)
    assert len(capability.calls) == 1
