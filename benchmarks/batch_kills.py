"""A batch over three models while every kind of process is killed in turn (J4).

    python -m benchmarks.batch_kills --lines 1000

Kills the process of jobs, the front, Serve's controller, the arbiter, a replica, the engines, the
node agent and the zygote, one after another, each when so many more lines are done; then it ends
the whole cluster and starts it again on the same state file. Each line must have one result, and
none two. The figures are in the last lines.
"""

import argparse
import json
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openai import APIError, OpenAI

from benchmarks.graph_chaos import DOOR
from tests.graph.conftest import Graph, command_of, served, started, until
from tests.support.graph_processes import VICTIMS, victims

MODELS = ("tiny-chat", "plain-chat", "small-chat")
JOBS = "ray::ServeReplica:jobs:jobs"
ORDER = (*("jobs", "front", "arbiter", "engine", "controller", "replica", "node agent", "zygote"),)
WITHIN_S = 540.0  # of all
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
    parts = {"jobs": JOBS, "front": DOOR["front"]}
    if kind in parts:
        return [pid for pid in graph.workers() if parts[kind] in command_of(pid)]
    assert kind in VICTIMS
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


def done(client: OpenAI, batch: str) -> int:
    found = patiently(lambda: client.batches.retrieve(batch))
    return found.request_counts.completed if found else 0


def kill_in_turn(graph: Graph, batch: str, count: int) -> Counter[str]:
    """How many of each kind were killed."""
    client, killed = client_of(graph), Counter[str]()
    began_s = time.monotonic()
    for number, kind in enumerate(ORDER, 1):
        least = number * count // (len(ORDER) + 2)
        until(lambda: done(client, batch) >= least, WITHIN_S, f"{least} lines are done")  # noqa: B023
        for pid in find(graph, kind):
            os.kill(pid, signal.SIGKILL)
            killed[kind] += 1
        print(f"{time.monotonic() - began_s:6.1f} s: killed {kind} at {least} lines", flush=True)
    least = (len(ORDER) + 1) * count // (len(ORDER) + 2)
    until(lambda: done(client, batch) >= least, WITHIN_S, f"{least} lines are done")
    return killed


def end(client: OpenAI, batch: str, count: int) -> int:
    """The number of results. Raises AssertionError where a line has none or two."""

    def ended() -> Any:
        found = patiently(lambda: client.batches.retrieve(batch))
        return found if found and found.status in ENDED else None

    last = until(ended, WITHIN_S, "the batch has ended")
    assert last.status == "completed", last
    text = client.files.content(last.output_file_id).text
    results = Counter(json.loads(row)["custom_id"] for row in text.splitlines())
    assert results == Counter(f"r{n}" for n in range(count)), "a line has no result, or two"
    return sum(results.values())


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=1_000)
    parser.add_argument("--tokens", type=int, default=8)
    said = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, began_s = Path(name), time.monotonic()
        with started(folder) as graph:
            batch = begin(client_of(graph), said.lines, said.tokens)
            killed = kill_in_turn(graph, batch, said.lines)
            config = graph.config
        with served(folder, config) as graph:
            results = end(client_of(graph), batch, said.lines)
    took_s = time.monotonic() - began_s
    figures = {"lines": said.lines, "results": results, "killed": killed, "took_s": took_s}
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
