"""A real Prometheus, with the files that `arbiter metrics install` writes, scrapes a running graph:
every query of the dashboard and of the alerts has data there.
"""

import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from openai import OpenAI

from deployments.monitoring.alerts import ALERTS
from deployments.monitoring.files import CONFIGURATION
from deployments.monitoring.panels import PANELS
from tests.graph.conftest import Graph, free_port, until
from tests.support.graph_commands import run_command, unload_all
from tests.support.tools import tool

CHAT = "tiny-chat"
HELLO = [{"role": "user", "content": "Who holds the memory?"}]
NO_TENANTS = "arbiter_tenant_"  # the shipped configuration limits no tenant
REPLAY_WITHIN_S = 60.0  # the graph replays its day each 20 s


def get(address: str, path: str, **query: str) -> Any:
    """What Prometheus answers; None while it does not."""
    try:
        with urllib.request.urlopen(
            f"{address}{path}?{urllib.parse.urlencode(query)}", timeout=10
        ) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        pytest.fail(f"{query}: {error.read().decode()}")
    except (urllib.error.URLError, ConnectionError):
        return None


@pytest.fixture(scope="module")
def prometheus(graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address. It scrapes each second, so that a rate has two values soon."""
    program, folder, port = tool("prometheus"), tmp_path_factory.mktemp("prometheus"), free_port()
    run_command(graph, "metrics", "install", str(folder))
    path = folder / CONFIGURATION
    chosen = yaml.safe_load(path.read_text())
    chosen["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    path.write_text(yaml.safe_dump(chosen))
    with started(program, path, port) as address:
        yield address


@contextmanager
def started(program: str, configuration: Path, port: int) -> Iterator[str]:
    """Runs Prometheus on loopback while the block lasts."""
    folder = configuration.parent
    words = [f"--config.file={configuration}", f"--storage.tsdb.path={folder / 'data'}"]
    words.append(f"--web.listen-address=127.0.0.1:{port}")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([program, *words], stdout=log, stderr=log)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(20)


def data_of(address: str, query: str) -> list[Any]:
    found = get(address, "/api/v1/query", query=query)
    return list(found["result"]) if found else []


def uncompared(query: str) -> str:
    """A query without the comparison at its end, which is there so that it mostly has no answer."""
    parsed = promql_parser.parse(query)
    if isinstance(parsed, promql_parser.BinaryExpr) and str(parsed.op) in (">", "<", "=="):
        return str(parsed.lhs)
    return query


def asked() -> list[str]:
    queries = [query.promql for panel in PANELS for query in panel.queries]
    queries += [alert.promql for alert in ALERTS]
    return [uncompared(query) for query in queries if NO_TENANTS not in query]


@pytest.mark.spec("K2")
def test_every_query_has_data_on_a_running_graph(
    graph: Graph, client: OpenAI, prometheus: str
) -> None:
    client.chat.completions.create(model=CHAT, messages=HELLO, max_tokens=2)
    until(lambda: unload_all(graph), 60, "idle models have gone")
    missing = asked()

    def has_all() -> bool:
        missing[:] = [query for query in missing if not data_of(prometheus, query)]
        return not missing

    until(has_all, REPLAY_WITHIN_S, f"all queries have data; without: {missing}")
    assert data_of(prometheus, "arbiter_up")[0]["value"][1] == "1"


@pytest.mark.spec("K2")
def test_every_alert_rule_is_evaluated_and_a_healthy_graph_fires_none_that_is_critical(
    prometheus: str,
) -> None:
    def rules() -> list[Any]:
        groups = (get(prometheus, "/api/v1/rules") or {"groups": []})["groups"]
        found = [rule for group in groups for rule in group["rules"]]
        return found if found and all(rule["health"] != "unknown" for rule in found) else []

    found = until(rules, 30, "the rules are evaluated")
    assert {rule["name"]: rule["health"] for rule in found} == {a.name: "ok" for a in ALERTS}
    critical = {a.name for a in ALERTS if a.severity == "critical"}
    fires = {rule["name"] for rule in found if rule["state"] == "firing"}
    assert not fires & critical
