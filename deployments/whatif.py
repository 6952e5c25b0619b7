"""`arbiter whatif LOG`: a recording replayed, as it was and under other policies."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from arbiter.core.settings import Settings
from arbiter.replay.demand import Demand
from arbiter.replay.recorded import demand_of
from arbiter.replay.score import Score, as_plain
from arbiter.replay.world import World
from arbiter.server.recording import read, replay
from arbiter.units import GIB
from deployments.config.outside_policies import outside
from policies import EVICT, bundle

BEST = "belady"


def whatif(path: Path, policies: list[str]) -> dict[str, Any]:
    """The busiest life in a recording: whether this core still decides as it did, and what each
    policy would have cost, the recorded one and foresight among them. Raises RecordingUnreadable,
    NothingLoaded."""
    life = max(read(path), key=lambda life: len(life.events))
    settings = life.heading.settings
    steps = list(replay(life, bundle(settings, outside(settings))))
    same_count = next((n for n, step in enumerate(steps) if not step.is_same), len(steps))
    demand = demand_of(steps)
    names = dict.fromkeys([settings.evict, *policies, BEST])
    scores = {name: _score(demand, settings, name) for name in names}
    return {
        "recorded_policy": settings.evict,
        "events": len(life.events),
        "decided_as_recorded": same_count,
        "policies": {name: _row(score, scores[BEST]) for name, score in scores.items()},
    }


def _score(demand: Demand, settings: Settings, evict: str) -> Score:
    chosen = replace(settings, evict=evict)
    return World(demand, chosen, bundle(chosen, outside(chosen))).run()


def _row(score: Score, best: Score) -> dict[str, float]:
    """With its regret: what it cost beyond foresight."""
    regret = {
        "regret_loads": score.loads_count - best.loads_count,
        "regret_moved_bytes": score.moved_bytes - best.moved_bytes,
        "regret_waited_s": (score.waited - best.waited) / 1e9,
    }
    return as_plain(score) | regret


def whatif_lines(found: dict[str, Any]) -> Iterator[str]:
    same, events = found["decided_as_recorded"], found["events"]
    yield f"{events} events, recorded under {found['recorded_policy']}; " + (
        "this core decides all of them as it was recorded"
        if same == events
        else f"this core decides differently from event {same} on"
    )
    yield "policy           uses  missed  loads  wakes  moved GiB  waited s   p99 s  regret s"
    for name, row in found["policies"].items():
        yield (
            f"{name:<15} {row['requests_count']:>5}  {row['missed_count']:>6}"
            f"  {row['loads_count']:>5}  {row['wakes_count']:>5}"
            f"  {row['moved_bytes'] / GIB:>9.2f}  {row['waited_s']:>8.2f}"
            f"  {row['waited_p99_s']:>6.2f}  {row['regret_waited_s']:>8.2f}"
        )


def run_whatif(args: argparse.Namespace) -> None:
    found = whatif(Path(args.log), args.policy)
    print(json.dumps(found, indent=2) if args.json else "\n".join(whatif_lines(found)))


def add_whatif(command: argparse.ArgumentParser) -> None:
    command.add_argument("log", help="a file that `arbiter record` wrote")
    command.add_argument(
        "--policy", action="append", choices=sorted(EVICT), default=[], help="may be repeated"
    )
