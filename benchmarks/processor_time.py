"""Processor time that each process of the graph takes: at rest, for a request, and for a token.

    python -m benchmarks.processor_time --model mid-chat --streams 8

The kernel's own count (utime and stime of /proc/PID/stat). A request is one whose answer has a
single token; of a token, its share of a request of 64 is counted in. What a process takes at rest
is not subtracted, except in the totals outside the engine that say so.
"""

import argparse
import asyncio
import json
import os
import time
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks import load, report, servers
from benchmarks.throughput import graph_config
from deployments.config import load_plan

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
SETTLE_S, REST_S = 30.0, 20.0  # after a load, until what looks at a new engine looks rarely again
ENGINE = ("engine core", "engine frontend")
ROUNDS, REQUEST_ROUNDS, TOKENS = 3, 12, 64  # for each stream
NAMES = {
    "ServeReplica:front": "front",
    "ServeReplica:chat": "replica",
    "ray::ProxyActor": "proxy",
    "ray::ServeController": "controller",
    "ray::NodeAgent": "node agent",
    "ray::ArbiterActor": "arbiter",
    "gcs_server": "gcs",
    "raylet/raylet": "raylet",
    "ray::DashboardAgent": "dashboard",
    "ray/dashboard/": "dashboard",
    "log_monitor.py": "log monitor",
    "runtime_env/agent": "runtime environments",
    "ray::IDLE": "spare workers",
    "deployments.engines.zygote": "zygote",
    "ServeReplica:": "other replicas",
}


def name_of(folder: Path, session: str, node: str) -> str | None:
    """In our words; None: not of this graph. Engines have the node in their command line, as the
    zygote that forked them, and the rest was started with this RAY_TMPDIR."""
    words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    said = (folder / "comm").read_text().strip()
    if said.startswith("engine") and node in words:
        return "engine core" if said == "engine-core" else "engine frontend"
    if f"RAY_TMPDIR={session}".encode() not in (folder / "environ").read_bytes().split(b"\0"):
        return None
    return next((name for mark, name in NAMES.items() if mark in words), None)


def look(session: str, node: str) -> dict[int, tuple[str, float]]:
    """Pid to name and seconds."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            name = name_of(folder, session, node)
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # gone, or somebody else's
        if name:
            found[int(folder.name)] = name, (int(fields[11]) + int(fields[12])) * TICK_S
    return found


class Watch:
    """Milliseconds by process since it was made."""

    def __init__(self, *graph: str) -> None:
        self._graph, self._before = graph, look(*graph)

    def per(self, count: float) -> dict[str, float]:
        spent: defaultdict[str, float] = defaultdict(float)
        for pid, (name, now_s) in look(*self._graph).items():
            spent[name] += now_s - self._before.get(pid, (name, 0.0))[1]
        rows = {name: round(1000 * spent_s / count, 2) for name, spent_s in spent.items()}
        by_cost = sorted(rows, key=lambda name: -rows[name])
        return {name: rows[name] for name in by_cost if rows[name]}


def measure(url: str, model: str, streams: int, session: str) -> dict[str, Any]:
    def run(rounds: int, tokens: int) -> load.Run:
        loop = load.closed_loop(
            url, [model], streams=streams, requests=streams * rounds, tokens=tokens, seed=0
        )
        return asyncio.run(loop)

    run(1, 8)  # loads it
    with urllib.request.urlopen(f"{url}/arbiter/state", timeout=30) as answer:
        graph = session, json.load(answer)["devices"][0]["node"]
    time.sleep(SETTLE_S)
    watch = Watch(*graph)
    time.sleep(REST_S)
    at_rest = watch.per(REST_S)
    figures: dict[str, Any] = {"ms_per_s_at_rest": at_rest}
    for unit, rounds, tokens in ("request", REQUEST_ROUNDS, 1), ("token", ROUNDS, TOKENS):
        watch, done = Watch(*graph), run(rounds, tokens)
        count = len(done.answers) if unit == "request" else sum(a.tokens for a in done.answers)
        rows = figures[f"ms_per_{unit}"] = watch.per(count)
        figures[f"ms_per_{unit}_outside_the_engine"] = outside(rows)
        beyond = outside(rows) - outside(at_rest) * done.wall_s / count
        figures[f"ms_per_{unit}_outside_the_engine_beyond_rest"] = beyond
    return figures | {"tokens_per_s": done.tokens_per_s}


def outside(rows: dict[str, float]) -> float:
    return sum(spent for name, spent in rows.items() if name not in ENGINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mid-chat")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--transport", choices=sorted(servers.TRANSPORTS), default="default")
    args = parser.parse_args()
    session = os.environ.setdefault("RAY_TMPDIR", "/tmp/arbiter-processor-time")
    load_plan.resolve(f"made:{args.model}")
    with servers.our_graph(graph_config(args.model, 18_402), args.transport) as url:
        figures = measure(url, args.model, args.streams, session)
    for name, row in figures.items():
        print(f"{name}: {row}")
    label = [args.model, str(args.streams)]
    label += [] if args.transport == "default" else [args.transport]
    report.write("processor_time", {"transport": args.transport, **figures}, label="_".join(label))


if __name__ == "__main__":
    main()
