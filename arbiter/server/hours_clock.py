"""Tells the core what time of day it is, as far as hours ask for it (C13)."""

import time
from collections.abc import Callable, Iterable

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.opening_hours import OpeningHours, parse
from arbiter.units import seconds

SET_S = 1.0  # a clock that jumps by more was set, or the machine slept


class HoursClock:
    """Feeds HoursRead when there is news: hours not told of yet, hours that opened or closed, or a
    clock that was set. `wall`: seconds since 1970; `steady`: seconds that no person sets."""

    def __init__(
        self,
        feed: Callable[[ev.Event], None],
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._feed, self._wall, self._steady = feed, wall, steady
        self._changes_at_s: dict[str, float] = {}  # of the hours that were told of
        self._ahead_s = wall() - steady()

    def tell(self, hours: Iterable[str]) -> None:
        """Feeds what is news of these hours. Raises ValueError for a text that says no hours."""
        now_s, ahead_s = self._wall(), self._wall() - self._steady()
        if abs(ahead_s - self._ahead_s) > SET_S:
            self._changes_at_s.clear()
            self._ahead_s = ahead_s
        news = [name for name in sorted(set(hours)) if self._is_news(name, now_s)]
        parsed = {name: parse(name) for name in news}  # before any of them counts as told
        if parsed:
            readings = (self._read(name, hours, now_s) for name, hours in parsed.items())
            self._feed(ev.HoursRead(tuple(readings)))

    def tell_of(self, capabilities: Iterable[types.CapabilitySpec], batch_hours: str) -> None:
        """Tells of the hours of a table before the core has it, so that nothing is loaded outside
        them meanwhile."""
        models = [model for spec in capabilities for model in spec.models]
        named = {m.hours for m in models} | {m.batch_hours for m in models} | {batch_hours}
        self.tell(named - {""})

    def _is_news(self, name: str, now_s: float) -> bool:
        return now_s >= self._changes_at_s.get(name, 0.0)

    def _read(self, name: str, hours: OpeningHours, now_s: float) -> ev.HoursReading:
        self._changes_at_s[name] = changes_at_s = hours.changes_at(now_s)
        return ev.HoursReading(name, hours.is_open(now_s), seconds(changes_at_s - now_s))
