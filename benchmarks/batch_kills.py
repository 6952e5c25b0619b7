"""A batch over three models while every kind of process is killed in turn (J4).

    python -m benchmarks.batch_kills --lines 1000 --tokens 2 --seed 1

Kills the process of jobs, the HTTP proxy, the front, Serve's controller, the arbiter, a replica,
the engines, the node agent and the zygote, one kind after another, each when so many more lines are
done; then it kills all processes of the cluster at once and starts it again on the same state file.
Each line must have one result of its own model, and none two.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openai import APIError, OpenAI

from benchmarks import report
from benchmarks.graph_chaos import INGRESS
from tests.graph.conftest import Graph, command_of, name_of, served, started, until
from tests.support.graph_processes import VICTIMS, victims

MODELS = ("tiny-chat", "plain-chat", "small-chat")
JOBS = "ray::ServeReplica:jobs:jobs"
PARTS = {"jobs": JOBS, **INGRESS}  # of the command lines
KINDS = (*PARTS, *VICTIMS)
WITHIN_S = 540.0  # for one share of the lines
FOUND_S = 60.0  # until there is a process of a kind, which may be starting after another kill
ENDED = ("completed", "failed", "cancelled", "expired")


def input_lines(count: int, tokens: int) -> bytes:
    """Lines that name the models in turn."""
    rows = [
        {
            "custom_id": f"r{n}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": MODELS[n % len(MODELS)],
                "messages": [{"role": "user", "content": f"Line {n}"}],
                "max_tokens": tokens,
                "ignore_eos": True,
            },
        }
        for n in range(count)
    ]
    return "\n".join(json.dumps(row) for row in rows).encode()


def find(graph: Graph, kind: str) -> list[int]:
    """Pids of a kind, as far as they exist now."""
    if kind in PARTS:
        return [pid for pid in graph.workers() if PARTS[kind] in command_of(pid)]
    return victims(graph, kind)


def patiently(ask: Callable[[], Any]) -> Any:
    """The answer, or None while the front is away."""
    try:
        return ask()
    except APIError:
        return None


def client_of(graph: Graph) -> OpenAI:
    return OpenAI(base_url=f"{graph.url}/v1", api_key="none", timeout=30, max_retries=8)


def begin(client: OpenAI, count: int, tokens: int) -> str:
    """The id of the batch."""
    file = client.files.create(file=("in.jsonl", input_lines(count, tokens)), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    ).id


def progress(graph: Graph, batch: str) -> tuple[str, int]:
    """Its state and how many lines are done, by the state file: the front may be away."""
    file = f"file:{graph.table['arbiter']['state_file']}?mode=ro"
    with contextlib.closing(sqlite3.connect(file, uri=True, timeout=5)) as db:
        row = db.execute("SELECT state, completed FROM batches WHERE id = ?", (batch,)).fetchone()
    return str(row[0]), int(row[1])


def kill_in_turn(graph: Graph, batch: str, count: int, order: list[str]) -> Counter[str]:
    """How many of each kind were killed, all while lines were left."""
    killed, began_s = Counter[str](), time.monotonic()
    for number, kind in enumerate(order, 1):
        wait_for(graph, batch, number * count // (len(order) + 2))
        pids = until(lambda: find(graph, kind), FOUND_S, f"there is a process: {kind}")  # noqa: B023
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            killed[kind] += 1
        state, lines = progress(graph, batch)
        took_s = time.monotonic() - began_s
        print(f"{took_s:6.1f} s, {lines} lines: killed {len(pids)} of {kind}", flush=True)
        assert state == "in_progress", f"the batch was {state} when {kind} was killed"
    wait_for(graph, batch, (len(order) + 1) * count // (len(order) + 2))
    return killed


def wait_for(graph: Graph, batch: str, least: int) -> None:
    until(lambda: progress(graph, batch)[1] >= least, WITHIN_S, f"{least} lines are done")


def kill_all(graph: Graph) -> int:
    """Kills the whole cluster as a loss of power does. Returns how many processes it had."""
    everything = {*graph.workers(), *graph.engines(), *victims(graph, "zygote")}
    for pid in everything:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    graph.process.wait()
    until(lambda: not any(map(name_of, everything)), FOUND_S, "all processes have ended")
    return len(everything)


def end(client: OpenAI, batch: str, count: int) -> int:
    """The number of results. Raises AssertionError where a line has none, two, or another's."""

    def ended() -> Any:
        retrieved = patiently(lambda: client.batches.retrieve(batch))
        return retrieved if retrieved and retrieved.status in ENDED else None

    last = until(ended, WITHIN_S, "the batch has ended")
    assert last.status == "completed", last
    text = client.files.content(last.output_file_id).text
    rows = [json.loads(row) for row in text.splitlines()]
    results = Counter((row["custom_id"], row["response"]["body"]["model"]) for row in rows)
    expected = Counter((f"r{n}", MODELS[n % len(MODELS)]) for n in range(count))
    assert results == expected, "a line has no result, or two, or another's"
    assert (last.request_counts.completed, last.request_counts.failed) == (count, 0), last
    return sum(results.values())


def main() -> None:
    """Writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=1_000)
    parser.add_argument("--tokens", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1, help="of the order of the kills")
    parser.add_argument("--in-flight", type=int, default=2)
    said = parser.parse_args()

    def change(config: dict[str, Any]) -> None:
        """Few at once, so that lines are left for each kill."""
        table = config["applications"][0]["deployments"][0]["user_config"]
        table["jobs"] = {"in_flight": said.in_flight}

    order = random.Random(said.seed).sample(KINDS, len(KINDS))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with started(folder, change) as graph:
            batch = begin(client_of(graph), said.lines, said.tokens)
            killed = kill_in_turn(graph, batch, said.lines, order)
            config, (state, before_restart) = graph.config, progress(graph, batch)
            assert state == "in_progress", state
            whole = kill_all(graph)
        with served(folder, config) as graph:
            results = end(client_of(graph), batch, said.lines)
    figures = {
        "lines": said.lines,
        "results": results,
        "killed": killed,
        "order": order,
        "done_when_all_were_killed": before_restart,
        "processes_of_the_whole_cluster": whole,
    }
    print(json.dumps(figures, indent=1))
    report.write("batch_kills", figures, seed=said.seed)


if __name__ == "__main__":
    main()
