"""JobsPolicy and JobsClient: when there is a replica, and what a front does while there is none."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from deployments.jobs import client
from deployments.jobs.bodies import Bodies
from deployments.jobs.client import JobsAway, JobsClient
from deployments.jobs.database import Database
from deployments.jobs.errors import NotFound, Superseded
from deployments.jobs.file_store import FileStore, NewFile
from deployments.jobs.scaling import ERASED_WITHIN_S, IDLE_S, JobsPolicy
from deployments.jobs.store import JobStore, NewJob


class Clock:
    """Seconds as a test sets them."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.spec("J4", "H0")
def test_replica_stays_for_calls_and_for_unfinished_work_alone(tmp_path: Path) -> None:
    path, clock = tmp_path / "arbiter.sqlite", Clock()
    policy = JobsPolicy(str(path), clock=clock)

    def replicas(at_s: float, requests: float = 0) -> int:
        clock.now_s = at_s
        return policy(SimpleNamespace(total_num_requests=requests))[0]  # type: ignore[arg-type]

    assert replicas(0) == 0
    assert replicas(1, requests=1) == 1
    assert replicas(1 + IDLE_S - 1) == 1
    assert replicas(1 + IDLE_S) == 0
    store = JobStore(Database(path), Bodies(tmp_path / "jobs"))
    store.create(NewJob("a", "t", "async", "/v1/x", "one"), b"")
    assert replicas(1_000) == 1
    assert replicas(100_000) == 1
    assert JobsPolicy(str(path), clock=clock)(SimpleNamespace(total_num_requests=0))[0] == 1  # type: ignore[arg-type]
    store.cancel("t", "a")
    assert replicas(100_001 + IDLE_S) == 0


@pytest.mark.spec("J4", "H0")
def test_replica_is_started_to_erase_a_file_that_has_expired(tmp_path: Path) -> None:
    path, clock, wall_clock = tmp_path / "arbiter.sqlite", Clock(), Clock()
    files = FileStore(Database(path), Bodies(tmp_path / "jobs"), wall_clock)
    files.begin(NewFile("file-a", "t", "x", "batch", 0, 100.0), 1, 1)
    policy = JobsPolicy(str(path), clock=clock, wall_clock=wall_clock)

    def replicas(at_s: float) -> int:
        clock.now_s = wall_clock.now_s = at_s
        return policy(SimpleNamespace(total_num_requests=0))[0]  # type: ignore[arg-type]

    assert replicas(99 + ERASED_WITHIN_S) == 0
    assert replicas(100 + ERASED_WITHIN_S) == 1
    assert files.forget_old() == 1
    assert replicas(101 + ERASED_WITHIN_S + IDLE_S) == 0


@pytest.mark.spec("J4", "A18")
async def test_call_is_sent_again_while_the_replica_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "AGAIN_S", 0.0)
    answers: list[Any] = [RayActorError(), Superseded(1), "answer"]

    async def send(method: str, *args: Any) -> Any:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    assert await JobsClient(send).call("get", "t", "a") == "answer"
    answers += [NotFound("job", "a")]
    with pytest.raises(NotFound):
        await JobsClient(send).call("get", "t", "a")
    answers += [RayActorError()] * 1_000_000
    with pytest.raises(JobsAway) as caught:
        await JobsClient(send, within_s=0.05).call("get", "t", "a")
    assert caught.value.status_code == 503 and "RayActorError" in str(caught.value)


@pytest.mark.spec("J4", "H0")
@pytest.mark.parametrize("name", ["a#b", "a?b", "a%41b", "\u00fc"])
def test_unfinished_work_is_seen_whatever_the_folder_is_called(tmp_path: Path, name: str) -> None:
    (folder := tmp_path / name).mkdir()
    store = JobStore(Database(folder / "arbiter.sqlite"), Bodies(folder / "jobs"))
    store.create(NewJob("a", "t", "async", "/v1/x", "one"), b"")
    policy = JobsPolicy(str(folder / "arbiter.sqlite"))
    assert policy(SimpleNamespace(total_num_requests=0))[0] == 1  # type: ignore[arg-type]
