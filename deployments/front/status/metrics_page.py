"""`/metrics`: what the arbiter counts, in the text form of Prometheus (K2).

Each front asks the arbiter at most once a second, however many scrape it. While no arbiter answers,
the last answer is shown, with its age.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family

from arbiter.client.admin import call_arbiter
from arbiter.core.histogram import HistogramCounts
from arbiter.errors import ArbiterUnavailable
from arbiter.metrics.series import Samples, Value, buckets, from_plain
from arbiter.metrics.table import AGE, TABLE, UP, Metric, MetricType

ANSWER_S = 3.0  # the scrape timeout of Prometheus is 10 s; a restart of the arbiter takes 1-2 s
FRESH_S = 1.0


async def ask() -> dict[str, Any]:
    """Raises ArbiterUnavailable."""
    answer: dict[str, Any] = await call_arbiter("metrics", within_s=ANSWER_S)
    return answer


class MetricsPage:
    """One per front, on its event loop."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[dict[str, Any]]] = ask,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask, self._clock = ask, clock
        self._samples: Samples = {}
        self._is_up = False
        self._asked_s = self._answered_s = -float("inf")
        self._asking = asyncio.Lock()

    async def text(self) -> bytes:
        """Returns the page; its families of the arbiter are empty before the first answer."""
        async with self._asking:
            if self._clock() - self._asked_s >= FRESH_S:
                await self._refresh()
        return exposition(self._now())

    async def _refresh(self) -> None:
        try:
            self._samples = from_plain(await self._ask())
        except ArbiterUnavailable:
            self._is_up = False
        else:
            self._is_up, self._answered_s = True, self._clock()
        self._asked_s = self._clock()

    def _now(self) -> Samples:
        age_s = self._clock() - self._answered_s
        return {**self._samples, UP: {(): self._is_up}, AGE: {(): age_s}}


def exposition(samples: Samples) -> bytes:
    """Returns the text form 0.0.4, with help and type of every name of the table."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(samples))
    return generate_latest(registry)


class _Families:
    """The samples as a collector of prometheus_client."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def collect(self) -> Iterator[Family]:
        for metric in TABLE.values():
            yield _family(metric, self._samples.get(metric.name, {}))


def _family(metric: Metric, rows: dict[tuple[str, ...], Value]) -> Family:
    family: CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
    match metric.kind:
        case MetricType.COUNTER:
            family = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
        case MetricType.GAUGE:
            family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
        case MetricType.HISTOGRAM:
            family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, value in sorted(rows.items()):
        if isinstance(family, HistogramMetricFamily):
            assert isinstance(value, HistogramCounts)
            family.add_metric(labels, list(buckets(metric, value)), value.sum)
        else:
            assert not isinstance(value, HistogramCounts)
            family.add_metric(labels, float(value))
    return family
