"""Keeps which hours of models and of batch work are open (C13), by the last reading of each."""

from collections.abc import Iterable
from dataclasses import dataclass

from arbiter.core.events import HoursReading
from arbiter.units import Instant, after


@dataclass(frozen=True, slots=True)
class HoursState:
    """Says whether hours are open, and when that changes."""

    is_open: bool
    changes_at: Instant


class HoursReadings:
    """Looks hours up by their text, which says nothing to the core. Hours that no reading named are
    open: a simulation without a clock has none."""

    def __init__(self) -> None:
        self._latest: dict[str, HoursState] = {}

    def read(self, readings: Iterable[HoursReading], now: Instant) -> list[HoursReading]:
        """Takes readings, and returns those of hours that have opened or closed."""
        changed = []
        for reading in readings:
            before = self._latest.get(reading.hours)
            if reading.is_open is not (before is None or before.is_open):
                changed.append(reading)
            self._latest[reading.hours] = HoursState(reading.is_open, after(now, reading.left))
        return changed

    def find(self, hours: str) -> HoursState | None:
        """Returns what the last reading said; None for hours that no reading named."""
        return self._latest.get(hours)

    def opens_at(self, hours: str) -> Instant | None:
        """Returns when closed hours open; None while they are open."""
        state = self._latest.get(hours)
        return None if state is None or state.is_open else state.changes_at
