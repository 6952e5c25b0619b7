"""Whether the number of series stays the same while models and replicas restart (K2).

    python -m benchmarks.series [--restarts 100]

A running graph with 500 models of an engine that computes nothing, over five capabilities. One
restart, in all capabilities at once: a model is loaded, unloaded by hand and loaded again, each
time another one, and its replica is killed. Before and after, the series of ours are those that
the front's `/metrics` and Ray's exporter show.
"""

import argparse
import contextlib
import os
import signal
import tempfile
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks import report
from tests.graph.conftest import ROOT, Graph, served, until
from tests.support import graph_processes
from tests.support.graph_commands import send
from tests.support.graph_metrics import ray_targets, scrape
from tests.support.ports import free_port

CAPABILITIES, MODELS = tuple(f"part{number}" for number in range(5)), 500
EACH = MODELS // len(CAPABILITIES)
# An empty engine holds half of this, private.
NEED = {"weights": "1 MiB", "context": "24 MiB"}
LOADS = "arbiter_load_seconds_count"  # Ray puts its own name before it
WARM_UP = 2  # rounds: some series begin with what a first life leaves behind
ANSWER_S, REPORTED_S = 120.0, 120.0  # Ray reports each 10 s, and is told each 5 s

Series = tuple[str, tuple[tuple[str, str], ...]]


def config_in(folder: Path) -> dict[str, Any]:
    """The shipped configuration with these capabilities in place of its own."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    config["http_options"]["port"] = free_port()
    config["applications"] = config["applications"][:1]
    table = config["applications"][0]["deployments"][0]["user_config"]
    table["arbiter"] |= {
        "state_file": str(folder / "arbiter.sqlite"), "arenas": {"cpu": "2 GiB", "host": "1 GiB"},
        "pipelines": [], "collate_s": 0,
    }  # fmt: skip
    model = {"source": "fake", "need": NEED, "can_sleep": False, "keep_warm_s": -1}
    row = {"role": "text", "engine": "tests.support.fake_engine:build"}
    table["capabilities"] = {
        part: {**row, "models": {name_of(part, number): model for number in range(EACH)}}
        for part in CAPABILITIES
    }
    return config


def name_of(part: str, number: int) -> str:
    return f"{part}-model-{number % EACH}"


def restart(graph: Graph, number: int, part: str) -> None:
    """One model of the capability restarts, and its replica. Raises AssertionError."""
    model = name_of(part, number)

    def is_unloaded() -> bool:
        """Refused until a heartbeat has said that it is idle."""
        with contextlib.suppress(urllib.error.HTTPError):
            send(graph, "POST", f"/arbiter/models/unload/{model}")
        return model not in held(graph, part)

    ask(graph, model)
    until(is_unloaded, ANSWER_S, f"{model} is unloaded")
    ask(graph, model)
    replicas = graph_processes.replicas(graph, part)
    assert replicas
    for replica in replicas:
        os.kill(replica, signal.SIGKILL)
    until(lambda: not held(graph, part), ANSWER_S, f"what the replica of {part} had is free")


def ask(graph: Graph, model: str) -> None:
    """Until it is answered: a replica that was just killed may be listed for a moment."""
    body = {"model": model, "messages": [{"role": "user", "content": "Who holds the memory?"}]}
    until(lambda: graph.post("/v1/chat/completions", body)[0] == 200, ANSWER_S, f"{model} answers")


def held(graph: Graph, part: str) -> set[str]:
    return {t["model"] for t in graph.state()["tickets"] if t["capability"] == part}


def of_front(graph: Graph) -> dict[Series, float]:
    return _ours(scrape(f"{graph.url}/metrics"))


def of_ray(graph: Graph) -> dict[Series, float]:
    values: dict[Series, float] = {}
    for target in ray_targets(graph):
        values |= _ours(scrape(f"http://{target}/metrics"))
    return values


def _ours(samples_by_name: dict[str, list[Any]]) -> dict[Series, float]:
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for name, samples in samples_by_name.items()
        if name.startswith(("arbiter_", "ray_arbiter_"))
        for s in samples
    }


def series(graph: Graph, loads: int) -> dict[str, set[Series]]:
    """Of both exporters, once they count so many loads."""

    def both() -> dict[str, set[Series]]:
        sides = {"front": of_front(graph), "ray": of_ray(graph)}
        counts = [
            sum(value for (name, _), value in rows.items() if name.endswith(LOADS))
            for rows in sides.values()
        ]
        is_whole = counts[0] == counts[1] >= loads
        return {name: set(rows) for name, rows in sides.items()} if is_whole else {}

    return until(both, REPORTED_S, f"both exporters count {loads} loads")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--restarts", type=int, default=100)
    rounds = -(-parser.parse_args().restarts // len(CAPABILITIES))
    with tempfile.TemporaryDirectory(prefix="series-") as name:
        folder = Path(name)
        with served(folder, config_in(folder), PYTHONPATH=str(ROOT)) as graph:
            report.write("series", measured(graph, rounds))


def measured(graph: Graph, rounds: int) -> dict[str, Any]:
    """The figures of so many rounds of one restart in each capability."""
    each_loads = 2 * len(CAPABILITIES)
    run(graph, range(WARM_UP))
    before = series(graph, WARM_UP * each_loads)
    began_s = time.monotonic()
    run(graph, range(WARM_UP, WARM_UP + rounds))
    figures: dict[str, Any] = {"models": MODELS, "took_s": round(time.monotonic() - began_s)}
    figures["model_restarts"] = figures["replica_restarts"] = rounds * len(CAPABILITIES)
    after = series(graph, (WARM_UP + rounds) * each_loads)
    for name in before:
        added, lost = after[name] - before[name], before[name] - after[name]
        figures[name] = {"before": len(before[name]), "after": len(after[name])}
        figures[name] |= {"added": sorted(map(str, added)), "lost": sorted(map(str, lost))}
        print(f"{name}: {len(before[name])} series, then {len(after[name])}; {added} {lost}")
    return figures


def run(graph: Graph, numbers: range) -> None:
    with ThreadPoolExecutor() as pool:
        for number in numbers:
            list(pool.map(partial(restart, graph, number), CAPABILITIES))
            print(f"{len(CAPABILITIES) * (number + 1)} restarts", flush=True)


if __name__ == "__main__":
    main()
