"""The series of one scrape, and their plain form between processes (K2). Fronts read them, so this
imports nothing of what they are made from."""

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from arbiter.core.histogram import HistogramCounts, Sum
from arbiter.metrics.table import TABLE, Metric, MetricType

Labels = tuple[str, ...]
Value = float | HistogramCounts
Samples = dict[str, dict[Labels, Value]]  # by name of the table, then by the values of its labels


def buckets(metric: Metric, value: HistogramCounts) -> Iterator[tuple[str, int]]:
    """Gives the upper bound of each bucket as Prometheus writes it, and the values up to it."""
    bounds = (*(str(bound) for bound in metric.bounds), "+Inf")
    return zip(bounds, accumulate(value.counts), strict=True)


def to_plain(samples: Samples) -> dict[str, Any]:
    """Returns plain values, which any code can read: rows of labels and value, or of labels, counts
    by bucket, and sum."""
    return {
        name: [
            [list(labels), list(value.counts), value.sum]
            if isinstance(value, HistogramCounts)
            else [list(labels), value]
            for labels, value in rows.items()
        ]
        for name, rows in samples.items()
    }


def from_plain(plain: Mapping[str, Any]) -> Samples:
    """Takes back the values of `to_plain`; what this code's table does not have is left out."""
    samples: Samples = {name: {} for name in TABLE}
    for name in samples.keys() & plain.keys():
        is_histogram = TABLE[name].kind is MetricType.HISTOGRAM
        for labels, *value in plain[name]:
            samples[name][tuple(labels)] = (
                HistogramCounts(tuple(value[0]), Sum(value[1])) if is_histogram else value[0]
            )
    return samples
