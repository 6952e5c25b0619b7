"""Keeps how long requests of each model ran of late, without the wait for a load: what a task's
prediction adds to wait and load (J5).
"""

from collections import deque
from collections.abc import Hashable, Iterator
from typing import Generic, NamedTuple, TypeVar

from arbiter.units import Span

# Newest runs of one model under its settings. The longest of so many stands for the 99th
# percentile: about one in 65 takes longer still. A dry run copies them: 300 kB of 500 models.
KEPT_COUNT = 64
# Of one model, between two times that the state file is told: a busy one answers hundreds a second.
SAVED_EACH_COUNT = 16


Key = TypeVar("Key", bound=Hashable)


class RunSpans(NamedTuple):
    """Says how long the newest runs of a model took."""

    usual: Span  # their median
    long: Span  # the longest: the 99th percentile, as far as so few say


class RunTimes(Generic[Key]):
    """Keeps the newest runs by key."""

    def __init__(self) -> None:
        self._spans: dict[Key, deque[Span]] = {}
        self._noted_count: dict[Key, int] = {}

    def __iter__(self) -> Iterator[Key]:
        return iter(self._spans)

    def note(self, key: Key, took: Span) -> bool:
        """Notes one more run. Returns whether the state file should be told."""
        self._spans.setdefault(key, deque(maxlen=KEPT_COUNT)).append(took)
        count = self._noted_count[key] = self._noted_count.get(key, 0) + 1
        return count % SAVED_EACH_COUNT == 1

    def read(self, key: Key) -> RunSpans | None:
        """Returns how long runs take; None before the first."""
        spans = sorted(self._spans.get(key, ()))
        return RunSpans(spans[len(spans) // 2], spans[-1]) if spans else None

    def spans(self, key: Key) -> tuple[Span, ...]:
        """Returns the newest runs, oldest first."""
        return tuple(self._spans.get(key, ()))

    def forget(self, key: Key) -> None:
        """Forgets the runs of one key."""
        self._spans.pop(key, None)
        self._noted_count.pop(key, None)
