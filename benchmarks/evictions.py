"""Evictions between engine kinds: bytes charged, bytes seen free, and the seconds until then.

    python -m benchmarks.evictions --rounds 3

The shipped graph with its eight capabilities as one exclusion group, so that each request has the
engine of the one before leave, whatever the sizes. The arbiter's events say what it charged the
victim and when the bytes were back; what was free is asked of the kernel, each few milliseconds, on
a machine where nothing else runs.
"""

import argparse
import json
import threading
import urllib.request
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from arbiter.units import KIB, MIB
from benchmarks import report, servers
from benchmarks.calls import Call, answer, calls, models_of, spoken
from benchmarks.first_token import shipped, state, table_of, until

# Neighbours run on different libraries.
RING = ("chat", "embedding", "vision", "asr", "image", "rerank", "tts", "vad")
STAYS_S = 600
GROUP = "one-at-a-time"
LOOK_EVERY_S = 0.003


def exclusive(config: dict[str, Any]) -> None:
    """One model awake on the node."""
    table = table_of(config)
    role = {"rank": 50, "act": "the next request waits for a load", "keep_warm_s": STAYS_S}
    table["arbiter"] |= {"roles": {GROUP: role}, "one_resident_roles": [GROUP]}
    for capability in table["capabilities"].values():
        capability["role"] = GROUP


def laps(ring: tuple[str, ...], rounds: int) -> list[tuple[str, str]]:
    """Victim and asker of each eviction, so many times around."""
    return list(pairwise([*(ring * rounds), ring[0]]))


def available_bytes() -> int:
    """What the machine could give to new processes (proc(5), MemAvailable)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * KIB
    raise RuntimeError("/proc/meminfo has no MemAvailable")


class Rise:
    """The most by which free bytes rose above what they had fallen to before: the victim may still
    grow until it leaves, and what comes after it takes its bytes."""

    def __init__(self) -> None:
        self.bytes = 0
        self._least = available_bytes()
        self._stop = threading.Event()
        self._watch = threading.Thread(target=self._run)

    def __enter__(self) -> "Rise":
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._watch.join()

    def see(self, free_bytes: int) -> None:
        self._least = min(self._least, free_bytes)
        self.bytes = max(self.bytes, free_bytes - self._least)

    def _run(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            self.see(available_bytes())


def departure(events: Sequence[dict[str, Any]], model: str) -> dict[str, Any]:
    """Of the newest eviction of a model: bytes charged when it was asked to leave, where it went,
    and seconds until its bytes were seen back. Raises RuntimeError when it did not leave."""
    asked = [e for e in events if e["kind"] == "eviction" and e["model"] == model]
    if asked:
        for event in events:
            is_answer = event["kind"] == "model_unload" and event["ticket"] == asked[-1]["ticket"]
            if is_answer and event["seq"] > asked[-1]["seq"]:
                return {
                    "charged_mib": asked[-1]["size_bytes"] / MIB,
                    "seconds": event["unix_s"] - asked[-1]["unix_s"],
                    "to": event["to"],
                }
    raise RuntimeError(f"{model} was not evicted")


class Ring:
    def __init__(self, url: str, table: dict[str, Any]) -> None:
        self.url, self.models = url, models_of(table)
        self.calls: dict[str, Call] = calls(spoken(url, self.models["tts"]))

    def ask(self, capability: str) -> None:
        answer(self.url, self.calls[capability], self.models[capability])

    def evict(self, victim: str, asker: str) -> dict[str, Any]:
        """`victim` was asked last."""
        model = self.models[victim]
        until(lambda: self._is_idle(model), 60, f"{model} is idle")
        [ticket] = [t for t in self._tickets(model) if t["state"] == "resident"]
        with Rise() as free:
            self.ask(asker)
        row = departure(self._events(), model)
        row["measured_mib"] = sum(ticket["measured_bytes"].values()) / MIB
        row["seen_free_mib"] = free.bytes / MIB
        print(f"{victim} -> {asker}: {row}", flush=True)
        return row

    def _tickets(self, model: str) -> list[dict[str, Any]]:
        return [t for t in state(self.url)["tickets"] if t["model"] == model]

    def _is_idle(self, model: str) -> bool:
        """And has been measured."""
        return any(
            t["state"] == "resident" and not t["inflight"] and t["measured_bytes"]
            for t in self._tickets(model)
        )

    def _events(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{self.url}/arbiter/events/recent", timeout=30) as said:
            events: list[dict[str, Any]] = json.load(said)["events"]
            return events


def figures_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of all evictions of one victim by one asker."""
    names = ("charged_mib", "measured_mib", "seen_free_mib", "seconds")
    samples = {name: report.Sample(tuple(row[name] for row in rows)) for name in names}
    return {"to": sorted({row["to"] for row in rows}), **samples}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    config = shipped(STAYS_S, STAYS_S)
    exclusive(config)
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with servers.our_graph(config, "default") as url:
        ring = Ring(url, table_of(config))
        for capability in (*RING, RING[0]):  # waits for imports and replicas, which is no eviction
            ring.ask(capability)
        for pair in laps(RING, args.rounds):
            rows.setdefault(pair, []).append(ring.evict(*pair))
    figures = {f"{victim} -> {asker}": figures_of(runs) for (victim, asker), runs in rows.items()}
    for pair_name, pair_figures in figures.items():
        told = ", ".join(f"{name} {value}" for name, value in pair_figures.items())
        print(f"{pair_name}: {told}")
    report.write("evictions", figures)


if __name__ == "__main__":
    main()
