"""Minutes of mixed load in a budget too small for it, with random kills: does anything leak?

    python -m benchmarks.soak --minutes 6

The whole graph as shipped, its eight capabilities asked by two clients each, chat with and without
adapters, a kill each few seconds. Before and after, with every model gone, the private dirty bytes
and open descriptors of each long-lived process are read from the kernel, and the tickets from the
arbiter. The figures are in the last lines.
"""

import argparse
import asyncio
import contextlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from arbiter.node.procfs import rollup
from arbiter.units import MIB
from benchmarks import report
from benchmarks.graph_chaos import ask, calls_of, find, with_whole_front
from deployments.config import load_plan
from tests.graph.conftest import Graph, command_of, started
from tests.support.graph_processes import victims

# Never killed here, so that what they hold before and after can be compared.
KEPT = {
    "front": "ray::ServeReplica:front:front",
    "proxy": "ray::ProxyActor",
    "controller": "ray::ServeController",
    "arbiter": "ray::ArbiterActor",
    "node agent": "ray::NodeAgent",
}
TARGETS = ("engine", "engine", "replica", "embedding replica")
KILL_EVERY_S = 10.0  # most loads end between two, and every kind is hit some ten times
EMPTY_S = 120.0  # keep-warm, asleep models and scale-down together are well below
# Of a process that served thousands of requests: allocators keep pages of their busiest moment.
GROWTH_BYTES, GROWTH_DESCRIPTORS = 64 * MIB, 16
WARM_UP_S = 30.0  # imports, pools and caches come with the first requests
ADAPTED = "tiny-chat"  # some of its clients name one of its adapters, another each time


@dataclass(frozen=True, slots=True)
class Books:
    """What the arbiter knows of, and the engines the kernel does."""

    tickets: int
    waiting: int
    charged_bytes: int
    engines: int

    def __str__(self) -> str:
        charged = f"{self.charged_bytes / MIB:.0f} MiB charged"
        return f"{self.tickets} tickets, {self.waiting} waiting, {charged}, {self.engines} engines"


def books(graph: Graph) -> Books:
    state: dict[str, Any] = graph.state()
    charged = sum(d["charged_bytes"] for d in state["devices"])
    return Books(len(state["tickets"]), len(state["queue"]), charged, len(graph.engines()))


@dataclass(frozen=True, slots=True)
class Held:
    """What one process holds while nothing is asked of it. Pages of files that it has only mapped
    are left out: whose they are depends on who else maps them."""

    private_bytes: int
    descriptors: int


def held(graph: Graph) -> dict[str, Held]:
    figures = {}
    for name, mark in KEPT.items():
        pids = [p for p in graph.workers() if mark in command_of(p)]
        for pid in pids[:1]:
            figures[name] = _held(pid)
    for pid in victims(graph, "zygote")[:1]:
        figures["zygote"] = _held(pid)
    return figures


def _held(pid: int) -> Held:
    return Held(rollup(pid)["Private_Dirty"], len(os.listdir(f"/proc/{pid}/fd")))


class Soak:
    def __init__(self, graph: Graph, seed: int) -> None:
        self.graph, self.dice = graph, random.Random(seed)
        self.calls = calls_of(graph)
        self.adapters = sorted(f"{ADAPTED}:{path.name}" for path in adapter_folder(graph).iterdir())
        self.answers: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self.untyped: list[str] = []
        self.kills: Counter[str] = Counter()

    async def run(self, minutes: float) -> list[str]:
        """What leaked, in words; empty when nothing did."""
        await self._load(WARM_UP_S, kills=False)
        await self._empty()
        self.before, self.books_before = held(self.graph), books(self.graph)
        self.answers.clear()
        self.asked.clear()
        await self._load(minutes * 60, kills=True)
        left = await self._empty()
        self.after, self.books_after = held(self.graph), books(self.graph)
        return left + self._grown()

    async def _load(self, for_s: float, kills: bool) -> None:
        end_s = time.monotonic() + for_s
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http:
            work = [self._client(http, [model], end_s) for model in self.calls for _ in "ab"]
            work += [self._client(http, self.adapters, end_s) for _ in "ab"]
            if kills:
                work.append(self._killer(end_s))
            await asyncio.gather(*work)

    async def _client(self, http: aiohttp.ClientSession, models: list[str], end_s: float) -> None:
        while time.monotonic() < end_s:
            model = self.dice.choice(models)
            call = self.calls[model.partition(":")[0]]
            outcome, _, more = (await ask(http, self.graph, model, call)).partition(":")
            self.answers[outcome] += 1
            self.asked[model] += 1
            if more:
                self.untyped.append(f"{model}:{more}")
            await asyncio.sleep(self.dice.random() * 0.3)

    async def _killer(self, end_s: float) -> None:
        while time.monotonic() < end_s:
            await asyncio.sleep(self.dice.random() * 2 * KILL_EVERY_S)
            target = self.dice.choice(TARGETS)
            for pid in await asyncio.to_thread(find, self.graph, target):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
                    self.kills[target] += 1

    async def _empty(self) -> list[str]:
        """Waits until every model has gone by itself. What stays, in words."""
        end_s = time.monotonic() + EMPTY_S
        while left := await asyncio.to_thread(self._left):
            if time.monotonic() > end_s:
                return left
            await asyncio.sleep(0.5)
        return []

    def _left(self) -> list[str]:
        state: dict[str, Any] = self.graph.state()
        left = [f"ticket {t['ticket']} is {t['state']}" for t in state["tickets"]]
        left += [f"{q['ticket']} waits" for q in state["queue"]]
        left += [f"engine {pid} lives" for pid in self.graph.engines()]
        charged = sum(d["charged_bytes"] for d in state["devices"])
        return left + ([f"{charged} bytes are charged to no ticket"] if charged else [])

    def _grown(self) -> list[str]:
        grown = []
        for name, before in self.before.items():
            after = self.after.get(name)
            if after is None:
                grown.append(f"{name} is gone")
            elif after.private_bytes - before.private_bytes > GROWTH_BYTES:
                grown.append(f"{name} grew by {after.private_bytes - before.private_bytes} bytes")
            elif after.descriptors - before.descriptors > GROWTH_DESCRIPTORS:
                grown.append(f"{name} has {after.descriptors - before.descriptors} more files open")
        return grown


def adapter_folder(graph: Graph) -> Path:
    return Path(graph.table["capabilities"]["chat"]["models"][ADAPTED]["adapters"]["folder"])


def short_lived(graph_config: dict[str, Any]) -> None:
    """Every model leaves soon, asleep ones too, so that the end can be seen; adapters are there."""
    with_whole_front(graph_config)
    table = graph_config["applications"][0]["deployments"][0]["user_config"]
    for capability in table["capabilities"].values():
        for model in capability["models"].values():
            model["keep_warm_s"] = 6
    folder = table["capabilities"]["chat"]["models"][ADAPTED]["adapters"]["folder"]
    shutil.copytree(load_plan.models_folder() / f"{ADAPTED}-adapters", folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        with started(Path(folder), short_lived) as graph:
            soak = Soak(graph, args.seed)
            leaks = asyncio.run(soak.run(args.minutes))
            tell(soak, args.minutes, args.seed, leaks)  # the end of the graph may fail
    return 1 if leaks else 0


def tell(soak: Soak, minutes: float, seed: int, leaks: list[str]) -> None:
    """The figures, as JSON and in the last lines."""
    rows = {
        name: [(h.private_bytes / MIB, h.descriptors) for h in (soak.before[name], after)]
        for name, after in soak.after.items()
        if name in soak.before
    }
    figures = {
        "minutes": minutes,
        "asked": dict(soak.asked),
        "answers": dict(soak.answers),
        "untyped": soak.untyped,
        "kills": dict(soak.kills),
        "books_before_and_after": [asdict(soak.books_before), asdict(soak.books_after)],
        "mib_and_descriptors_before_and_after": rows,
        "leaks": leaks,
    }
    report.write("soak", figures, seed=seed)
    for name, ((mib, fds), (mib_after, fds_after)) in rows.items():
        print(
            f"{name:<12} {mib:6.0f} -> {mib_after:6.0f} MiB  {fds:4} -> {fds_after:4} descriptors"
        )
    print(f"before: {soak.books_before}; after: {soak.books_after}")
    print(f"answers {sum(soak.answers.values())}: {dict(soak.answers)}")
    print(f"answers without a type: {soak.untyped or 'none'}")
    print(f"processes killed {sum(soak.kills.values())}: {dict(soak.kills)}")
    print(f"leaks: {leaks or 'none'}")


if __name__ == "__main__":
    sys.exit(main())
