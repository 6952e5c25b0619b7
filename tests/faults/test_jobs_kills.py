"""The store under SIGKILL at each step, and on a disk that takes no more.

A child process does the work and kills itself at its n-th statement or half-way through its n-th
write, for each n; this process then goes on. What must hold: each line has one result.
"""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deployments.jobs import bodies as bodies_module
from deployments.jobs.batch_store import BatchStore, FinishedLine, Line, NewBatch
from deployments.jobs.bodies import PIECE_BYTES, Bodies
from deployments.jobs.database import Database
from deployments.jobs.errors import StorageFull, Superseded
from deployments.jobs.file_store import FileStore, NewFile
from deployments.jobs.store import JobState, JobStore, NewJob
from tests.support.full_disk import FULL_BYTES, full_disk

LINES = 4
BATCH = NewBatch("batch_a", "t", "/v1/x", "file-in", "24h", 3_600.0, "file-out", "file-err")


class Work:
    """Everything on one folder, opened by the process that is to use it."""

    def __init__(self, folder: Path) -> None:
        self.db = Database(folder / "arbiter.sqlite")
        self.bodies = Bodies(folder / "jobs")
        self.jobs = JobStore(self.db, self.bodies)
        self.files = FileStore(self.db, self.bodies)
        self.batches = BatchStore(self.db, self.bodies)

    def begin_batch(self, count: int = LINES) -> None:
        self.batches.create(BATCH, 9)
        self.batches.add_lines(
            "batch_a", [Line(n, n, 1, "one", "one") for n in range(1, count + 1)]
        )
        self.batches.start("batch_a", count, [("one", "one")])

    def run_batch(self) -> None:
        """Two lines at a time, one of them wrong, to the end."""
        while lines := self.batches.some_lines("batch_a", 2):
            self.batches.keep([result(line) for line in lines])
        self.batches.finalize("batch_a")
        self.batches.end(self.batches.get("t", "batch_a"))

    def run_job(self) -> None:
        self.jobs.recover()
        for job in self.jobs.queued():
            self.jobs.begin(job.id)
            self.jobs.append_events(job.id, ["one", "two"])
            self.jobs.complete(job.id, 200, b"answer" * 1_000)


def result(line: Line, padding_bytes: int = 0) -> FinishedLine:
    text = json.dumps({"number": line.number, "padding": "x" * padding_bytes}).encode() + b"\n"
    return FinishedLine("batch_a", line, text, line.number % 2 == 0, {"input": 1})


def dies_at(step: int, folder: Path, work: Callable[[Work], None]) -> bool:
    """Whether a child that does the work came to its n-th step, where it is killed."""
    child = os.fork()
    if child == 0:
        try:
            _work_until(step, folder, work)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed"
    return os.WIFSIGNALED(status)


def _work_until(step: int, folder: Path, work: Callable[[Work], None]) -> None:
    """In the child."""
    left = step

    def count() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    whole = bodies_module._write_all

    def torn(file: int, piece: bytes, offset: int) -> None:
        whole(file, piece[: len(piece) // 2], offset)
        count()
        whole(file, piece, offset)

    bodies_module._write_all = torn
    opened = Work(folder)
    opened.db._db.set_trace_callback(lambda statement: count())
    work(opened)


def goes_on_after_any_step(
    tmp_path: Path, begin: Callable[[Work], None], work: Callable[[Work], None]
) -> Iterator[Work]:
    """For each n: the folder after a child was killed at its n-th step and this one went on."""
    made = Work(tmp_path / "made")
    begin(made)
    made.db.close()
    step = 0
    while True:
        step += 1
        folder = tmp_path / str(step)
        shutil.copytree(tmp_path / "made", folder)
        was_killed = dies_at(step, folder, work)
        heir = Work(folder)
        work(heir)
        yield heir
        if not was_killed:
            return


@pytest.mark.spec("J4")
def test_each_line_has_one_result_wherever_the_process_is_killed(tmp_path: Path) -> None:
    steps = 0
    for after in goes_on_after_any_step(tmp_path, Work.begin_batch, Work.run_batch):
        steps += 1
        batch = after.batches.get("t", "batch_a")
        assert (batch.state, batch.completed, batch.failed) == ("completed", 2, 2), steps
        assert batch.usage == {"input": LINES}
        raw = [after.files.content("t", name, 0) for name in ("file-out", "file-err")]
        found = [[json.loads(row)["number"] for row in one.splitlines()] for one in raw]
        assert found == [[1, 3], [2, 4]], steps
    assert steps > 20


@pytest.mark.spec("J4")
def test_job_is_completed_once_wherever_the_process_is_killed(tmp_path: Path) -> None:
    def begin(work: Work) -> None:
        work.jobs.create(NewJob("a", "t", "async", "/v1/x", "one"), b"asked")

    steps = 0
    for after in goes_on_after_any_step(tmp_path, begin, Work.run_job):
        steps += 1
        page = after.jobs.events("t", "a")
        assert page.job.state == JobState.COMPLETED, steps
        assert [text for _, text in page.events] == ["one", "two"]
        assert after.jobs.result("t", "a") == b"answer" * 1_000
    assert steps > 12


@pytest.mark.spec("J4")
def test_upload_is_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    def begin(work: Work) -> None:
        work.files.begin(NewFile("file-a", "t", "a", "batch", 12), 1 << 20, 9)

    def upload(work: Work) -> None:
        for offset in (0, 4, 8):
            if not work.files.page("t", None, "", 9, "asc"):
                work.files.append("file-a", offset, b"abcd")
        work.files.finish("file-a")

    for after in goes_on_after_any_step(tmp_path, begin, upload):
        [file] = after.files.page("t", None, "", 9, "asc")
        assert file.bytes == 12
        assert after.files.content("t", "file-a", 0) == b"abcd" * 3


@pytest.mark.spec("J4")
def test_late_piece_of_a_replaced_process_changes_no_upload(tmp_path: Path) -> None:
    former = Work(tmp_path)
    former.files.begin(NewFile("file-a", "t", "a", "batch", 8), 1 << 20, 9)
    former.files.append("file-a", 0, b"abcd")
    heir = Work(tmp_path)
    heir.files.append("file-a", 4, b"efgh")
    with pytest.raises(Superseded):
        former.files.append("file-a", 0, b"abcd")
    assert heir.files.finish("file-a").bytes == 8
    assert heir.files.content("t", "file-a", 0) == b"abcdefgh"


@pytest.mark.spec("J4")
def test_body_that_finds_no_room_is_a_typed_failure_and_is_not_there(tmp_path: Path) -> None:
    work = Work(tmp_path)
    new = NewJob("a", "t", "async", "/v1/x", "one")
    with full_disk(), pytest.raises(StorageFull) as caught:
        work.jobs.create(new, b"x" * PIECE_BYTES)
    assert caught.value.status_code == 507
    assert work.jobs.page("t") == []
    assert work.jobs.create(new, b"x" * PIECE_BYTES).state == JobState.QUEUED


@pytest.mark.spec("J4")
def test_results_that_find_no_room_are_kept_once_there_is(tmp_path: Path) -> None:
    work = Work(tmp_path)
    work.begin_batch()
    lines = work.batches.some_lines("batch_a", LINES)
    results = [result(line, FULL_BYTES // 2) for line in lines]
    with full_disk(), pytest.raises(StorageFull):
        work.batches.keep([result(line, FULL_BYTES) for line in lines])
    assert len(work.batches.some_lines("batch_a", LINES)) == LINES
    assert work.batches.keep(results) == LINES
    assert work.batches.keep(results) == 0
    work.run_batch()
    found = b"".join(work.bodies.lines("file-out")).splitlines()
    assert [json.loads(row)["number"] for row in found] == [1, 3]


@pytest.mark.spec("J4")
def test_state_file_that_finds_no_room_is_a_typed_failure(tmp_path: Path) -> None:
    work = Work(tmp_path)
    work.begin_batch(0)
    many = [Line(n, n, 1, "model" * 20, "one") for n in range(10_000)]
    with full_disk(), pytest.raises(StorageFull):
        work.batches.add_lines("batch_a", many)
    assert work.batches.some_lines("batch_a", 1) == []
    work.batches.add_lines("batch_a", many)
    assert len(work.batches.some_lines("batch_a", 20_000)) == 10_000
