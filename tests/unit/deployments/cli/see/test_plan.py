"""`arbiter plan`: what it asks the front, and what it prints of the answer."""

import json

import pytest

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.reports.plan import PlanQuestion
from arbiter.protocol.json_codec import plain
from arbiter.units import TicketId, seconds
from tests.support.command_line import Run
from tests.support.core_driver import CoreDriver, gib, s
from tests.support.scripted_front import ScriptedFront

pytestmark = pytest.mark.spec("K3")


def planned(size: float) -> dict[str, object]:
    """As the real core answers beside a model that is idle."""
    driver = CoreDriver(device=80)
    driver.ask(0, "a", 60, client="ann")
    driver.at(0, ev.Loaded(TicketId("a"), seconds(4)))
    driver.beat(4, "a")
    question = PlanQuestion("text", "large", types.Need(gib(size)), True)
    made: dict[str, object] = plain(driver.arbiter.plan(question, s(30)))
    return made


def test_the_victims_are_listed_with_bytes_seconds_and_users(
    front: ScriptedFront, run: Run
) -> None:
    front.says("POST", "/arbiter/plan", planned(50))
    done = run("plan", "large", "--priority", "high")
    first, _, heads, row = done.stdout.splitlines()
    assert first.startswith("large (50.0 GiB): after evicting 1 of the loaded models on n/cpu:0")
    assert heads.split()[:3] == ["model", "ticket", "frees"]
    cells = [cell.strip() for cell in row.split("  ") if cell.strip()]
    assert cells == ["a", "a", "cpu:0 60.0 GiB", "gone", "4.0 s", "0", "26.0 s", "ann"]
    [asked] = front.requests
    assert asked.body == {"model": "large", "priority": "high"}


@pytest.mark.parametrize(
    ("size", "begins"), [(20, "large (20.0 GiB): now"), (90, "large (90.0 GiB): never")]
)
def test_the_other_answers_come_with_their_cause(
    front: ScriptedFront, run: Run, size: float, begins: str
) -> None:
    made = planned(size)
    front.says("POST", "/arbiter/plan", made)
    lines = run("plan", "large").stdout.splitlines()
    assert lines[0].startswith(begins) and lines[1:] == made["sentences"]
    assert json.loads(run("plan", "large", "--json").stdout) == made


def test_nothing_named_is_refused_before_the_front_is_asked(front: ScriptedFront, run: Run) -> None:
    done = run("plan")
    assert done.exit_code == 2 and "--gb" in done.stderr
    assert not front.requests


def test_size_that_is_no_number_is_refused_before_the_front_is_asked(
    front: ScriptedFront, run: Run
) -> None:
    done = run("plan", "--gb", "nan")
    assert done.exit_code == 2 and "nan" in done.stderr
    assert not front.requests
