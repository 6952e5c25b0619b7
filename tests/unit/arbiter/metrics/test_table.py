"""The table of metric names keeps to the rules of Prometheus."""

import re

import pytest

from arbiter.metrics.table import TABLE, Metric, MetricType

UNITS = ("bytes", "seconds", "ratio")
ENDLESS = {"adapter", "request", "ticket", "holder", "client", "slab", "prefix", "key"}


@pytest.mark.spec("K2")
@pytest.mark.parametrize("metric", TABLE.values(), ids=str)
def test_names_have_base_units_and_the_suffix_of_their_type(metric: Metric) -> None:
    assert re.fullmatch(r"arbiter_[a-z]+(_[a-z]+)*", metric.name)
    assert metric.name.endswith("_total") == (metric.kind is MetricType.COUNTER)
    stem = metric.name.removesuffix("_total")
    assert [unit for unit in UNITS if stem.endswith(f"_{unit}")] == [metric.unit] * bool(
        metric.unit
    )
    assert metric.help.endswith(".")
    assert bool(metric.bounds) == (metric.kind is MetricType.HISTOGRAM)
    assert list(metric.bounds) == sorted(metric.bounds)


@pytest.mark.spec("K2")
@pytest.mark.parametrize("metric", TABLE.values(), ids=str)
def test_no_label_names_what_comes_and_goes(metric: Metric) -> None:
    assert not ENDLESS & set(metric.labels)
    assert "le" not in metric.labels
