"""`arbiter task` and `arbiter explain task:NAME`: what they ask of the front, and what they say."""

import json
from typing import Any

import pytest

from tests.support.command_line import Run
from tests.support.scripted_front import ScriptedFront

CONFIG = "/api/v1/config"
ROW: dict[str, Any] = {
    "ladder": ["large", "small"],
    "pin_primary": False,
    "step_s": 1.0,
    "keep_warm_s": 0.0,
    "budget_s": None,
    "allow_cloud_fallback": True,
}


@pytest.fixture(autouse=True)
def one_task(front: ScriptedFront) -> None:
    front.says("GET", CONFIG, {"generation": 4, "tasks": {"sum": ROW}, "settings": {}})


@pytest.mark.spec("J5")
def test_task_is_added_beside_the_others_for_the_generation_that_was_read(
    front: ScriptedFront, run: Run
) -> None:
    wanted = ROW | {"pin_primary": True, "budget_s": 9.0, "allow_cloud_fallback": False}
    front.says("PUT", CONFIG, {"generation": 5, "tasks": {"sum": ROW, "best": wanted}})
    words = ("large", "small", "--pin-primary", "--budget-s", "9", "--local")
    assert "task:best asks large, small" in run("task", "add", "best", *words).stdout
    assert front.requests[-1].body == {"generation": 4, "tasks": {"sum": ROW, "best": wanted}}
    assert json.loads(run("task", "add", "best", *words, "--json").stdout) == wanted


@pytest.mark.spec("J5")
@pytest.mark.parametrize("option", ["--budget-s", "--keep-warm-s", "--step-s"])
def test_seconds_that_are_no_number_are_named_and_not_sent(
    front: ScriptedFront, run: Run, option: str
) -> None:
    failed = run("task", "add", "best", "large", option, "nan")
    assert failed.exit_code == 1 and not front.requests
    name = option.removeprefix("--").replace("-", "_")
    assert f"`{name}` is no JSON value" in " ".join(failed.stderr.split())


@pytest.mark.spec("J5")
def test_tasks_are_listed_and_removed(front: ScriptedFront, run: Run) -> None:
    assert "large, small" in run("task", "list").stdout
    assert json.loads(run("task", "list", "--json").stdout) == {"sum": ROW}
    front.says("PUT", CONFIG, {"generation": 5, "tasks": {}})
    assert "removed task:sum" in run("task", "remove", "sum").stdout
    assert front.requests[-1].body == {"generation": 4, "tasks": {}}
    wrong = run("task", "remove", "summ")
    assert wrong.exit_code == 1 and "there is: sum" in wrong.stderr


@pytest.mark.spec("J5")
def test_refusal_of_a_stale_change_is_told(front: ScriptedFront, run: Run) -> None:
    message = "the settings are of generation 6 by now, not 4"
    front.refuses("PUT", CONFIG, 409, "settings_conflict", message)
    done = run("task", "remove", "sum")
    assert done.exit_code == 1 and message in done.stderr


@pytest.mark.spec("J5")
def test_explanation_of_a_task_is_a_table_and_a_sentence_for_each_rung(
    front: ScriptedFront, run: Run
) -> None:
    seconds = {"wait_s": 0.0, "load_s": None, "run_s": 0.25, "total_s": None, "score_s": 60.0}
    rung = {"model": "large", "position": 1, "turn": 1, "is_remote": False, "state": "cold"}
    left = {**rung, "model": "far", "position": 2, "turn": None, "state": "remote"}
    rows = [{**rung, **seconds, "why": "w"}, {**left, **seconds, "why": "w"}]
    sentences = ["1. large (rung 1): w.", "Left out: far (rung 2): w."]
    front.says(
        "GET", "/arbiter/explain/task%3Asum", {"task": "sum", "rungs": rows, "sentences": sentences}
    )
    shown = run("explain", "task:sum").stdout
    assert "large" in shown and "0.25 s" in shown and "unknown" in shown
    assert all(sentence in shown for sentence in sentences)
