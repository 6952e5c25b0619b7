"""Names what the shell tells by itself: the time, and the end."""

from dataclasses import dataclass

from arbiter.units import Span


@dataclass(frozen=True, slots=True)
class HoursReading:
    """Says whether hours (`ModelSpec.hours`) are open by the clock on the wall."""

    hours: str
    is_open: bool
    left: Span  # until they close or open


@dataclass(frozen=True, slots=True)
class HoursRead:
    """Brings the time of day into the core (C13): what the shell has read of hours before the core
    has the table that names them, when they open or close, and when its clock was set."""

    readings: tuple[HoursReading, ...]


@dataclass(frozen=True, slots=True)
class ClosingDown:
    """Stops all grants, refuses the queue and unloads what is idle."""


@dataclass(frozen=True, slots=True)
class TimerFired:
    """Says that the time of the last SetTimer has come."""
