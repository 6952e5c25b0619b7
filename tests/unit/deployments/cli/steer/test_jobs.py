"""`arbiter jobs`: what it asks the front, and what it prints of the answer."""

import json
from typing import Any

import pytest

from deployments.cli import http
from deployments.cli.steer import jobs
from tests.support.command_line import Run
from tests.support.scripted_front import ScriptedFront

pytestmark = pytest.mark.spec("J4")
ROW: dict[str, Any] = {
    "id": "batch_a",
    "kind": "batch",
    "tenant": "acme",
    "path": "/v1/embeddings",
    "models": ["one", "two"],
    "state": "in_progress",
    "done": 3,
    "failed": 1,
    "total": 9,
    "created_s": 0.0,
    "errors": [{"code": "model_not_found", "line": 7}],
}


def test_list_has_a_row_for_each(front: ScriptedFront, run: Run) -> None:
    front.says("GET", "/arbiter/jobs?limit=5", {"jobs": [ROW], "batch_calls": 1, "job_calls": 0})
    heads, row = run("jobs", "list", "--limit", "5").stdout.splitlines()
    assert heads.split()[:5] == ["id", "state", "done", "failed", "of"]
    assert row.split()[:6] == ["batch_a", "in_progress", "3", "1", "9", "acme"]


def test_show_names_each_wrong_line(front: ScriptedFront, run: Run) -> None:
    front.says("GET", "/arbiter/jobs/batch_a", ROW)
    first, second, third = run("jobs", "show", "batch_a").stdout.splitlines()
    assert first == "batch_a is in_progress, 3 done and 1 failed of 9"
    assert "acme" in second and "one, two" in second
    assert third == "line 7: model_not_found"
    assert json.loads(run("jobs", "show", "batch_a", "--json").stdout) == ROW


def test_id_is_a_part_of_the_path_whatever_is_in_it(front: ScriptedFront, run: Run) -> None:
    front.says("GET", "/arbiter/jobs/a%3Fb%2F%23", ROW)
    assert run("jobs", "show", "a?b/#").exit_code == 0


def test_cancel_is_a_delete(front: ScriptedFront, run: Run) -> None:
    front.says("DELETE", "/arbiter/jobs/batch_a", ROW | {"state": "cancelling"})
    assert "cancelling" in run("jobs", "cancel", "batch_a").stdout
    assert front.asked() == [("DELETE", "/arbiter/jobs/batch_a")]


@pytest.mark.parametrize(("state", "exit_code"), [("completed", 0), ("failed", 1)])
def test_tail_ends_with_the_job(
    front: ScriptedFront,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    exit_code: int,
) -> None:
    front.says("GET", "/arbiter/jobs/batch_a", ROW)

    def later(_: float) -> None:
        front.says("GET", "/arbiter/jobs/batch_a", ROW | {"state": state, "done": 8})

    monkeypatch.setattr(jobs.time, "sleep", later)
    done = run("jobs", "tail", "batch_a")
    assert done.exit_code == exit_code
    assert [one.split(",")[0] for one in done.stdout.splitlines()] == [
        "batch_a is in_progress",
        f"batch_a is {state}",
    ]


def test_tail_goes_on_where_the_front_restarts(
    front: ScriptedFront, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its proxy says that it is away, or fails; a job that is gone ends it."""
    path, waits = "/arbiter/jobs/batch_a", 0
    front.says("GET", path, ROW)

    def later(_: float) -> None:
        nonlocal waits
        waits += 1
        match waits:
            case 1:
                front.refuses("GET", path, 503, "front_away", "no front took this request")
            case 2:
                front.says("GET", path, "Internal Server Error", 500)
            case 3:
                front.says("GET", path, ROW | {"done": 4})
            case 4:
                front.refuses("GET", path, 404, "not_found", "no job")

    monkeypatch.setattr(jobs.time, "sleep", later)
    ended = run("jobs", "tail", "batch_a")
    assert [one.split(",")[1] for one in ended.stdout.splitlines()] == [
        " 3 done and 1 failed of 9",
        " 4 done and 1 failed of 9",
    ]
    assert ended.exit_code == 1 and "no job" in ended.stderr and waits == 4


def test_tail_ends_where_the_front_does_not_come_back(
    front: ScriptedFront, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, now_s = "/arbiter/jobs/batch_a", 0.0
    front.says("GET", path, ROW)

    def later(wait_s: float) -> None:
        nonlocal now_s
        now_s += wait_s
        front.refuses("GET", path, 503, "front_away", "no front took this request")

    monkeypatch.setattr(jobs.time, "sleep", later)
    monkeypatch.setattr(jobs.time, "monotonic", lambda: now_s)
    ended = run("jobs", "tail", "batch_a")
    assert ended.exit_code == 1 and "front_away" in ended.stderr
    assert http.RETURNS_S < now_s < http.RETURNS_S + 5
