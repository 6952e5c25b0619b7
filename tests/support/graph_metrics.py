"""The metrics of a running graph: of its front, and of Ray's own exporter."""

import json
import subprocess
import urllib.request
from typing import Any

from prometheus_client.parser import text_string_to_metric_families as families_of

from tests.graph.conftest import BIN, Graph


def scrape(url: str) -> dict[str, list[Any]]:
    """The samples of each series' name."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        text = answer.read().decode()
    found: dict[str, list[Any]] = {}
    for family in families_of(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def ray_answer(graph: Graph, path: str) -> Any:
    """Of Ray's dashboard."""
    token = subprocess.run(
        [BIN / "ray", "get-auth-token"], capture_output=True, text=True, check=True
    ).stdout.strip()
    request = urllib.request.Request(
        f"{graph.dashboard}{path}", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def ray_targets(graph: Graph) -> list[str]:
    """What Prometheus is told to scrape of this cluster."""
    groups = ray_answer(graph, "/api/prometheus/sd")
    return [target for group in groups for target in group["targets"]]
