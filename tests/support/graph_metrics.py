"""The metrics of a running graph: of its front, and of Ray's own exporter."""

import contextlib
import urllib.error
import urllib.request
from typing import Any

from prometheus_client.parser import text_string_to_metric_families as families_of

from tests.graph.conftest import Graph
from tests.support import ray_dashboard


def scrape(url: str) -> dict[str, list[Any]]:
    """The samples of each series' name."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        text = answer.read().decode()
    samples: dict[str, list[Any]] = {}
    for family in families_of(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample)
    return samples


def ray_samples(graph: Graph) -> dict[str, list[Any]]:
    """What Ray's exporters show together, without those of a part of Ray that has ended."""
    merged: dict[str, list[Any]] = {}
    for target in ray_targets(graph):
        with contextlib.suppress(urllib.error.URLError):
            for name, samples in scrape(f"http://{target}/metrics").items():
                merged.setdefault(name, []).extend(samples)
    return merged


def ray_answer(graph: Graph, path: str) -> Any:
    """Of Ray's dashboard."""
    return ray_dashboard.answer(graph.dashboard, path)


def ray_targets(graph: Graph) -> list[str]:
    """What Prometheus is told to scrape of this cluster."""
    groups = ray_answer(graph, "/api/prometheus/sd")
    return [target for group in groups for target in group["targets"]]
