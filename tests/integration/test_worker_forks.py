"""Workers of the tests' cluster: forks, yet what Ray would have started (tests.support)."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._raylet import ActorClassID

from tests.support.bin.fork_worker import OWN, SOCKET, WORKER
from tests.support.worker_forks import LAUNCHER

pytestmark = pytest.mark.usefixtures("cluster")
PRESTARTED = 4  # workers of no job, which are no forks
NAME = "OF_ONE_WORKER"


@ray.remote(num_cpus=0)
class Worker:
    def seen(self) -> dict[str, Any]:
        parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")
        return {
            "is_fork": b"tests.support.worker_forks" in parent,
            "leads": os.getpgid(0) == os.getpid(),
            "raylet": int(os.environ["RAY_RAYLET_PID"]),
            "own": os.environ.get(NAME),
            "drawn": ActorClassID.from_random().hex(),
        }


def seen(workers: list[Any]) -> list[dict[str, Any]]:
    try:
        answers: list[dict[str, Any]] = ray.get([worker.seen.remote() for worker in workers])
        return answers
    finally:
        for worker in workers:
            ray.kill(worker)


def test_worker_is_a_fork_in_a_group_of_its_own_with_the_environment_that_its_raylet_gave() -> None:
    answers = seen([Worker.remote() for _ in range(PRESTARTED + 1)])  # type: ignore[attr-defined]
    assert any(answer["is_fork"] for answer in answers)
    assert all(answer["leads"] for answer in answers)
    assert len({answer["raylet"] for answer in answers}) == 1


def test_no_two_forks_draw_the_same_ids() -> None:
    answers = seen([Worker.remote() for _ in range(PRESTARTED + 2)])  # type: ignore[attr-defined]
    assert len({answer["drawn"] for answer in answers}) == len(answers)


def test_worker_with_a_runtime_environment_is_started_anew_and_has_it() -> None:
    runtime_env = {"env_vars": {NAME: "yes"}}
    [answer] = seen([Worker.options(runtime_env=runtime_env).remote()])  # type: ignore[attr-defined]
    assert answer["own"] == "yes" and not answer["is_fork"]


def test_worker_without_a_fork_is_started_at_once_but_with_a_runtime_environment_by_ray(
    tmp_path: Path,
) -> None:
    for script in (WORKER, OWN):
        (tmp_path / script).write_text("import sys; print(sys.argv)")
    env = {name: value for name, value in os.environ.items() if name != SOCKET}

    def started(*arguments: str) -> str:
        command = [sys.executable, str(LAUNCHER), *arguments]
        return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout

    worker, environment = str(tmp_path / WORKER), "--serialized-runtime-env-context={}"
    given = [worker, "--a=b c", "--language=PYTHON"]
    assert started("-s", *given) == f"{given[:2]}\n"
    own = [str(tmp_path / OWN), *given, environment]
    assert started(*given, environment) == f"{own}\n"
