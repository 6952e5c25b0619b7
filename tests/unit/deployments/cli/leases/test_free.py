"""`arbiter free`: what it asks the front, and what it prints."""

import sys

import pytest

from arbiter.units import GIB
from tests.support.command_line import Run
from tests.support.scripted_front import ScriptedFront

pytestmark = pytest.mark.spec("A15")
VICTIM = {
    "ticket": "a1", "model": "a", "capability": "text", "state": "resident",
    "freed_bytes": {"n/gpu:0": 4 * GIB}, "goes": "gone", "reload_s": 2.0, "inflight": 0,
    "idle_s": 3.0, "priority": "normal", "tenant": "t", "client": "",
}  # fmt: skip
PLAN = {
    "answer": "after_evicting", "model": "hold", "need_bytes": 8 * GIB, "load_s": 0.0,
    "wait_s": 0.0, "goes_to_bytes": {"n/gpu:0": 8 * GIB}, "starts_replica": False, "sentences": [],
    "victims": [VICTIM],
    "stays": [
        {"ticket": "p1", "model": "p", "charged_bytes": {"n/gpu:0": GIB}, "why": "it is pinned"}
    ],
}  # fmt: skip
LEASE = {"ticket": "lease:t:free-1", "state": "held", "devices_bytes": {"n/gpu:0": 8 * GIB}}


def test_what_left_and_what_stays_is_named(front: ScriptedFront, run: Run) -> None:
    front.says("POST", "/arbiter/free", {"id": "free-1", "plan": PLAN, "lease": LEASE})
    done = run("free", "--gb", "8", "--for", "30m")
    lines = done.stdout.splitlines()
    assert lines[:3] == [
        "lease:t:free-1 holds gpu:0 8.0 GiB",
        "left for it, and returns after it: a",
        "give it back sooner with `arbiter drain lease:t:free-1`",
    ]
    assert lines[-1].split() == ["p", "p1", "gpu:0", "1.0", "GiB", "it", "is", "pinned"]
    [asked] = front.requests
    assert (asked.body["gb"], asked.body["term_s"], asked.body["kept"]) == (8, 1800, True)


def test_a_term_beyond_all_numbers_is_not_sent(front: ScriptedFront, run: Run) -> None:
    failed = run("free", "--gb", "8", "--for", "9" * 400)
    assert failed.exit_code == 2 and "longer than any" in failed.stderr
    assert not front.requests


def test_a_dry_run_prints_the_plan_and_holds_nothing(front: ScriptedFront, run: Run) -> None:
    front.says("POST", "/arbiter/free", {"plan": PLAN, "lease": None})
    done = run("free", "--gb", "8", "--dry-run")
    assert done.stdout.startswith(
        "hold (8.0 GiB): after evicting 1 of the loaded models on n/gpu:0"
    )
    assert front.requests[0].body["dry_run"] and "it is pinned" in done.stdout


def test_a_command_runs_while_the_memory_is_held(front: ScriptedFront, run: Run) -> None:
    front.says("POST", "/arbiter/free", {"id": "free-1", "plan": PLAN, "lease": LEASE})
    held = {**LEASE, "left_s": None, "reason": None, "node": "n", "lapse_s": 10.0}
    front.says("PUT", "/arbiter/leases/free-1", held)
    front.says("DELETE", "/arbiter/leases/free-1", {"state": "ended"})
    with front.serving() as url:
        done = run("free", "--gb", "8", "--url", url, "--", sys.executable, "-c", "exit(3)")
    assert done.exit_code == 3
    assert front.requests[0].body["kept"] is False
    assert ("DELETE", "/arbiter/leases/free-1") in front.asked()


@pytest.mark.parametrize(
    "words", [("--gb", "0"), ("--gb", "nan"), ("--gb", "inf"), ("--gb", "1", "--for", "soon")]
)
def test_a_size_or_time_that_cannot_be_is_refused_at_once(
    front: ScriptedFront, run: Run, words: tuple[str, ...]
) -> None:
    assert run("free", *words).exit_code == 2 and not front.requests
