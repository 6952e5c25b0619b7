"""Twenty jobs each for two models that do not fit together, interleaved (C13): swaps and waits.

    python -m benchmarks.collation [--seeds 20]

The real core in virtual time, against a server that keeps one model, the last used, and answers in
the order of arrival: least recently used by count, as llama-swap and most model managers do it. The
order of the jobs, and their times within each gap, are drawn from the seed.
"""

import argparse
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Queued
from arbiter.core.settings import Settings
from arbiter.replay.demand import Demand, PackedRequests, Seat, Use
from arbiter.replay.world import World
from arbiter.units import GIB, Bytes, DeviceId, Instant, NodeId, Span, in_seconds, seconds
from benchmarks import report
from benchmarks.replay.table import SETTINGS
from policies import bundle

MODELS = ("image", "chat")
BUSY_S = (3.0, 1.0)  # one job
LOAD_S, UNLOAD_S = 4.0, 0.5
JOBS = 20  # of each model
BEGIN_S = 100.0  # before then each model is loaded once, so that its seconds are known
LEARNT = (Use(Instant(0), 0, seconds(1)), Use(Instant(seconds(30)), 1, seconds(1)))
GAPS_S = (0.0, 0.25, 0.5, 1.0, 2.0)  # between two jobs, on average
NODE = NodeId("n")


@dataclass(frozen=True, slots=True)
class Cost:
    """What one run cost."""

    swaps_count: int  # a model left, and another one was loaded
    longest_wait_s: float
    stated_s: float  # the longest wait that was stated when a job began to wait


class StatedWorld(World):
    """Notes which waits the core states."""

    stated_s = 0.0

    def _feed(self, event: ev.Event) -> None:
        for decision in self.core.handle(event, self.now):
            if isinstance(decision, Queued) and self.now >= seconds(BEGIN_S):
                self.stated_s = max(self.stated_s, in_seconds(decision.predicted))
            self._perform(decision)


def jobs(gap_s: float, seed: int) -> list[Use]:
    """Both models' jobs in a drawn order."""
    rng = random.Random(seed)
    order = [position for position in (0, 1) for _ in range(JOBS)]
    rng.shuffle(order)
    at_s = [gap_s * (n + rng.random()) for n in range(len(order))]
    return [
        Use(Instant(seconds(BEGIN_S + t)), position, seconds(BUSY_S[position]))
        for t, position in zip(at_s, order, strict=True)
    ]


def demand(uses: Iterable[Use]) -> Demand:
    """Two models of 6 GiB on a device that lends 10."""
    need = types.Need(Bytes(6 * GIB))
    seats = tuple(
        Seat(name, name, NODE, need, seconds(LOAD_S), unload=seconds(UNLOAD_S)) for name in MODELS
    )
    device = types.DeviceSpec(DeviceId("n/gpu:0"), types.DeviceKind.GPU, Bytes(10 * GIB))
    specs = tuple(
        types.CapabilitySpec(name, "text", "e", (types.ModelSpec(name, seconds(-1)),), seconds(300))
        for name in MODELS
    )
    table = ev.CapabilitiesSet(specs)
    return Demand((ev.NodeSeen(NODE, (device,)),), table, seats, PackedRequests(uses))


def collated(uses: Sequence[Use], settings: Settings = SETTINGS) -> Cost:
    """By the core. Of fewer than a hundred jobs the p99 is the longest."""
    begin = Instant(seconds(BEGIN_S))
    world = StatedWorld(demand([*LEARNT, *uses]), settings, bundle(settings), begin)
    score = world.run()
    assert score.refused_count == 0
    return Cost(score.loads_count, in_seconds(score.waited_p99), world.stated_s)


def by_count(uses: Sequence[Use]) -> Cost:
    """One model at a time, in the order of arrival; jobs of one model run side by side."""
    loaded, ready, busy_until = 1, Instant(0), Instant(0)
    loads_count, longest = 0, Span(0)
    for use in sorted(uses, key=lambda use: use.at):
        if use.position != loaded:
            loads_count += 1
            gone = max(use.at, busy_until, ready) + seconds(UNLOAD_S)
            loaded, ready = use.position, Instant(gone + seconds(LOAD_S))
        begins = max(use.at, ready)
        longest = max(longest, Span(begins - use.at))
        busy_until = max(busy_until, Instant(begins + use.busy))
    return Cost(loads_count, in_seconds(longest), 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    seeds = range(parser.parse_args().seeds)
    before = replace(SETTINGS, collate_most=Span(0))
    ways = {
        "collated": collated,
        "not collated": lambda u: collated(u, before),
        "by count": by_count,
    }
    figures: dict[str, object] = {}
    for gap_s in GAPS_S:
        for name, way in ways.items():
            costs = [way(jobs(gap_s, seed)) for seed in seeds]
            figures[f"{name}, a job each {gap_s} s"] = row = {
                "swaps_most": max(c.swaps_count for c in costs),
                "longest_wait_s": round(max(c.longest_wait_s for c in costs), 1),
                "stated_s": round(max(c.stated_s for c in costs), 1),
            }
            print(f"a job each {gap_s} s, {name}: {row}", flush=True)
    report.write("collation", figures, seed=0)


if __name__ == "__main__":
    main()
