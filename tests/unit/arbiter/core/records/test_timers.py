"""Timers: due once, in order."""

from arbiter.core.records.timers import NEVER, Timers
from arbiter.units import (
    Instant,
)


def test_timers_are_due_once_in_order_and_never_late() -> None:
    timers = Timers()
    timers.set(("ticket", "b"), Instant(5))
    timers.set(("ticket", "a"), Instant(7))
    timers.set(("ticket", "a"), Instant(3))  # earlier wins
    timers.set(("ticket", "b"), Instant(9))  # later is looked at when the first rings
    assert timers.next() == timers.at(("ticket", "a")) == 3
    assert timers.at(("ticket", "c")) == NEVER
    assert timers.due(Instant(2)) == []
    assert timers.due(Instant(6)) == [("ticket", "a"), ("ticket", "b")]
    assert timers.next() is None
    assert timers.due(Instant(100)) == []


def test_subject_that_is_set_again_and_again_takes_no_more_room_and_is_due_in_order() -> None:
    timers, year = Timers(), 10**9
    others = [("ticket", f"b{n}") for n in range(10)]
    for n, other in enumerate(others):
        timers.set(other, Instant(year + 2 * n))
    for n in range(10_000):  # it is used with each heartbeat, and would go in a year
        timers.set(("ticket", "a"), Instant(year + n))
        timers.set(("ticket", "a"), Instant(n))
        assert timers.due(Instant(n)) == [("ticket", "a")]
    timers.set(("ticket", "a"), Instant(year + 5))
    assert len(timers._heap) < 100
    assert timers.next() == year
    assert timers.due(Instant(2 * year)) == [*others[:3], ("ticket", "a"), *others[3:]]
    assert timers.next() is None
