"""The arbiter's metrics on Ray's own exporter (K2, docs/adr/0030).

All of them go out as gauges. Ray sums up the counters of a process for as long as its node lives,
so those of an arbiter that has ended would never leave; it rebuilds the sum of a histogram from the
middles of its buckets. A gauge is exact, and leaves two report intervals after its process.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from ray.util.metrics import Gauge

from arbiter.core.histogram import HistogramCounts
from arbiter.metrics.series import Samples, buckets
from arbiter.metrics.table import FRONT, TABLE, Metric, MetricType

EXPORT_S = 5.0  # half of Ray's report interval, so that no gauge expires between two exports


class RayGauge(Protocol):
    """Names what is used of ray.util.metrics.Gauge."""

    def set(self, value: float, tags: dict[str, str]) -> None: ...


def _gauge(name: str, text: str, labels: tuple[str, ...]) -> RayGauge:
    gauge: RayGauge = Gauge(name, text, labels)
    return gauge


class RayMetrics:
    """Holds the gauges of one process; Ray drops a second one of a name silently."""

    def __init__(self, new: Callable[[str, str, tuple[str, ...]], RayGauge] = _gauge) -> None:
        self._gauges: dict[str, RayGauge] = {}
        for metric in TABLE.values():
            if metric in FRONT:
                continue
            for name, labels in _exported(metric):
                self._gauges[name] = new(name, metric.help, labels)

    def export(self, samples: Samples) -> None:
        """Sets every gauge to its present value."""
        for name, rows in samples.items():
            for labels, value in rows.items():
                tags = dict(zip(TABLE[name].labels, labels, strict=True))
                if isinstance(value, HistogramCounts):
                    self._set_histogram(TABLE[name], tags, value)
                else:
                    self._gauges[name].set(float(value), tags)

    def _set_histogram(self, metric: Metric, tags: dict[str, str], value: HistogramCounts) -> None:
        for bound, count in buckets(metric, value):
            self._gauges[f"{metric.name}_bucket"].set(float(count), {**tags, "le": bound})
        self._gauges[f"{metric.name}_sum"].set(value.sum, tags)
        self._gauges[f"{metric.name}_count"].set(float(sum(value.counts)), tags)


def _exported(metric: Metric) -> list[tuple[str, tuple[str, ...]]]:
    if metric.kind is not MetricType.HISTOGRAM:
        return [(metric.name, metric.labels)]
    plain = [(f"{metric.name}_{part}", metric.labels) for part in ("sum", "count")]
    return [(f"{metric.name}_bucket", (*metric.labels, "le")), *plain]


async def export_forever(samples: Callable[[], Samples], every_s: float = EXPORT_S) -> None:
    """Runs until it is cancelled. Ray's part, a few microseconds for each series, runs in a thread,
    so that no holder waits for it."""
    await asyncio.sleep(every_s)
    exporter = RayMetrics()
    while True:
        await asyncio.to_thread(exporter.export, samples())
        await asyncio.sleep(every_s)
