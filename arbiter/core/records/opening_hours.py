"""Keeps which hours of models and of batch work are open (C13), as the shell has read its clock."""

from collections.abc import Iterable
from dataclasses import dataclass

from arbiter.core.events import HoursReading
from arbiter.units import Instant, after


@dataclass(frozen=True, slots=True)
class Window:
    """Says whether hours are open, and when that changes."""

    is_open: bool
    changes_at: Instant


class OpeningHours:
    """Looks hours up by their text, which says nothing to the core. Hours that no reading named are
    open: a simulation without a clock has none."""

    def __init__(self) -> None:
        self._windows: dict[str, Window] = {}

    def read(self, readings: Iterable[HoursReading], now: Instant) -> list[HoursReading]:
        """Takes readings, and returns those of hours that have opened or closed."""
        changed = []
        for reading in readings:
            before = self._windows.get(reading.hours)
            if reading.is_open is not (before is None or before.is_open):
                changed.append(reading)
            self._windows[reading.hours] = Window(reading.is_open, after(now, reading.left))
        return changed

    @property
    def has_closed(self) -> bool:
        """Says whether any hours are closed."""
        return any(not window.is_open for window in self._windows.values())

    def find(self, hours: str) -> Window | None:
        """Returns the window of these hours; None for hours that no reading named."""
        return self._windows.get(hours)

    def opens_at(self, hours: str) -> Instant | None:
        """Returns when closed hours open; None while they are open."""
        window = self._windows.get(hours)
        return None if window is None or window.is_open else window.changes_at
