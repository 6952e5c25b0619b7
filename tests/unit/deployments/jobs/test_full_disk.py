"""What a full disk refuses leaves nothing on it: else each try would fill what is left."""

from pathlib import Path

import pytest

from deployments.jobs.bodies import PIECE_BYTES, Bodies
from deployments.jobs.database import Database
from deployments.jobs.errors import NotFound, StorageFull
from deployments.jobs.file_store import FileStore, NewFile
from deployments.jobs.kept_answers import KeptAnswers
from deployments.jobs.store import JobStore, NewJob
from tests.support.full_disk import FULL_BYTES, full_disk

LARGE = b"x" * PIECE_BYTES
NEW = NewJob("a", "t", "response", "/v1/responses", "one")


class Work:
    """Everything of one folder."""

    def __init__(self, folder: Path) -> None:
        self.db, self.bodies = Database(folder / "arbiter.sqlite"), Bodies(folder / "jobs")
        self.jobs = JobStore(self.db, self.bodies)
        self.files = FileStore(self.db, self.bodies)
        self.answers = KeptAnswers(self.db, self.bodies, self.jobs)


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return Work(tmp_path)


@pytest.mark.spec("J4", "L3")
def test_job_that_finds_no_room_leaves_nothing(work: Work) -> None:
    with full_disk(), pytest.raises(StorageFull):
        work.jobs.create(NEW, LARGE)
    assert work.bodies.names() == set()


@pytest.mark.spec("J4", "L3")
def test_answer_of_a_job_that_finds_no_room_leaves_nothing(work: Work) -> None:
    work.jobs.create(NEW, b"{}")
    work.jobs.begin("a")
    with full_disk(), pytest.raises(StorageFull):
        work.jobs.complete("a", 200, LARGE)
    assert work.bodies.names() == {"a-request"}


@pytest.mark.spec("J4", "L3")
def test_upload_that_finds_no_room_leaves_nothing_and_counts_no_more(work: Work) -> None:
    most = PIECE_BYTES, 1
    work.files.begin(NewFile("file-a", "t", "a", "user_data", len(LARGE)), *most)
    work.files.append("file-a", 0, LARGE[: FULL_BYTES // 2])
    with full_disk(), pytest.raises(StorageFull):
        work.files.append("file-a", FULL_BYTES // 2, LARGE[FULL_BYTES // 2 :])
    assert work.bodies.names() == set()
    with pytest.raises(NotFound):
        work.files.append("file-a", 0, b"x")
    work.files.begin(NewFile("file-b", "t", "b", "user_data", len(LARGE)), *most)


@pytest.mark.spec("J4", "L3")
def test_response_that_finds_no_room_leaves_nothing_and_a_kept_one_stays(work: Work) -> None:
    with full_disk(), pytest.raises(StorageFull):
        work.answers.keep(NEW, b"{}", LARGE)
    assert work.bodies.names() == set()
    work.answers.keep(NEW, b"{}", b"answer")
    with full_disk():
        work.answers.keep(NEW, b"{}", LARGE)  # repeated, because the first answer was lost
    assert work.jobs.result("t", "a") == b"answer"


@pytest.mark.spec("J4", "L3")
def test_upload_is_abandoned_only_while_it_is_unfinished(work: Work) -> None:
    most = 2 * PIECE_BYTES, 2
    for name, piece in (("file-a", LARGE), ("file-b", b"")):
        work.files.begin(NewFile(name, "t", "a", "user_data", len(piece)), *most)
    work.files.append("file-a", 0, LARGE)
    work.files.finish("file-b")
    for name in ("file-a", "file-b", "file-c"):
        for _ in ("once", "again"):
            work.files.abandon(name)
    assert work.bodies.names() == {"file-b"}
    assert work.files.get("t", "file-b").bytes == 0
    with pytest.raises(NotFound):
        work.files.finish("file-a")
