"""Histograms of durations and ratios, which merge without losing a count (K2)."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NewType

# From a warm tiny model to the load of a large one; Prometheus buckets are at most (`le`).
SECONDS_BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
RATIO_BOUNDS = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)

Sum = NewType("Sum", float)  # of a histogram's values, in the unit of its bounds


@dataclass(frozen=True, slots=True)
class HistogramCounts:
    """Gives what a histogram has counted: values by bucket, of which the last has no bound, and
    their exact sum."""

    counts: tuple[int, ...]
    sum: Sum


class Histogram:
    """Counts values by bucket."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def note(self, value: float) -> None:
        """Adds one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add(self, other: HistogramCounts) -> None:
        """Adds what another histogram of the same bounds has counted."""
        self._merge(other.counts, other.sum, 1)

    def subtract(self, other: HistogramCounts) -> None:
        """Takes back what was added or read before."""
        self._merge(other.counts, other.sum, -1)

    def read(self) -> HistogramCounts:
        """Returns what has been counted so far."""
        return HistogramCounts(tuple(self._counts), Sum(self._sum))

    @property
    def is_empty(self) -> bool:
        """Says whether nothing is counted."""
        return not any(self._counts)

    def _merge(self, counts: Iterable[int], total: float, sign: int) -> None:
        for bucket, count in enumerate(counts):
            self._counts[bucket] += sign * count
        self._sum += sign * total
