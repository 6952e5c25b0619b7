"""Dashboard and rules ask for names of the table only, in queries that Prometheus can read."""

import re

import promql_parser
import pytest

from arbiter.metrics.table import TABLE, Metric, MetricType
from deployments.cli.main import app
from deployments.monitoring.alerts import ALERTS
from deployments.monitoring.panels import PANELS

QUERIES = [query.promql for panel in PANELS for query in panel.queries]
QUERIES += [alert.promql for alert in ALERTS]


def nodes(query: str) -> list[promql_parser.Expr]:
    """All that a query is made of."""
    found: list[promql_parser.Expr] = []
    promql_parser.walk(promql_parser.parse(query), found.append)
    return found


def metric_of(name: str) -> Metric:
    """That of the table which has this series; a KeyError without one."""
    stem = re.sub(r"_(bucket|sum|count)$", "", name)
    if stem in TABLE and stem != name:
        assert TABLE[stem].kind is MetricType.HISTOGRAM
        return TABLE[stem]
    assert TABLE[name].kind is not MetricType.HISTOGRAM
    return TABLE[name]


@pytest.mark.spec("K2")
@pytest.mark.parametrize("query", QUERIES)
def test_queries_name_metrics_of_the_table_and_their_labels(query: str) -> None:
    found = nodes(query)
    selectors = [node for node in found if isinstance(node, promql_parser.VectorSelector)]
    assert selectors
    known = {"le"}
    for selector in selectors:
        metric = metric_of(selector.name)
        known |= set(metric.labels)
        assert {matcher.name for matcher in selector.matchers.matchers} <= set(metric.labels)
    for node in found:
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier:
            assert set(node.modifier.labels) <= known


@pytest.mark.spec("K2")
def test_counters_are_asked_for_by_their_rate() -> None:
    for query in QUERIES:
        for node in nodes(query):
            if isinstance(node, promql_parser.VectorSelector):
                is_counted = metric_of(node.name).kind is not MetricType.GAUGE
                assert is_counted == bool(re.search(rf"(rate|increase)\({node.name}\b", query))


@pytest.mark.spec("K2")
def test_legends_and_summaries_name_labels_that_the_query_leaves() -> None:
    for panel in PANELS:
        for query in panel.queries:
            names = set(re.findall(r"{{(\w+)}}", query.legend))
            assert names <= labels_of(query.promql), query
    for alert in ALERTS:
        assert set(re.findall(r"\$labels\.(\w+)", alert.summary)) <= labels_of(alert.promql)


def labels_of(query: str) -> set[str]:
    """The labels of a query's answer: those aggregated by, else those of its first metric."""
    found = nodes(query)
    for node in found:
        if isinstance(node, promql_parser.AggregateExpr):
            return set(node.modifier.labels if node.modifier else ())
    [name, *_] = [node.name for node in found if isinstance(node, promql_parser.VectorSelector)]
    return set(metric_of(name).labels)


@pytest.mark.spec("K2")
def test_every_alert_has_a_runbook_that_names_a_command() -> None:
    assert (len(PANELS), len(ALERTS)) == (12, 13)
    assert len({alert.name for alert in ALERTS}) == len(ALERTS)
    commands = {command.name or command.callback.__name__ for command in app.registered_commands}  # type: ignore[union-attr]
    for alert in ALERTS:
        named = re.findall(r"`arbiter (\w+)", alert.runbook)
        assert named and set(named) <= commands, alert.name
        assert set(re.findall(r"--\w+", alert.runbook)) == set()
