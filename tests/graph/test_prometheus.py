"""A real Prometheus, with the files that `arbiter metrics install` writes, scrapes a running graph:
every query of the dashboard and of the alerts has data there.
"""

from collections.abc import Iterator

import pytest
from openai import OpenAI

from deployments.monitoring.alerts import ALERTS
from tests.graph.conftest import Graph, until
from tests.support.graph_commands import run_command, unload_all
from tests.support.ports import free_port
from tests.support.prometheus import Prometheus, prometheus_of, queries

CHAT = "tiny-chat"
HELLO = [{"role": "user", "content": "Who holds the memory?"}]
NO_TENANTS = "arbiter_tenant_"  # the shipped configuration limits no tenant
REPLAY_WITHIN_S = 180.0  # the graph replays its day each 60 s


@pytest.fixture(scope="module")
def prometheus(graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    run_command(graph, "metrics", "install", str(folder))
    with prometheus_of(folder, free_port()) as running:
        yield running


@pytest.mark.spec("K2")
def test_every_query_has_data_on_a_running_graph(
    graph: Graph, client: OpenAI, prometheus: Prometheus
) -> None:
    client.chat.completions.create(model=CHAT, messages=HELLO, max_tokens=2)
    until(lambda: unload_all(graph), 60, "idle models have gone")
    missing = [query for query in queries() if NO_TENANTS not in query]

    def has_all() -> bool:
        missing[:] = prometheus.without_data(missing)
        return not missing

    until(has_all, REPLAY_WITHIN_S, f"all queries have data, of which {missing} have none yet")
    assert prometheus.data_of("arbiter_up")[0]["value"][1] == "1"


@pytest.mark.spec("K2")
def test_every_alert_rule_is_evaluated_and_a_healthy_graph_fires_none_that_is_critical(
    prometheus: Prometheus,
) -> None:
    rules = until(prometheus.rules, 60, "the rules are evaluated")
    assert {rule["name"]: rule["health"] for rule in rules} == {a.name: "ok" for a in ALERTS}
    critical = {a.name for a in ALERTS if a.severity == "critical"}
    fires = {rule["name"] for rule in rules if rule["state"] == "firing"}
    assert not fires & critical
