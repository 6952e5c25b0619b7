"""Commands that steer: what they ask of the front, and what they say came of it."""

import json

import pytest

from tests.support.command_line import Run
from tests.support.scripted_front import ScriptedFront


@pytest.mark.spec("D8", "A14")
@pytest.mark.parametrize(
    ("act", "answer", "says"),
    [
        ("load", {"model": "org/m"}, "org/m is asked for; `arbiter residency` shows it come"),
        ("unload", {"model": "org/m", "tickets": []}, "org/m is not loaded"),
        (
            "unload",
            {"model": "org/m", "tickets": ["t1", "t2"]},
            "org/m leaves unless it is in use: t1, t2",
        ),
        ("grow", {"model": "org/m", "size": "grown"}, "org/m is told to grow"),
        ("shrink", {"model": "org/m", "size": "first"}, "org/m is told to give back"),
    ],
)
def test_a_model_is_steered_by_hand(
    front: ScriptedFront, run: Run, act: str, answer: dict[str, object], says: str
) -> None:
    front.says("POST", f"/arbiter/models/{act}/org/m", answer)
    done = run(act, "org/m")
    assert done.exit_code == 0 and done.stdout.startswith(says)
    assert json.loads(run(act, "org/m", "--json").stdout) == answer


@pytest.mark.spec("D8")
def test_a_floor_is_one_of_three(front: ScriptedFront, run: Run) -> None:
    front.says("PUT", "/arbiter/residency/m", {"model": "m", "floor": "host"})
    assert "m has the floor host" in run("floor", "m", "host").stdout
    assert front.requests[-1].body == {"floor": "host"}
    assert json.loads(run("floor", "m", "host", "--json").stdout) == {"model": "m", "floor": "host"}
    wrong = run("floor", "m", "loft")
    assert wrong.exit_code == 2 and "'loft'" in wrong.stderr


@pytest.mark.spec("D8")
@pytest.mark.parametrize(
    ("is_gone", "says"),
    [(True, "k1 is dropped"), (False, "k1 leaves with the last engine that has it open")],
)
def test_a_host_copy_is_dropped(front: ScriptedFront, run: Run, is_gone: bool, says: str) -> None:
    done = {"key": "k1", "is_gone": is_gone}
    front.says("DELETE", "/arbiter/host_copies/k1", done)
    assert run("drop-copy", "k1").stdout == says + "\n"
    assert json.loads(run("drop-copy", "k1", "--json").stdout) == done


SETTINGS = {"generation": 3, "settings": {"evict": "time_of_day", "arenas": {"cpu": None}}}


@pytest.mark.spec("C12")
def test_settings_are_shown_as_they_are_written(front: ScriptedFront, run: Run) -> None:
    front.says("GET", "/arbiter/settings", SETTINGS)
    lines = run("settings").stdout.splitlines()
    assert lines == ["generation: 3", "evict: time_of_day", 'arenas: {"cpu": null}']
    value = {"generation": 3, **SETTINGS["settings"]}  # type: ignore[dict-item]
    assert json.loads(run("settings", "--json").stdout) == value


@pytest.mark.spec("C12")
def test_changes_are_sent_together_with_the_generation_that_was_read(
    front: ScriptedFront, run: Run
) -> None:
    front.says("GET", "/arbiter/settings", SETTINGS)
    front.says("PUT", "/arbiter/settings", SETTINGS | {"generation": 4})
    words = ("bypass_count=4", "tenants={acme: {maximum: 4 GiB}}", "evict=")
    assert run("settings", *words).stdout.startswith("generation: 4\n")
    wanted = {"bypass_count": 4, "tenants": {"acme": {"maximum": "4 GiB"}}, "evict": None}
    assert front.requests[-1].body == {"generation": 3, "settings": wanted}
    assert run("settings", "--generation", "1", *words).exit_code == 0
    assert front.requests[-1].body["generation"] == 1


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ("bypass_count", 2, "KEY=VALUE"),  # alone it would have set the default
        ("=4", 2, "KEY=VALUE"),
        ("tenants={", 1, "the value of tenants is not YAML"),
        ("evict=.nan", 1, "the value of evict is no JSON value"),
        ("evict=2026-11-29", 1, "the value of evict is no JSON value"),
    ],
)
def test_a_change_that_cannot_be_read_is_not_sent(
    front: ScriptedFront, run: Run, change: str, status: int, says: str
) -> None:
    failed = run("settings", change)
    assert failed.exit_code == status and says in failed.stderr
    assert not front.requests


@pytest.mark.spec("A15")
def test_leases_are_given_notice_and_cleaned_up(front: ScriptedFront, run: Run) -> None:
    front.says("POST", "/arbiter/leases/lease-1/drain", {"lease": "lease-1"})
    assert run("drain", "lease-1").stdout == "lease-1 has its notice\n"
    assert json.loads(run("drain", "lease-1", "--json").stdout) == {"lease": "lease-1"}
    for ended, says in ((["l1", "l2"], "ended: l1, l2"), ([], "ended: none")):
        front.says("POST", "/arbiter/leases/cleanup", {"ended": ended})
        assert run("cleanup").stdout.startswith(says)
        assert json.loads(run("cleanup", "--json").stdout) == {"ended": ended}


@pytest.mark.spec("E6")
def test_what_a_removed_tenant_left_is_erased(front: ScriptedFront, run: Run) -> None:
    for ending in (0, 3):
        said = {"tenant": "acme", "ending": ending}
        front.says("DELETE", "/arbiter/tenants/acme/kept", said)
        text = run("forget", "acme").stdout
        assert text.startswith("what acme left is being erased")
        assert ("3 jobs, batches or files go when" in text) is bool(ending)
        assert json.loads(run("forget", "acme", "--json").stdout) == said


@pytest.mark.spec("D7")
def test_compaction_says_how_many_went_what_came_back_and_what_stays(
    front: ScriptedFront, run: Run
) -> None:
    spared = [{"model": "b", "ticket": "b-1", "why": "it is in use"}]
    answer = {"count": 1, "freed_bytes": 3 << 20, "spared": spared, "is_finished": False}
    front.says("POST", "/arbiter/compact", answer)
    lines = run("compact", "a", "b").stdout.splitlines()
    assert front.requests[-1].body == {"models": ["a", "b"]}
    assert lines[0].startswith("1 compacted, 3.0 MiB that they did not need; it goes on")
    assert lines[1] == "b stays as it is: it is in use"
    assert json.loads(run("compact", "--json").stdout) == answer
    assert front.requests[-1].body == {"models": []}
