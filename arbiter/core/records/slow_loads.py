"""Keeps how much slower than expected loads were of late, whatever the model: a machine on which
others compute, or several models load at once, slows them all (A21).
"""

from collections import deque
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

from arbiter.units import Instant, Span, after, seconds

KEPT_COUNT = 8
SLOWER_COUNT = 2  # of so many, that count: three in four loads take no longer
LATE = seconds(600)  # with no load since, nothing else would say that it is over

Key = TypeVar("Key", bound=Hashable)


class _Load(NamedTuple):
    key: Hashable
    expected: Span  # by the loads before it
    took: Span
    at: Instant


class SlowLoads(Generic[Key]):
    """Keeps the newest loads, with what was expected of them."""

    def __init__(self) -> None:
        self._newest: deque[_Load] = deque(maxlen=KEPT_COUNT)
        self._begun: dict[Key, Instant] = {}  # the newest load of each, however it ends

    def note(self, key: Key, expected: Span, took: Span, at: Instant) -> None:
        """Notes one more load."""
        self._newest.append(_Load(key, expected, took, at))

    def note_begun(self, key: Key, now: Instant) -> None:
        """Notes that a load begins."""
        self._begun[key] = now

    def is_long_ago(self, key: Key, now: Instant) -> bool:
        """Says whether a model's own loads are too long ago to refuse a request by: nothing but
        another load would say that they were slow for a time only."""
        return now >= after(self._begun.get(key, Instant(0)), LATE)

    def forget(self, key: Key) -> None:
        """Forgets when a model was loaded."""
        self._begun.pop(key, None)

    def slowed(self, key: Key, load: Span, now: Instant) -> Span:
        """Returns how long a load may take whose estimate is `load`: as many times as long as three
        in four took of late, and never less. Where the model's own slow loads have moved its
        estimate, what it was before them is multiplied."""
        late = [newer for newer in self._newest if now < after(newer.at, LATE)]
        if len(late) < SLOWER_COUNT:
            return load
        times = sorted(newer.took / newer.expected for newer in late)[-SLOWER_COUNT]
        before = next((newer.expected for newer in late if newer.key == key), load)
        return Span(max(load, round(before * times)))
