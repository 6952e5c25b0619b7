"""The time of day goes to the core when there is news of it: hours that open or close, or a clock
that was set (C13)."""

from datetime import UTC, datetime

import pytest

from arbiter.core import events as ev
from arbiter.core.types import CapabilitySpec, ModelSpec
from arbiter.server.hours_clock import HoursClock
from arbiter.units import in_seconds, seconds

pytestmark = pytest.mark.spec("C13")
NIGHT, NOON = "22:00-07:00 UTC", "12:00-13:00 UTC"
HOUR_S = 3600.0


class Clocked:
    """A clock on the wall, a steady one, and what the core was told."""

    def __init__(self) -> None:
        self.wall_s = datetime(2026, 1, 15, 10, tzinfo=UTC).timestamp()
        self.steady_s = 5.0
        self.fed: list[ev.Event] = []
        self.clock = HoursClock(self.fed.append, lambda: self.wall_s, lambda: self.steady_s)

    def go(self, span_s: float) -> None:
        self.wall_s += span_s
        self.steady_s += span_s

    def told(self) -> dict[str, tuple[bool, float]]:
        """What is news of both hours now: whether they are open, and the seconds left."""
        self.fed.clear()
        self.clock.tell([NIGHT, NOON])
        read = [r for e in self.fed if isinstance(e, ev.HoursRead) for r in e.readings]
        return {r.hours: (r.is_open, in_seconds(r.left)) for r in read}


def test_hours_are_told_once_and_again_when_they_open_or_close() -> None:
    clocked = Clocked()
    assert clocked.told() == {NIGHT: (False, 12 * HOUR_S), NOON: (False, 2 * HOUR_S)}
    clocked.go(2 * HOUR_S - 1)
    assert clocked.told() == {}
    clocked.go(1)
    assert clocked.told() == {NOON: (True, HOUR_S)}
    clocked.go(HOUR_S)
    assert clocked.told() == {NOON: (False, 23 * HOUR_S)}


@pytest.mark.parametrize("jump_s", [-30 * HOUR_S, -60.0, 60.0, 13 * HOUR_S])
def test_a_clock_that_was_set_is_told_anew(jump_s: float) -> None:
    clocked = Clocked()
    before = clocked.told()
    clocked.wall_s += jump_s
    after = clocked.told()
    assert after.keys() == before.keys() and after != before
    assert clocked.told() == {}


def test_the_hours_of_a_table_are_told_before_it_without_those_that_are_not_set() -> None:
    clocked = Clocked()
    models = (ModelSpec("a", seconds(1), hours=NIGHT), ModelSpec("b", seconds(1)))
    clocked.clock.tell_of([CapabilitySpec("text", "text", "e", models, seconds(1))], NOON)
    [event] = clocked.fed
    assert isinstance(event, ev.HoursRead)
    assert [r.hours for r in event.readings] == [NOON, NIGHT]


def test_hours_refused_with_a_text_that_says_none_are_told_when_they_come_again() -> None:
    clocked = Clocked()
    with pytest.raises(ValueError, match="7-99"):
        clocked.clock.tell([NOON, "7-99"])
    assert clocked.fed == []
    assert clocked.told().keys() == {NIGHT, NOON}


def test_without_hours_nothing_is_told() -> None:
    clocked = Clocked()
    clocked.clock.tell([])
    assert clocked.fed == []
