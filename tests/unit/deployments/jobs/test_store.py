"""JobStore and Database: states, leases by epoch, events by number, and what lies on the disk."""

import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from arbiter.server.store import Store
from deployments.jobs import operator_rows
from deployments.jobs.bodies import Bodies
from deployments.jobs.database import Database, has_work
from deployments.jobs.errors import Conflict, NotFound, Superseded, TenantLimitReached
from deployments.jobs.file_store import UPLOAD_MOST_S
from deployments.jobs.kept_answers import KeptAnswers
from deployments.jobs.store import Job, JobState, JobStore, NewJob
from deployments.jobs.sweep import sweep


class Jobs:
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
def jobs(tmp_path: Path) -> Jobs:
    return Jobs(tmp_path)


@pytest.mark.spec("J4")
def test_job_goes_from_queued_to_completed_with_its_answer(jobs: Jobs) -> None:
    assert jobs.create().state == JobState.QUEUED
    begun = jobs.store.begin("a")
    assert begun is not None and (begun.state, begun.attempts) == (JobState.IN_PROGRESS, 1)
    assert jobs.store.request("a") == b"asked"
    assert jobs.store.complete("a", 200, b"answer")
    assert jobs.state() == JobState.COMPLETED
    assert jobs.store.result("t", "a") == b"answer"
    assert jobs.store.result("t", "a", offset=6) == b""
    assert jobs.store.begin("a") is None


@pytest.mark.spec("J4")
def test_refused_call_is_a_failed_job_with_the_error(jobs: Jobs) -> None:
    jobs.create()
    jobs.store.begin("a")
    jobs.store.complete("a", 404, b'{"error": {"code": "model_not_found"}}')
    job = jobs.store.get("t", "a")
    assert (job.state, job.error) == (JobState.FAILED, {"code": "model_not_found"})


@pytest.mark.spec("J4")
def test_asking_twice_makes_one_job(jobs: Jobs) -> None:
    first = jobs.create()
    jobs.now_s += 5
    assert jobs.create() == first
    with pytest.raises(NotFound):
        jobs.create(tenant="other")


@pytest.mark.spec("J4", "L1")
def test_tenant_sees_its_own_jobs_only(jobs: Jobs) -> None:
    jobs.create("a")
    jobs.create("b", tenant="other")
    assert [job.id for job in jobs.store.page("t")] == ["a"]
    for ask in (jobs.store.get, jobs.store.cancel, jobs.store.delete, jobs.store.events):
        with pytest.raises(NotFound):
            ask("t", "b")


@pytest.mark.spec("J4")
def test_events_are_read_by_number_while_the_job_runs(jobs: Jobs) -> None:
    jobs.create()
    jobs.store.begin("a")
    assert jobs.store.append_events("a", ["one\ntwo", "three"]) == 2
    assert jobs.store.append_events("a", ["four"]) == 3
    page = jobs.store.events("t", "a", after=1)
    assert page.events == ((2, "three"), (3, "four"))
    assert page.job.state == JobState.IN_PROGRESS


@pytest.mark.spec("J4")
def test_new_attempt_begins_without_events(jobs: Jobs) -> None:
    jobs.create()
    jobs.store.begin("a")
    jobs.store.append_events("a", ["old", "older"])
    jobs.store.requeue("a")
    begun = jobs.store.begin("a")
    assert begun is not None and (begun.attempts, begun.event_count) == (2, 0)
    jobs.store.append_events("a", ["new"])
    assert jobs.store.events("t", "a").events == ((1, "new"),)


@pytest.mark.spec("J4")
def test_cancelled_job_ends_queued_at_once_and_running_when_its_call_has_ended(jobs: Jobs) -> None:
    jobs.create("a")
    assert jobs.store.cancel("t", "a").state == JobState.CANCELLED
    jobs.create("b")
    jobs.store.begin("b")
    assert jobs.store.cancel("t", "b").state == JobState.CANCELLING
    with pytest.raises(Conflict):
        jobs.store.append_events("b", ["late"])
    assert not jobs.store.complete("b", 200, b"late")
    jobs.store.requeue("b")
    assert jobs.state("b") == JobState.CANCELLED


@pytest.mark.spec("J4")
def test_job_expires_at_its_deadline_and_is_forgotten_after_its_time(jobs: Jobs) -> None:
    jobs.create("a")
    jobs.create("b")
    jobs.store.begin("b")
    jobs.now_s += 60
    assert jobs.store.expire_overdue() == ["b"]
    assert jobs.state("a") == jobs.state("b") == JobState.EXPIRED
    assert not jobs.store.complete("b", 200, b"late")
    jobs.now_s += 99
    assert jobs.store.forget_old() == 0
    jobs.now_s += 1
    for read in (jobs.store.get, jobs.store.events, jobs.store.result):
        with pytest.raises(NotFound):
            read("t", "a")
    assert jobs.store.page("t") == []
    assert jobs.store.forget_old() == 2
    assert jobs.bodies.names() == set()
    with pytest.raises(NotFound):
        jobs.state("a")


@pytest.mark.spec("J4")
def test_next_process_takes_over_and_the_former_writes_nothing_more(
    jobs: Jobs, tmp_path: Path
) -> None:
    jobs.create("a")
    jobs.create("b")
    jobs.create("c")
    jobs.store.begin("a")
    jobs.store.begin("b")
    jobs.store.cancel("t", "b")
    heir = Jobs(tmp_path)
    assert heir.store.recover() == 1
    assert [heir.state(one) for one in "abc"] == ["queued", "cancelled", "queued"]
    for write in (
        lambda: jobs.store.complete("a", 200, b"late"),
        lambda: jobs.store.append_events("a", ["late"]),
        lambda: jobs.store.begin("c"),
        lambda: jobs.store.cancel("t", "c"),
        lambda: jobs.create("d"),
    ):
        with pytest.raises(Superseded):
            write()
    assert heir.state("a") == JobState.QUEUED


@pytest.mark.spec("J4")
def test_second_reader_of_the_same_events_reads_on_where_the_first_came_to(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    offsets: list[int] = []
    lines = Bodies.lines

    def noted(bodies: Bodies, name: str, offset: int = 0) -> Iterator[bytes]:
        offsets.append(offset)
        return lines(bodies, name, offset)

    monkeypatch.setattr(Bodies, "lines", noted)
    jobs.create()
    jobs.store.begin("a")
    for count, event in enumerate(("one", "two", "three")):
        jobs.store.append_events("a", [event])
        for _ in range(2):
            [(number, text)] = jobs.store.events("t", "a", count).events
            assert (number, text) == (count + 1, event)
    starts = [0, 6, 12]  # "one" and "two" take six bytes each
    assert offsets == [one for one in starts for _ in range(2)]


@pytest.mark.spec("J4")
def test_tenant_has_so_many_unfinished_jobs_at_most(jobs: Jobs) -> None:
    jobs.create("a")
    with pytest.raises(TenantLimitReached) as caught:
        jobs.store.create(NewJob("b", "t", "async", "/v1/x", "one"), b"", most_unfinished=1)
    assert caught.value.status_code == 429


@pytest.mark.spec("J4")
def test_position_counts_those_that_are_queued_before(jobs: Jobs) -> None:
    for one in "abc":
        jobs.create(one)
        jobs.now_s += 1
    assert [jobs.store.get("t", one).position for one in "abc"] == [0, 1, 2]
    jobs.store.begin("a")
    assert jobs.store.get("t", "c").position == 1


@pytest.mark.spec("J4", "C10")
def test_queue_is_by_urgency_then_by_turns_of_the_tenants_then_by_age(jobs: Jobs) -> None:
    for job_id, tenant, meta in (
        *(("a1", "large", {}), ("a2", "large", {}), ("a3", "large", {})),
        *(("b1", "small", {}), ("high", "large", {"priority": "HIGH"})),
        *(("urgent", "other", {"priority": "URGENT"}), ("b2", "small", {"priority": "BATCH"})),
    ):
        new = NewJob(job_id, tenant, "async", "/v1/x", "one", meta=dict(meta))
        assert jobs.store.create(new, b"asked").id == job_id
        jobs.now_s += 1
    order = ["urgent", "high", "a1", "b1", "a2", "b2", "a3"]
    assert [job.id for job in jobs.store.queued()] == order
    assert [jobs.store.get(job.tenant, job.id).position for job in jobs.store.queued()] == [
        *range(len(order))
    ]
    jobs.store.begin("a1")
    jobs.store.requeue("a1", losses=1)
    assert [job.id for job in jobs.store.queued()][2:] == ["a2", "b1", "a3", "b2", "a1"]


@pytest.mark.spec("J4")
def test_expired_answer_is_erased_by_a_process_that_is_started_for_it(jobs: Jobs) -> None:
    answers = KeptAnswers(jobs.store._db, jobs.bodies, jobs.store, lambda: jobs.now_s)
    new = NewJob("resp_a", "t", "response", "/v1/responses", "one", keep_s=100.0)
    answers.keep(new, b"asked", b"told")
    assert jobs.store.result("t", "resp_a") == b"told"
    assert not has_work(jobs.path, jobs.now_s + 99)
    assert has_work(jobs.path, jobs.now_s + 100)
    jobs.now_s += 100
    with pytest.raises(NotFound):
        jobs.store.result("t", "resp_a")
    assert answers.trim("t", 0, 0) == 1
    assert jobs.bodies.names() == set() and not has_work(jobs.path, jobs.now_s)


@pytest.mark.spec("J4")
def test_policy_sees_unfinished_work_without_writing(jobs: Jobs, tmp_path: Path) -> None:
    assert not has_work(tmp_path / "nothing.sqlite", 0.0)
    assert not has_work(jobs.path, 0.0)
    jobs.create()
    assert has_work(jobs.path, 0.0)
    jobs.store.cancel("t", "a")
    assert not has_work(jobs.path, 0.0)


@pytest.mark.spec("J4", "L1")
def test_files_are_the_owners_alone_and_the_arbiter_shares_the_state_file(
    jobs: Jobs, tmp_path: Path
) -> None:
    jobs.create()
    assert stat.S_IMODE((tmp_path / "jobs").stat().st_mode) == 0o700
    kept = [jobs.path, *(tmp_path / "jobs").iterdir()]
    assert [stat.S_IMODE(path.stat().st_mode) for path in kept] == [0o600, 0o600]
    arbiter = Store(jobs.path, "session")
    arbiter.next_epoch()
    assert arbiter.trouble is None
    assert jobs.state() == JobState.QUEUED
    arbiter.close()


@pytest.mark.spec("J4")
def test_bodies_without_a_row_are_swept_after_the_longest_upload(
    jobs: Jobs, tmp_path: Path
) -> None:
    jobs.create()
    for name in ("lost-request", "file-lost", "file-lost.part"):
        jobs.bodies.append(name, 0, b"x")
    db = Database(jobs.path)
    now_s = time.time()
    assert sweep(db, jobs.bodies, lambda: now_s) == 0
    assert sweep(db, jobs.bodies, lambda: now_s + UPLOAD_MOST_S + 60) == 3
    assert jobs.bodies.names() == {"a-request"}


@pytest.mark.spec("J4")
def test_process_that_was_replaced_spoils_no_answer_of_the_next(jobs: Jobs, tmp_path: Path) -> None:
    jobs.create()
    jobs.store.begin("a")
    heir = Jobs(tmp_path)
    heir.store.recover()
    heir.store.begin("a")
    assert heir.store.complete("a", 200, b"the answer")
    with pytest.raises(Superseded):
        jobs.store.complete("a", 400, b"late and wrong")
    assert heir.store.result("t", "a") == b"the answer"
    assert not heir.store.complete("a", 400, b"twice")
    assert heir.store.result("t", "a") == b"the answer"
    now_s = time.time() + UPLOAD_MOST_S + 60
    assert sweep(Database(jobs.path), jobs.bodies, lambda: now_s) == 0, "what was late is the job's"


@pytest.mark.spec("J4", "J8")
def test_refused_job_leaves_no_body(jobs: Jobs) -> None:
    jobs.create("a")
    new = NewJob("b", "t", "async", "/v1/x", "one")
    with pytest.raises(TenantLimitReached):
        jobs.store.create(new, b"asked", most_unfinished=1)
    assert jobs.bodies.names() == {"a-request"}


@pytest.mark.spec("J4", "J8")
def test_unfinished_jobs_of_a_tenant_have_so_many_bytes_at_most(jobs: Jobs) -> None:
    def create(name: str, tenant: str = "t") -> Job:
        new = NewJob(name, tenant, "async", "/v1/x", "one")
        return jobs.store.create(new, b"x" * 600, most_bytes=1_000)

    create("a")
    with pytest.raises(TenantLimitReached) as caught:
        create("b")
    assert caught.value.status_code == 429 and "600 bytes" in str(caught.value)
    assert jobs.bodies.names() == {"a-request"}
    create("a")  # asked for twice
    create("c", tenant="other")
    jobs.store.begin("a")
    with pytest.raises(TenantLimitReached):
        create("b")
    jobs.store.complete("a", 200, b"answer")
    create("b")


@pytest.mark.spec("J4")
def test_what_is_no_body_is_left_alone_in_the_folder(jobs: Jobs) -> None:
    jobs.create()
    (jobs.bodies.folder / "lost+found").mkdir()
    for name in (".nfs0001", "copy.tar.gz", ".a.swp"):
        (jobs.bodies.folder / name).touch()
    now_s = time.time() + UPLOAD_MOST_S + 60
    assert sweep(Database(jobs.path), jobs.bodies, lambda: now_s) == 0
    assert jobs.bodies.names() == {"a-request"}


@pytest.mark.spec("J4")
def test_what_is_in_progress_and_does_not_run_is_queued_again(jobs: Jobs) -> None:
    for name in "abc":
        jobs.create(name)
        jobs.store.begin(name)
    jobs.store.cancel("t", "c")
    jobs.store.requeue_all_but({"a"})
    assert [jobs.state(name) for name in "abc"] == ["in_progress", "queued", "cancelled"]


@pytest.mark.spec("J4", "L3")
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b'{"error": "no room"}', "no room"),
        (b'{"error": null}', '{"error": null}'),
        (b'{"error": ["a"]}', '{"error": ["a"]}'),
        (b"[" * 5_000, "[" * 1_000),
    ],
)
def test_error_of_any_form_is_an_object_with_a_message(
    jobs: Jobs, answer: bytes, message: str
) -> None:
    jobs.create()
    jobs.store.begin("a")
    jobs.store.complete("a", 500, answer)
    job = jobs.store.get("t", "a")
    assert job.error == {"message": message, "type": "server_error"}
    assert operator_rows.job(job)["errors"] == [{"code": None, "line": None}]


@pytest.mark.spec("J4")
@pytest.mark.parametrize("lost_bytes", [3, 9])
def test_events_that_a_loss_of_power_took_are_left_out(jobs: Jobs, lost_bytes: int) -> None:
    jobs.create()
    jobs.store.begin("a")
    jobs.store.append_events("a", ["data: 1", "data: 2"])  # of ten bytes each, with its end
    jobs.store.complete("a", 200, b"answer")
    jobs.bodies.cut("a-events", jobs.bodies.size("a-events") - lost_bytes)
    assert jobs.store.events("t", "a").events == ((1, "data: 1"),)
    assert jobs.store.events("t", "a", 1).events == ()
