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
