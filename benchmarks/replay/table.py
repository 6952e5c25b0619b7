"""Runs of one trace, and what they say."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any

from arbiter.core.records import reuse
from arbiter.core.records.reuse import Features, ReuseLearner
from arbiter.core.settings import DEFAULTS, Settings
from arbiter.replay.score import Closed, Score, as_plain, closed
from arbiter.replay.world import World
from arbiter.units import Bytes, Instant
from benchmarks.replay.mixes import Mix, demand
from benchmarks.replay.traces import Arrival
from benchmarks.report import FOLDER
from policies import bundle

WORST, BEST = "priority_lru", "belady"
WARM_FRACTION = 0.1  # of the tuned half: only fills the books
# The whole device is lent and needs are exact, so that a budget is a budget.
SETTINGS = replace(
    DEFAULTS,
    arena_fraction=1.0,
    wiggle_fraction=0.0,
    gpu_margin_bytes=Bytes(0),
    learned_headroom_fraction=0.0,
)
# The learned policy with weights that no trace was used for: none but a model is seldom wanted.
BORN: Features = (0, 0, 0, 0, 0, 0, 0, 0, -2)
DOUBT: Features = (1, 1, 1, 1, 1, 1, 1, 1, 3)
NOTHING = ReuseLearner(BORN, DOUBT)
# What a run of the learned policy begins with, by the name of the run.
BEGINNINGS = {"learned_from_nothing": NOTHING}
# The same with one constant of its shape changed: what `reuse` has while it runs.
SHAPES: dict[str, Mapping[str, float]] = {
    f"soon_{soon:g}": {"SOON": soon, "ANSWERED_AFTER": 4 * soon} for soon in (0.05, 0.1, 0.4)
}
SHAPES |= {f"same_visit_{visit:g}": {"SAME_VISIT": visit} for visit in (0.15, 0.6)}
SHAPES |= {"looks_4": {"LOOKS_COUNT": 4}}
SHAPES |= {f"followers_{count}": {"FOLLOWERS_COUNT": count} for count in (8, 32)}
SHAPES |= {f"leaders_{count}": {"LEADERS_COUNT": count} for count in (2, 8)}
LEASTS = ("RATE_LEAST", "AGE_LEAST", "FOLLOWS_LEAST", "COUNT_LEAST")
SHAPES |= {
    f"leasts_{times:g}": {name: times * getattr(reuse, name) for name in LEASTS}
    for times in (0.5, 2)
}
BEGINNINGS |= dict.fromkeys(SHAPES, NOTHING)
# And with other standard deviations of the weights that it begins with.
for _times in (0.5, 2):
    BEGINNINGS[f"doubt_{_times:g}"] = ReuseLearner(BORN, tuple(_times * d for d in DOUBT))  # type: ignore[arg-type]
# And with start weights as fitted without one family of traces, for reports of that family.
WITHOUT = "learned_without_"


def beginning_of(policy: str) -> tuple[str, dict[str, Any] | None]:
    """The policy of a run, and the usage with which it begins. What is fitted is read when asked
    for: `--fit` writes it."""
    if policy.startswith(WITHOUT):
        by_family = json.loads((FOLDER / "replay_fit.json").read_text())["figures"]["families"]
        del by_family[policy.removeprefix(WITHOUT)]
        weights = (round(mean(column), 2) for column in zip(*by_family.values(), strict=True))
        learner = ReuseLearner(tuple(weights))
    elif policy in BEGINNINGS:
        learner = BEGINNINGS[policy]
    else:
        return policy, None
    return "learned", {"reuse": learner.export()}


@dataclass(frozen=True, slots=True)
class Case:
    trace: str
    mix: Mix
    budget_fraction: float  # of what all models need together


@dataclass(frozen=True, slots=True)
class Row:
    case: Case
    policy: str
    score: Score
    closed: Closed  # of the gap from least recently used to foresight

    def as_dict(self) -> dict[str, object]:
        where = {"trace": self.case.trace, "mix": self.case.mix.name}
        where["budget_fraction"] = str(self.case.budget_fraction)
        return {**where, "policy": self.policy, **as_plain(self.score), **asdict(self.closed)}

    def __str__(self) -> str:
        s, c = self.score, self.closed
        parts = (
            f"{self.case.trace:<15} {self.case.mix.name:<9} {self.case.budget_fraction:<5}",
            f"{self.policy:<15} miss {s.miss_fraction:6.2%}  loads {s.loads_count:>6}",
            f"{s.moved_bytes / 2**40:7.2f} TiB  wait {s.waited_mean_s:6.3f} s",
            f"p99 {s.waited_p99 / 1e9:5.1f} s  closed {_percent(c.missed_fraction)} of misses,",
            f"{_percent(c.moved_fraction)} of bytes, {_percent(c.waited_fraction)} of waiting",
        )
        return "  ".join(parts)


def halves(arrivals: list[Arrival]) -> tuple[list[Arrival], list[Arrival]]:
    """By time: what may be tuned on, and all (of which only the second half is to be counted)."""
    middle = arrivals[-1][0] / 2
    return [a for a in arrivals if a[0] < middle], arrivals


def run(
    case: Case, arrivals: list[Arrival], counted_from_s: float, policies: list[str], seed: int
) -> Iterator[Row]:
    """The worst, the best, then those between."""
    asked = demand(arrivals, case.mix, case.budget_fraction, seed)
    counted = Instant(round(counted_from_s * 1e9))
    between = [name for name in policies if name not in (WORST, BEST)]
    scores: dict[str, Score] = {}
    for policy in (WORST, BEST, *between):
        with _shaped(SHAPES.get(policy, {})):
            evict, usage = beginning_of(policy)
            chosen: Settings = replace(SETTINGS, evict=evict)
            scores[policy] = World(asked, chosen, bundle(chosen), counted, usage).run()
    for policy, score in scores.items():
        yield Row(case, policy, score, closed(scores[WORST], scores[BEST], score))


@contextmanager
def _shaped(constants: Mapping[str, float]) -> Iterator[None]:
    before: dict[str, Any] = {name: getattr(reuse, name) for name in constants}
    for name, value in constants.items():
        setattr(reuse, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(reuse, name, value)


def last_weights(case: Case, arrivals: list[Arrival], seed: int) -> list[float]:
    """What the learned policy has learned on a trace, from nothing."""
    evict, usage = beginning_of("learned_from_nothing")
    chosen = replace(SETTINGS, evict=evict)
    asked = demand(arrivals, case.mix, case.budget_fraction, seed)
    world = World(asked, chosen, bundle(chosen), Instant(0), usage)
    world.run()
    weights: list[float] = world.core.export_usage()["reuse"]["weights"]
    return weights


def mean_closed(rows: list[Row]) -> dict[str, dict[str, float]]:
    """Of each policy over all cases, each case counting the same."""
    means: dict[str, dict[str, float]] = {}
    for policy in dict.fromkeys(row.policy for row in rows):
        parts = [asdict(row.closed) for row in rows if row.policy == policy]
        means[policy] = {name: _mean([p[name] for p in parts]) for name in parts[0]}
    return means


def _mean(values: list[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0


def _percent(fraction: float | None) -> str:
    return "  - " if fraction is None else f"{fraction:4.0%}"
