"""One grant with victims, asked and granted as one figure, in this tree and in an older one (N2).

    git worktree add ../older 67ff8cd
    python -m benchmarks.core_scale_beside ../older [--rounds 12] [--samples 50]

A process of each tree keeps its scenes of `benchmarks.core_scale`, and the two are measured in
turn, so that what else the machine does falls on both: the ratio is of two runs that came one after
the other. Microseconds are of the thread in the `handle` of the request and of the event that says
that the victim's bytes are back; the victim's own word in between is not counted.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import IO, Any

HALVES = ("asked", "granted", "both")
SIZES = (10, 1_000)  # devices, touched in turn


def worker(sizes: list[int]) -> None:
    """Answers each line, devices and samples, with the microseconds of so many swaps."""
    from arbiter.core import events as ev
    from arbiter.core.decisions import Grant, Revoke
    from arbiter.core.types import Priority
    from arbiter.units import NodeId
    from arbiter.units import seconds as span
    from benchmarks.core_scale import QUEUED, RESIDENT, Scene

    def swap(scene: Scene, n: int) -> tuple[float, float]:
        request = scene.request(n, Priority.URGENT, f"m{scene.rng.randrange(scene.models)}")
        asked_us, decisions = scene.timed(request)
        [revoke] = [d for d in decisions if isinstance(d, Revoke)]
        scene.feed(ev.Released(revoke.ticket, "swap"))
        granted_us, decisions = scene.timed(ev.EngineGone(NodeId(f"n{n}"), revoke.ticket, True))
        assert any(isinstance(d, Grant) for d in decisions)
        scene.feed(ev.Loaded(request.ticket, span(1)))
        scene.held[request.holder] = scene._tickets(request.holder)
        scene.feed(scene.beat(request.holder))
        return asked_us, granted_us

    scenes = {devices: Scene(devices, RESIDENT, QUEUED) for devices in sizes}
    touched = dict.fromkeys(sizes, 0)
    print("ready", flush=True)
    for line in sys.stdin:
        devices, samples = map(int, line.split())
        took = []
        for _ in range(samples):
            took.append(swap(scenes[devices], touched[devices] % devices))
            touched[devices] += 1
        print(json.dumps(took), flush=True)


class Tree:
    """One tree's process."""

    def __init__(self, folder: Path, sizes: list[int]) -> None:
        command = [sys.executable, __file__, str(folder), "--worker", "--sizes", *map(str, sizes)]
        environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONHASHSEED": "0"}
        self._process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        assert self._process.stdin and self._process.stdout
        self._to: IO[str] = self._process.stdin
        self._from: IO[str] = self._process.stdout

    def await_ready(self) -> None:
        assert self._from.readline().strip() == "ready"

    def medians(self, devices: int, samples: int) -> dict[str, float]:
        """Median microseconds of each half and of both as one."""
        print(devices, samples, file=self._to, flush=True)
        took = json.loads(self._from.readline())
        rows = {"asked": [a for a, _ in took], "granted": [g for _, g in took]}
        rows["both"] = [a + g for a, g in took]
        return {name: median(values) for name, values in rows.items()}

    def close(self) -> None:
        self._to.close()
        self._process.wait()


def summary(old: list[dict[str, float]], new: list[dict[str, float]]) -> dict[str, Any]:
    """Of all rounds: the median and the least of each tree, and the ratio pair by pair."""
    rows: dict[str, Any] = {}
    for name in HALVES:
        ratios = sorted(n[name] / o[name] for o, n in zip(old, new, strict=True))
        rows[name] = {
            "old_p50_us": round(median(o[name] for o in old), 1),
            "new_p50_us": round(median(n[name] for n in new), 1),
            "old_least_us": round(min(o[name] for o in old), 1),
            "new_least_us": round(min(n[name] for n in new), 1),
            "ratio": round(median(ratios), 3),
            "ratio_range": [round(ratios[0], 3), round(ratios[-1], 3)],
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("older", type=Path, help="a tree of the older commit")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.sizes)
        return
    from benchmarks import report

    older = args.older.absolute()
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=older, text=True)
    trees = [Tree(older, args.sizes), Tree(Path(__file__).parents[1], args.sizes)]
    for tree in trees:
        tree.await_ready()
    figures: dict[str, Any] = {"older": commit.strip(), "load_before": os.getloadavg()}
    for devices in args.sizes:
        rounds: list[list[dict[str, float]]] = [[], []]
        for count in range(args.rounds):
            for which in (0, 1) if count % 2 else (1, 0):
                rounds[which].append(trees[which].medians(devices, args.samples))
        figures[f"{devices} devices touched in turn"] = summary(*rounds)
        print(devices, json.dumps(summary(*rounds)), flush=True)
    for tree in trees:
        tree.close()
    figures["load_after"] = os.getloadavg()
    report.write("core_scale_beside", figures, seed=7)


if __name__ == "__main__":
    main()
