"""A real Prometheus on loopback, and what it answers."""

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

from deployments.monitoring.alerts import ALERTS
from deployments.monitoring.files import CONFIGURATION
from deployments.monitoring.panels import PANELS
from tests.support.tools import tool


class Prometheus:
    """Asks the Prometheus that listens at `address`."""

    def __init__(self, address: str) -> None:
        self._address = address

    def get(self, path: str, **query: str) -> Any:
        """Its answer; None while it does not answer. The test fails with what it refuses."""
        asked = f"{self._address}{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 503:  # it starts
                    return None
                pytest.fail(f"{query}: {error.read().decode()}")
        except (urllib.error.URLError, ConnectionError):
            return None

    def data_of(self, query: str) -> list[Any]:
        """The samples of a query, as of now."""
        data = self.get("/api/v1/query", query=query)
        return list(data["result"]) if data else []

    def without_data(self, queries: list[str]) -> list[str]:
        return [query for query in queries if not self.data_of(query)]

    def rules(self) -> list[Any]:
        """Every rule, once all have been evaluated."""
        groups = (self.get("/api/v1/rules") or {"groups": []})["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        return rules if all(rule["health"] != "unknown" for rule in rules) else []


@contextmanager
def prometheus_of(folder: Path, port: int) -> Iterator[Prometheus]:
    """Runs while the block lasts, with the files in `folder`. It scrapes each second, so that a
    rate has two values soon. Skips the test where Prometheus is not installed."""
    path = folder / CONFIGURATION
    chosen = yaml.safe_load(path.read_text())
    chosen["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    path.write_text(yaml.safe_dump(chosen))
    words = [tool("prometheus"), f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}"]
    words.append(f"--web.listen-address=127.0.0.1:{port}")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
        try:
            yield Prometheus(f"http://127.0.0.1:{port}")
        finally:
            process.terminate()
            process.wait(60)


def queries() -> list[str]:
    """Of the dashboard and of the alerts, without the comparison at the end: it is there so that a
    query mostly has no answer."""
    queries = [query.promql for panel in PANELS for query in panel.queries]
    return [_uncompared(query) for query in [*queries, *(alert.promql for alert in ALERTS)]]


def _uncompared(query: str) -> str:
    parsed = promql_parser.parse(query)
    if isinstance(parsed, promql_parser.BinaryExpr) and str(parsed.op) in (">", "<", "=="):
        return str(parsed.lhs)
    return query
