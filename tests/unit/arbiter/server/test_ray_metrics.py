"""What goes to Ray's exporter: gauges only, each made once."""

import asyncio
from collections import Counter

import pytest

from arbiter.core.histogram import HistogramCounts
from arbiter.metrics.counters import Counters
from arbiter.metrics.series import Samples
from arbiter.metrics.table import AGE, TABLE, UP, MetricType
from arbiter.server import ray_metrics
from arbiter.server.ray_metrics import RayMetrics, export_forever
from tests.support.metrics import busy_core, scrape


class Gauge:
    """Keeps what was set."""

    def __init__(self, labels: tuple[str, ...]) -> None:
        self.labels = labels
        self.values: dict[tuple[str, ...], float] = {}

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert tags.keys() == set(self.labels)
        self.values[tuple(tags[label] for label in self.labels)] = value


class Exporter:
    """Stands in for Ray's part, of which it makes gauges."""

    def __init__(self) -> None:
        self.gauges: dict[str, Gauge] = {}
        self.made: Counter[str] = Counter()

    def new(self, name: str, _: str, labels: tuple[str, ...]) -> Gauge:
        self.made[name] += 1
        self.gauges[name] = Gauge(labels)
        return self.gauges[name]


@pytest.fixture(scope="module")
def samples() -> Samples:
    return scrape(busy_core(), Counters())


@pytest.mark.spec("K2")
def test_every_metric_of_the_arbiter_is_exported_with_its_values(samples: Samples) -> None:
    exporter = Exporter()
    metrics = RayMetrics(exporter.new)
    for _ in range(2):
        metrics.export(samples)
    assert set(exporter.made.values()) == {1}
    for name, metric in TABLE.items():
        if metric.kind is not MetricType.HISTOGRAM and name not in (UP, AGE):
            assert exporter.gauges[name].values == samples[name]
    assert UP not in exporter.gauges


@pytest.mark.spec("K2")
def test_a_histogram_keeps_its_exact_sum(samples: Samples) -> None:
    exporter = Exporter()
    RayMetrics(exporter.new).export(samples)
    name, labels = "arbiter_request_seconds", ("text", "answered")
    taken = samples[name][labels]
    assert isinstance(taken, HistogramCounts)
    assert exporter.gauges[f"{name}_sum"].values[labels] == taken.sum
    assert exporter.gauges[f"{name}_count"].values[labels] == 2
    by_bound = exporter.gauges[f"{name}_bucket"].values
    assert by_bound[(*labels, "0.1")] == 0
    assert by_bound[(*labels, "0.3")] == 1
    assert by_bound[(*labels, "+Inf")] == 2


@pytest.mark.spec("K2")
async def test_values_are_exported_again_and_again(
    samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = Exporter()
    monkeypatch.setattr(ray_metrics, "RayMetrics", lambda: RayMetrics(exporter.new))
    asked = 0
    twice = asyncio.Event()

    def count() -> Samples:
        nonlocal asked
        asked += 1
        if asked == 2:
            twice.set()
        return samples

    exporting = asyncio.ensure_future(export_forever(count, every_s=0.0))
    async with asyncio.timeout(60):
        await twice.wait()
    exporting.cancel()
    assert exporter.gauges["arbiter_epoch"].values == {(): 1.0}
