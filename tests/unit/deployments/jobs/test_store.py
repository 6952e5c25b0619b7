"""JobStore and Database: states, leases by epoch, events by number, and what lies on the disk."""

import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from arbiter.server.store import Store
from deployments.jobs.bodies import Bodies
from deployments.jobs.database import Database, has_unfinished
from deployments.jobs.errors import Conflict, NotFound, Superseded, TenantLimitReached
from deployments.jobs.file_store import UPLOAD_MOST_S
from deployments.jobs.store import Job, JobState, JobStore, NewJob
from deployments.jobs.sweep import sweep


class Desk:
    """A store with a clock of its own."""

    def __init__(self, folder: Path, now_s: float = 1_000.0) -> None:
        self.now_s = now_s
        self.path = folder / "arbiter.sqlite"
        self.bodies = Bodies(folder / "jobs")
        self.store = JobStore(Database(self.path), self.bodies, lambda: self.now_s)

    def create(self, job_id: str = "a", tenant: str = "t", window_s: float = 60.0) -> Job:
        new = NewJob(job_id, tenant, "async", "/v1/x", "one", window_s=window_s, keep_s=100.0)
        return self.store.create(new, b"asked")

    def state(self, job_id: str = "a") -> JobState:
        return self.store.get("t", job_id).state


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


@pytest.mark.spec("J4")
def test_job_goes_from_queued_to_completed_with_its_answer(desk: Desk) -> None:
    assert desk.create().state == JobState.QUEUED
    begun = desk.store.begin("a")
    assert begun is not None and (begun.state, begun.attempts) == (JobState.IN_PROGRESS, 1)
    assert desk.store.request("a") == b"asked"
    assert desk.store.complete("a", 200, b"answer")
    assert desk.state() == JobState.COMPLETED
    assert desk.store.result("t", "a") == b"answer"
    assert desk.store.result("t", "a", offset=6) == b""
    assert desk.store.begin("a") is None


@pytest.mark.spec("J4")
def test_refused_call_is_a_failed_job_with_the_error(desk: Desk) -> None:
    desk.create()
    desk.store.begin("a")
    desk.store.complete("a", 404, b'{"error": {"code": "model_not_found"}}')
    job = desk.store.get("t", "a")
    assert (job.state, job.error) == (JobState.FAILED, {"code": "model_not_found"})


@pytest.mark.spec("J4")
def test_asking_twice_makes_one_job(desk: Desk) -> None:
    first = desk.create()
    desk.now_s += 5
    assert desk.create() == first
    with pytest.raises(NotFound):
        desk.create(tenant="other")


@pytest.mark.spec("J4", "L1")
def test_tenant_sees_its_own_jobs_only(desk: Desk) -> None:
    desk.create("a")
    desk.create("b", tenant="other")
    assert [job.id for job in desk.store.page("t")] == ["a"]
    for ask in (desk.store.get, desk.store.cancel, desk.store.delete, desk.store.events):
        with pytest.raises(NotFound):
            ask("t", "b")


@pytest.mark.spec("J4")
def test_events_are_read_by_number_while_the_job_runs(desk: Desk) -> None:
    desk.create()
    desk.store.begin("a")
    assert desk.store.append_events("a", ["one\ntwo", "three"]) == 2
    assert desk.store.append_events("a", ["four"]) == 3
    page = desk.store.events("t", "a", after=1)
    assert page.events == ((2, "three"), (3, "four"))
    assert page.job.state == JobState.IN_PROGRESS


@pytest.mark.spec("J4")
def test_new_attempt_begins_without_events(desk: Desk) -> None:
    desk.create()
    desk.store.begin("a")
    desk.store.append_events("a", ["old", "older"])
    desk.store.requeue("a")
    begun = desk.store.begin("a")
    assert begun is not None and (begun.attempts, begun.event_count) == (2, 0)
    desk.store.append_events("a", ["new"])
    assert desk.store.events("t", "a").events == ((1, "new"),)


@pytest.mark.spec("J4")
def test_cancelled_job_ends_queued_at_once_and_running_when_its_call_has_ended(desk: Desk) -> None:
    desk.create("a")
    assert desk.store.cancel("t", "a").state == JobState.CANCELLED
    desk.create("b")
    desk.store.begin("b")
    assert desk.store.cancel("t", "b").state == JobState.CANCELLING
    with pytest.raises(Conflict):
        desk.store.append_events("b", ["late"])
    assert not desk.store.complete("b", 200, b"late")
    desk.store.requeue("b")
    assert desk.state("b") == JobState.CANCELLED


@pytest.mark.spec("J4")
def test_job_expires_at_its_deadline_and_is_forgotten_after_its_time(desk: Desk) -> None:
    desk.create("a")
    desk.create("b")
    desk.store.begin("b")
    desk.now_s += 60
    assert desk.store.expire() == ["b"]
    assert desk.state("a") == desk.state("b") == JobState.EXPIRED
    assert not desk.store.complete("b", 200, b"late")
    desk.now_s += 99
    assert desk.store.forget_old() == 0
    desk.now_s += 1
    assert desk.store.forget_old() == 2
    assert desk.bodies.names() == set()
    with pytest.raises(NotFound):
        desk.state("a")


@pytest.mark.spec("J4")
def test_next_process_takes_over_and_the_former_writes_nothing_more(
    desk: Desk, tmp_path: Path
) -> None:
    desk.create("a")
    desk.create("b")
    desk.create("c")
    desk.store.begin("a")
    desk.store.begin("b")
    desk.store.cancel("t", "b")
    heir = Desk(tmp_path)
    assert heir.store.recover() == 1
    assert [heir.state(one) for one in "abc"] == ["queued", "cancelled", "queued"]
    for write in (
        lambda: desk.store.complete("a", 200, b"late"),
        lambda: desk.store.append_events("a", ["late"]),
        lambda: desk.store.begin("c"),
        lambda: desk.store.cancel("t", "c"),
        lambda: desk.create("d"),
    ):
        with pytest.raises(Superseded):
            write()
    assert heir.state("a") == JobState.QUEUED


@pytest.mark.spec("J4")
def test_second_reader_of_the_same_events_reads_on_where_the_first_came_to(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    offsets: list[int] = []
    lines = Bodies.lines

    def noted(bodies: Bodies, name: str, offset: int = 0) -> Iterator[bytes]:
        offsets.append(offset)
        return lines(bodies, name, offset)

    monkeypatch.setattr(Bodies, "lines", noted)
    desk.create()
    desk.store.begin("a")
    for count, event in enumerate(("one", "two", "three")):
        desk.store.append_events("a", [event])
        for _ in range(2):
            [(number, text)] = desk.store.events("t", "a", count).events
            assert (number, text) == (count + 1, event)
    starts = [0, 6, 12]  # "one" and "two" take six bytes each
    assert offsets == [one for one in starts for _ in range(2)]


@pytest.mark.spec("J4")
def test_tenant_has_so_many_unfinished_jobs_at_most(desk: Desk) -> None:
    desk.create("a")
    with pytest.raises(TenantLimitReached) as caught:
        desk.store.create(NewJob("b", "t", "async", "/v1/x", "one"), b"", most_unfinished=1)
    assert caught.value.status_code == 429


@pytest.mark.spec("J4")
def test_position_counts_those_that_are_queued_before(desk: Desk) -> None:
    for one in "abc":
        desk.create(one)
        desk.now_s += 1
    assert [desk.store.get("t", one).position for one in "abc"] == [0, 1, 2]
    desk.store.begin("a")
    assert desk.store.get("t", "c").position == 1


@pytest.mark.spec("J4")
def test_policy_sees_unfinished_work_without_writing(desk: Desk, tmp_path: Path) -> None:
    assert not has_unfinished(tmp_path / "nothing.sqlite")
    assert not has_unfinished(desk.path)
    desk.create()
    assert has_unfinished(desk.path)
    desk.store.cancel("t", "a")
    assert not has_unfinished(desk.path)


@pytest.mark.spec("J4", "L1")
def test_files_are_the_owners_alone_and_the_arbiter_shares_the_state_file(
    desk: Desk, tmp_path: Path
) -> None:
    desk.create()
    assert stat.S_IMODE((tmp_path / "jobs").stat().st_mode) == 0o700
    kept = [desk.path, *(tmp_path / "jobs").iterdir()]
    assert [stat.S_IMODE(path.stat().st_mode) for path in kept] == [0o600, 0o600]
    arbiter = Store(desk.path, "session")
    arbiter.next_epoch()
    assert arbiter.trouble is None
    assert desk.state() == JobState.QUEUED
    arbiter.close()


@pytest.mark.spec("J4")
def test_bodies_without_a_row_are_swept_after_the_longest_upload(
    desk: Desk, tmp_path: Path
) -> None:
    desk.create()
    for name in ("lost-request", "file-lost", "file-lost.part"):
        desk.bodies.append(name, 0, b"x")
    db = Database(desk.path)
    now_s = time.time()
    assert sweep(db, desk.bodies, lambda: now_s) == 0
    assert sweep(db, desk.bodies, lambda: now_s + UPLOAD_MOST_S + 60) == 3
    assert desk.bodies.names() == {"a-request"}


@pytest.mark.spec("J4")
def test_process_that_was_replaced_spoils_no_answer_of_the_next(desk: Desk, tmp_path: Path) -> None:
    desk.create()
    desk.store.begin("a")
    heir = Desk(tmp_path)
    heir.store.recover()
    heir.store.begin("a")
    assert heir.store.complete("a", 200, b"the answer")
    with pytest.raises(Superseded):
        desk.store.complete("a", 400, b"late and wrong")
    assert heir.store.result("t", "a") == b"the answer"
    assert not heir.store.complete("a", 400, b"twice")
    assert heir.store.result("t", "a") == b"the answer"
    now_s = time.time() + UPLOAD_MOST_S + 60
    assert sweep(Database(desk.path), desk.bodies, lambda: now_s) == 0, "what was late is the job's"


@pytest.mark.spec("J4", "J8")
def test_refused_job_leaves_no_body(desk: Desk) -> None:
    desk.create("a")
    new = NewJob("b", "t", "async", "/v1/x", "one")
    with pytest.raises(TenantLimitReached):
        desk.store.create(new, b"asked", most_unfinished=1)
    assert desk.bodies.names() == {"a-request"}


@pytest.mark.spec("J4", "J8")
def test_unfinished_jobs_of_a_tenant_have_so_many_bytes_at_most(desk: Desk) -> None:
    def create(name: str, tenant: str = "t") -> Job:
        new = NewJob(name, tenant, "async", "/v1/x", "one")
        return desk.store.create(new, b"x" * 600, most_bytes=1_000)

    create("a")
    with pytest.raises(TenantLimitReached) as caught:
        create("b")
    assert caught.value.status_code == 429 and "600 bytes" in str(caught.value)
    assert desk.bodies.names() == {"a-request"}
    create("a")  # asked for twice
    create("c", tenant="other")
    desk.store.begin("a")
    with pytest.raises(TenantLimitReached):
        create("b")
    desk.store.complete("a", 200, b"answer")
    create("b")


@pytest.mark.spec("J4")
def test_what_is_no_body_is_left_alone_in_the_folder(desk: Desk) -> None:
    desk.create()
    (desk.bodies.folder / "lost+found").mkdir()
    for name in (".nfs0001", "copy.tar.gz", ".a.swp"):
        (desk.bodies.folder / name).touch()
    now_s = time.time() + UPLOAD_MOST_S + 60
    assert sweep(Database(desk.path), desk.bodies, lambda: now_s) == 0
    assert desk.bodies.names() == {"a-request"}


@pytest.mark.spec("J4")
def test_what_is_in_progress_and_does_not_run_is_queued_again(desk: Desk) -> None:
    for name in "abc":
        desk.create(name)
        desk.store.begin(name)
    desk.store.cancel("t", "c")
    desk.store.reclaim({"a"})
    assert [desk.state(name) for name in "abc"] == ["in_progress", "queued", "cancelled"]
