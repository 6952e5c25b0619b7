"""Processor time that each process of the graph takes: at rest, for a request, and for a token.

    python -m benchmarks.processor_time --model mid-chat --streams 8

    python -m benchmarks.processor_time --plain-serve

The kernel's own count (utime and stime of /proc/PID/stat). A request is one whose answer has a
single token; of a token, its share of a request of 64 is counted in. What a process takes at rest
is not subtracted, except in the totals outside the engine that say so; and of `further` tokens, the
63 after a request's first, neither rest nor request are counted.

`--plain-serve` has what Ray and Serve take at rest with nothing of ours: two deployments of one
replica each that say hello, as many as a front and a capability have, by Ray's settings and by
ours.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml

from benchmarks import load, report, servers
from benchmarks.throughput import ENGINE_ARGS, graph_config
from deployments.config import load_plan
from deployments.config.start_variables import VARIABLES

PLAIN_PORT = 18_403
NO_NODE = "no node has this name"
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
# After a load: what the agent knows of a new engine it believes ever longer, from 75 s on for 40 s.
SETTLE_S, REST_S = 90.0, 40.0
ENGINE = ("engine core", "engine frontend")
ROUNDS, REQUEST_ROUNDS, TOKENS = 3, 12, 64  # for each stream
PLAIN_APPLICATION = """from ray import serve

@serve.deployment
class Greeter:
    async def __call__(self, request):
        return "Hello"

application = Greeter.bind()
"""
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
    processes = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            name = name_of(folder, session, node)
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # gone, or another user's
        if name:
            processes[int(folder.name)] = name, (int(fields[11]) + int(fields[12])) * TICK_S
    return processes


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
    rested = "outside_the_engine_beyond_rest"
    request, token = (figures[f"ms_per_{unit}_{rested}"] for unit in ("request", "token"))
    further = (token * TOKENS - request) / (TOKENS - 1)
    figures[f"ms_per_further_token_{rested}"] = further
    return figures | {"tokens_per_s": done.tokens_per_s}


def plain_serve_at_rest(session: str, variables: dict[str, str]) -> dict[str, float]:
    """Milliseconds a second by process."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "greeting.py").write_text(PLAIN_APPLICATION)
        paths = ("/front", "/capability")
        applications = [
            {"name": path[1:], "route_prefix": path, "import_path": "greeting:application"}
            for path in paths
        ]
        http = {"host": "127.0.0.1", "port": PLAIN_PORT}
        file = Path(folder, "plain.yaml")
        file.write_text(yaml.safe_dump({"http_options": http, "applications": applications}))
        env = variables | {"PYTHONPATH": folder}
        log = Path(folder, "serve.log")
        with servers.running([str(servers.BIN / "serve"), "run", str(file)], env, log) as process:
            for path in paths:
                servers.wait_for(f"http://127.0.0.1:{PLAIN_PORT}{path}", 180, process)
            time.sleep(SETTLE_S)
            watch = Watch(session, NO_NODE)
            time.sleep(REST_S)
            return watch.per(REST_S)


def plain_serve(session: str) -> dict[str, Any]:
    own_proxy = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"  # our front's, which is not here
    ours = {name: value for name, value in VARIABLES.items() if name != own_proxy}
    figures: dict[str, Any] = {}
    for whose, variables in {"rays": {}, "ours": ours}.items():
        rows = plain_serve_at_rest(session, variables)
        figures[f"ms_per_s_by_{whose}_settings"] = rows
        figures[f"ms_per_s_by_{whose}_settings_in_all"] = sum(rows.values())
    return figures


def outside(rows: dict[str, float]) -> float:
    return sum(spent for name, spent in rows.items() if name not in ENGINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mid-chat")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--transport", choices=sorted(servers.TRANSPORTS), default="default")
    parser.add_argument("--dtype", default=ENGINE_ARGS["dtype"], help="of the engine")
    parser.add_argument("--plain-serve", action="store_true", help="Ray and Serve alone, at rest")
    args = parser.parse_args()
    session = os.environ.setdefault("RAY_TMPDIR", "/tmp/arbiter-processor-time")
    if args.plain_serve:
        figures = plain_serve(session)
        for name, row in figures.items():
            print(f"{name}: {row}")
        report.write("processor_time", figures, label="plain_serve")
        return
    load_plan.resolve(f"made:{args.model}")
    config = graph_config(args.model, 18_402, ENGINE_ARGS | {"dtype": args.dtype})
    with servers.our_graph(config, args.transport) as url:
        figures = measure(url, args.model, args.streams, session)
    for name, row in figures.items():
        print(f"{name}: {row}")
    label = [args.model, str(args.streams)]
    label += [] if args.transport == "default" else [args.transport]
    label += [] if args.dtype == ENGINE_ARGS["dtype"] else [args.dtype]
    report.write("processor_time", {"transport": args.transport, **figures}, label="_".join(label))


if __name__ == "__main__":
    main()
