"""Windows of the day (C13): how they are written, whether they are open, and when that changes.

`22-07` and `12:30-13, 22:00-07:00 Europe/Berlin` are hours. They go by the clock on the wall: where
a zone moves its clocks, a window begins and ends when the clocks say so, and so it may be an hour
shorter or longer that day. The core knows neither clock nor zone; it is told what this file says
(`HoursRead`).
"""

import re
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

DAY_MINUTES = 24 * 60
MINUTE_S = 60
# A window in an hour that a zone skips opens a day later: two days, and the hour of a change.
LOOKED_AHEAD_MINUTES = 2 * DAY_MINUTES + 60

_WINDOW = re.compile(r"(\d{1,2})(?::(\d\d))?-(\d{1,2})(?::(\d\d))?")


@dataclass(frozen=True, slots=True)
class OpeningHours:
    """Gives windows in minutes of the day, the end left out; a window that ends before it begins
    goes over midnight. `zone`: a name of the IANA database; empty: the machine's local time."""

    windows: tuple[tuple[int, int], ...]
    zone: str = ""

    def __str__(self) -> str:
        written = ", ".join(f"{_clock(begins)}-{_clock(ends)}" for begins, ends in self.windows)
        return f"{written} {self.zone}".rstrip()

    def is_open(self, unix_s: float) -> bool:
        """Says whether a window is open at this second of the wall clock."""
        local = datetime.fromtimestamp(unix_s, _zone(self.zone))
        return self.covers(local.hour * 60 + local.minute)

    def covers(self, minute: int) -> bool:
        """Says whether a minute of the day is in a window."""
        return any(
            begins <= minute < ends if begins < ends else minute >= begins or minute < ends
            for begins, ends in self.windows
        )

    def changes_at(self, unix_s: float) -> float:
        """Returns the second at which the hours next begin or end. Goes from minute to minute,
        which no rule of a zone can surprise: some milliseconds, twice a day."""
        is_open = self.is_open(unix_s)
        first_s = unix_s - unix_s % MINUTE_S + MINUTE_S
        for minute in range(LOOKED_AHEAD_MINUTES):
            if self.is_open(at_s := first_s + minute * MINUTE_S) is not is_open:
                return at_s
        return first_s + LOOKED_AHEAD_MINUTES * MINUTE_S  # a zone that skips a day: look again then


def _clock(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"


def _zone(name: str) -> ZoneInfo | None:
    return ZoneInfo(name) if name else None


@lru_cache(256)
def parse(text: str) -> OpeningHours:
    """Returns the hours that a text says. Raises ValueError, saying what is wrong with it."""
    written, _, zone = text.strip().rpartition(" ")
    if not written or _WINDOW.fullmatch(zone):
        written, zone = text, ""
    hours = OpeningHours(tuple(_window(part.strip()) for part in written.split(",")), zone)
    if all(map(hours.covers, range(DAY_MINUTES))):
        raise ValueError(f"{text!r} is the whole day; leave the hours out")
    check_zone(zone)
    return hours


def _window(text: str) -> tuple[int, int]:
    match = _WINDOW.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a window; write it as 22-07 or 22:30-07:15")
    begins, ends = _minute(match[1], match[2]), _minute(match[3], match[4])
    if None in (begins, ends) or begins in (ends, DAY_MINUTES):
        raise ValueError(f"{text!r} is not a window; it goes from one time of day to another")
    assert begins is not None and ends is not None
    return begins, ends


def _minute(hour: str, minute: str | None) -> int | None:
    """Returns the minute of the day, 24:00 among them; None for a time that no clock shows."""
    count = int(hour) * 60 + int(minute or 0)
    return count if int(minute or 0) < 60 and count <= DAY_MINUTES else None


def check_zone(name: str) -> str:
    """Returns the name of a time zone that this machine knows. Raises ValueError."""
    try:
        _zone(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ValueError(f"no time zone {name!r}; write it as Europe/Berlin") from error
    return name
