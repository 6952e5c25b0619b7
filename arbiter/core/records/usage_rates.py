"""Counts how often each model is used: one number a model that fades with time, so no history is
kept.

A use counts 1 and fades as exp(-age / window); the sum is what would be counted in one window if
the rate stayed (an exponentially weighted Poisson rate times the window).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import exp
from typing import Any, NamedTuple

from arbiter.core.types import ModelName
from arbiter.units import SECOND, Instant, Span


class UsageRates:
    """Keeps the rate of each model over one window."""

    def __init__(self, window: Span) -> None:
        self.window = window
        self._rates: dict[ModelName, tuple[float, Instant]] = {}

    def used(self, name: ModelName, times_count: int, now: Instant) -> None:
        """Counts uses of a model."""
        self._rates[name] = (self.recent(name, now) + times_count, now)

    def recent(self, name: ModelName, now: Instant) -> float:
        """Returns the uses in one window up to now; 0 for a model never used."""
        if (seen := self._rates.get(name)) is None:
            return 0.0
        count, at = seen
        return count * exp((at - now) / self.window)

    def forget(self, name: ModelName) -> None:
        """Forgets the uses of a model."""
        self._rates.pop(name, None)

    def __iter__(self) -> Iterator[ModelName]:
        return iter(self._rates)

    def export(self, names: Iterable[ModelName]) -> list[list[Any]]:
        """Returns a row for each of these models that was used: capability, model, uses, and the
        instant up to which the uses have faded."""
        rates = ((name, self._rates.get(name)) for name in names)
        return [[*name, *seen] for name, seen in rates if seen]

    def restore(self, rows: list[list[Any]]) -> None:
        """Takes back the rows of `export`."""
        self._rates |= {ModelName(c, m): (count, Instant(at)) for c, m, count, at in rows}


# -------------------------------------------------------------------------------------------------
# What the hours of the day usually bring: 24 numbers a model, so a habit shows without a history.
#
# A use counts 1 in its hour and fades by the hour over a week. Hours are counted on the arbiter's
# own clock, so the core does not know which of them is noon, nor needs to.


HOUR = Span(3600 * SECOND)
HOURS_COUNT = 24
# These three are tuned on half of the public traces, and flat there (docs/adr/0007).
AHEAD_COUNT = 4  # the hour that runs and three more: what is evicted now is missed then
FADE = exp(-1 / (7 * HOURS_COUNT))  # an hour; the same day a week ago counts a third of yesterday
LEAN_DAYS = 0.5  # one day seen outweighs two to one what is known otherwise
AHEAD = Span(AHEAD_COUNT * HOUR)


class UsageCounts(NamedTuple):
    """Says how often a model is used."""

    recent_count: float = 0.0  # in the short window
    lasting_count: float = 0.0  # in the long window
    any_hours_count: float = 0.0  # of those, in as many hours as lie ahead
    usual_count: float = 0.0  # in the hours ahead, as on other days


@dataclass(slots=True)
class DailyCounts:
    """Keeps one model's uses by hour of the day, as of its hour number `hours_count`. Those in that
    hour are apart until it is over: they are no habit yet."""

    hours_count: int
    counts: list[float] = field(default_factory=lambda: [0.0] * HOURS_COUNT)
    open_count: float = 0.0
    seen_count: tuple[int, float] | None = None  # by the hour last asked for, until a use

    def used(self, hour: int, times_count: int) -> None:
        """Counts uses in an hour; a new hour makes those of the last one part of the habit."""
        if hour > self.hours_count:
            faded = self._faded(hour)
            self.counts[self.hours_count % HOURS_COUNT] += self.open_count
            self.counts = [count * faded for count in self.counts]
            self.hours_count = hour
            self.open_count = 0.0
        self.open_count += times_count
        self.seen_count = None

    def seen(self, hour: int) -> float:
        """Returns the uses on earlier days in the hours ahead of `hour`. Each price asks for it,
        and between two uses the answer changes with the hour only."""
        if self.seen_count is None or self.seen_count[0] != hour:
            self.seen_count = hour, self._seen(hour)
        return self.seen_count[1]

    def _seen(self, hour: int) -> float:
        total = 0.0
        for ahead in range(hour, hour + AHEAD_COUNT):
            total += self.counts[ahead % HOURS_COUNT]
            if hour > self.hours_count and (ahead - self.hours_count) % HOURS_COUNT == 0:
                total += self.open_count
        return total * self._faded(hour)

    def _faded(self, hour: int) -> float:
        return FADE ** (hour - self.hours_count)


class HourlyUsage:
    """Keeps the daily counts of all models."""

    def __init__(self, began: Instant) -> None:
        self._began = began // HOUR
        self._days: dict[ModelName, DailyCounts] = {}
        self._known = (self._began, 0.0)  # _days_known of an hour

    def used(self, name: ModelName, times_count: int, now: Instant) -> None:
        """Counts uses of a model."""
        hour = now // HOUR
        self._days.setdefault(name, DailyCounts(hour)).used(hour, times_count)

    def ahead(self, name: ModelName, now: Instant, otherwise_count: float) -> float:
        """Returns the uses to expect in the coming hours, as on earlier days; where few of those
        are known it leans to `otherwise_count`."""
        hour = now // HOUR
        day = self._days.get(name)
        if self._known[0] != hour:
            self._known = (hour, self._days_known(hour))
        usual_count = day.seen(hour) if day else 0.0
        return (usual_count + LEAN_DAYS * otherwise_count) / (self._known[1] + LEAN_DAYS)

    def forget(self, name: ModelName) -> None:
        """Forgets the uses of a model."""
        self._days.pop(name, None)

    def __iter__(self) -> Iterator[ModelName]:
        return iter(self._days)

    def export(self, names: Iterable[ModelName]) -> dict[str, Any]:
        """Returns the hour it began in, and a row for each of these models that was used:
        capability, model, hour, uses in that hour, uses by hour of the day."""
        by_name = ((name, self._days.get(name)) for name in names)
        days = [[*n, d.hours_count, d.open_count, list(d.counts)] for n, d in by_name if d]
        return {"began_hours": self._began, "days": days}

    def restore(self, exported: dict[str, Any]) -> None:
        """Takes back the values of `export`."""
        self._began = exported["began_hours"]
        self._known = (self._began, 0.0)
        for capability, model, hours_count, open_count, counts in exported["days"]:
            self._days[ModelName(capability, model)] = DailyCounts(
                hours_count, list(counts), open_count
            )

    def _days_known(self, hour: int) -> float:
        """Returns on how many days the hours ahead were there to be seen, on average, fading like
        uses."""
        passed = 0.0
        for ahead in range(AHEAD_COUNT):
            last = hour + ahead - HOURS_COUNT
            days_count = max(0, (last - self._began) // HOURS_COUNT + 1)
            passed += FADE ** (hour - last) * _faded_sum(days_count)
        return passed / AHEAD_COUNT


def _faded_sum(days_count: int) -> float:
    """Returns 1 + d + d^2 + ..., so many terms."""
    faded = FADE**HOURS_COUNT
    return (1 - faded**days_count) / (1 - faded)
