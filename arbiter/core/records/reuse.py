"""Learns how likely each model is wanted again soon: nine weights over eight logarithms, by
Bayesian logistic regression on the device's own loads (docs/adr/0040).

The clock counts turnovers: bytes loaded so far by all bytes that can be lent. It has no unit, so
one set of windows serves an hour and a year, and between loads nothing fades. Each load asks of two
models in turn how soon they are wanted; the next use, or 0.8 turnovers of silence, is the answer.
Of each model a dozen numbers are kept, and at most FOLLOWERS_COUNT counts of what came after it; a
use or a load takes the same time however many models there are.

Fifteen public traces of four families chose `WINDOWS`, `SAME_VISIT`, `SOON`, `DOUBT`, the numbers
of looks, leaders and followers and the terms before logarithms, and `BORN` was fitted to them. Half
or double of any one changes by 0.03 at most what the policy closes there of the gap between LRU and
Belady. What it closes on seven other traces is in docs/benchmarks.md. The other constants were set
beforehand.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import exp, isfinite, log
from typing import Any, NamedTuple

from arbiter.core.records.usage_rates import UsageCounts
from arbiter.core.types import ModelName

Turnovers = float  # instants and spans of the clock
Features = tuple[float, float, float, float, float, float, float, float, float]

WINDOWS = (1.0, 10.0, 100.0)  # over which uses, visits and visits are counted
SAME_VISIT = 0.3  # uses closer together count as one visit, by 1 - exp(-gap / SAME_VISIT)
SOON = 0.2  # what is asked of a model: exp(-turnovers to its next use / SOON)
ANSWERED_AFTER = 4 * SOON  # silence that long says no: exp(-4) is 0.02
LOOKS_COUNT = 2  # models asked with each load; four close 0.02 more for twice the work
TRIES_COUNT = 16  # models looked at for these; the others are asked already
RECENT_COUNT, LEADERS_COUNT = 8, 4  # distinct models used last; those that a follower follows
FOLLOWERS_COUNT = 16  # of one model, the most frequent
DRIFT = 1e-5  # added to the variances with each load, so that weights can follow a change
# Weights at first (`benchmarks.replay --fit`), and how far each may be off: standard deviations
# from trace to trace.
BORN = (0.01, 0.00, 0.18, 0.00, 0.31, -0.18, 0.14, 0.19, -1.24)
DOUBT = (0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 1.0)
PLACES = range(len(BORN))
# Added before logarithms: one use in 300 turnovers, a tenth of SOON, a use in 50 hours.
RATE_LEAST, AGE_LEAST, FOLLOWS_LEAST, COUNT_LEAST = 0.003, 0.02, 0.02, 0.02
KNOWN_LEAST = 0.1  # a model used once counts as known for half of SOON
LEADER_DOUBT = 4  # visits of a leader before its followers count in full
ODDS_MOST = 30.0  # exp of more is beyond what a chance can show


class Reuse(NamedTuple):
    """Says how likely a model is wanted within about a fifth of a turnover, and from what."""

    chance: float = 0.0
    features: Features = (0.0,) * 9

    def __str__(self) -> str:
        late, ten, hundred, age, follows, busier, recent, usual, _ = map(exp, self.features)
        return (
            f"wanted soon with {self.chance:.2g}: last used {_above(age, AGE_LEAST)} turnovers ago;"
            f" {_above(late, RATE_LEAST)} uses a turnover of late, {_above(ten, RATE_LEAST)} visits"
            f" over ten, {_above(hundred, RATE_LEAST)} over a hundred;"
            f" {_above(follows, FOLLOWS_LEAST)} by what was used before it;"
            f" {_above(recent, COUNT_LEAST)} uses in the last hours, {_above(usual, COUNT_LEAST)}"
            f" usual in the coming ones, {busier:.2g} times those of others"
        )


@dataclass(slots=True)
class ModelUses:
    """Keeps what the uses of one model have told."""

    first: Turnovers
    last: Turnovers
    sums: tuple[float, float, float] = (0.0, 0.0, 0.0)  # by window, as of `last`
    visits_count: int = 0
    followers: dict[ModelName, int] = field(default_factory=dict)  # used after it, before it again
    asked_at: Turnovers | None = None  # of the question that is open
    asked_features: Features = (0.0,) * 9
    answered_at: Turnovers | None = None  # by a request for it


class ReuseLearner:
    """Keeps the clock, the models and the weights."""

    def __init__(self, born: Features = BORN, doubt: Features = DOUBT) -> None:
        self.clock: Turnovers = 0.0
        self._most = [d**2 for d in doubt]  # variances
        self._models: dict[ModelName, ModelUses] = {}
        self._names: list[ModelName] = []  # as they were first used, to be asked round robin
        self._asked_last = 0  # the place in `_names` of the model that was asked last
        self._recent: list[ModelName] = []  # distinct, the newest first
        self._leaders: list[tuple[dict[ModelName, int], int]] = []  # followers, visits and doubt
        self._weights = list(born)
        self._covariance = [[d * d * (a == b) for b in PLACES] for a, d in enumerate(doubt)]

    # -- what happens --------------------------------------------------------------------------

    def wanted(self, name: ModelName) -> None:
        """Notes that a model is asked for: what often follows it is likelier now. The question
        about it is answered, but learned from only once it is used, because an asker waits now."""
        if uses := self._models.get(name):
            if uses.asked_at is not None and uses.answered_at is None:
                uses.answered_at = self.clock
            self._note_recent(name, uses)

    def ask_others(self, name: ModelName, counts: Callable[[ModelName], UsageCounts]) -> None:
        """Asks of two other models in turn how soon they are wanted, because a model must load. An
        open question is left open until silence has answered it."""
        if not self._names:
            return
        for a, (row, most) in enumerate(zip(self._covariance, self._most, strict=True)):
            if row[a] < most:
                row[a] += DRIFT
        count, first = len(self._names), self._asked_last + 1
        asked_count = 0
        for place in range(first, first + min(TRIES_COUNT, count)):
            other = self._names[place % count]
            uses = self._models[other]
            asked_at = uses.asked_at
            is_open = (
                asked_at is not None
                and uses.answered_at is None
                and self.clock - asked_at < ANSWERED_AFTER
            )
            if is_open or other == name:
                continue
            if asked_at is not None:  # a request for it, or silence that has lasted, answers
                self._learn(uses)
            uses.asked_at, uses.asked_features = (
                self.clock,
                self._features(other, uses, counts(other)),
            )
            asked_count += 1
            if asked_count == LOOKS_COUNT:
                break
        self._asked_last = place % count

    def used(self, name: ModelName, times_count: int) -> None:
        """Counts uses of a model at the present turnover."""
        uses = self._models.get(name)
        once = 1.0
        if uses is None:
            uses = self._models[name] = ModelUses(self.clock, self.clock)
            self._names.append(name)
            self._note_recent(name, uses)
        else:
            once = 1 - exp((uses.last - self.clock) / SAME_VISIT)
            if uses.asked_at is not None:
                self._learn(uses)
        gap = self.clock - uses.last
        short, middle, long = uses.sums
        uses.sums = (
            short * exp(-gap / WINDOWS[0]) + times_count,
            middle * exp(-gap / WINDOWS[1]) + once,
            long * exp(-gap / WINDOWS[2]) + once,
        )
        uses.last = self.clock

    def loaded(self, turnovers: Turnovers) -> None:
        """Moves the clock on: bytes of a load by all bytes that can be lent."""
        self.clock += turnovers

    def forget(self, *names: ModelName) -> None:
        """Forgets models, in one pass over all of them; what was learned from them stays in the
        weights."""
        gone = self._models.keys() & names
        if not gone:
            return
        self._models = {name: uses for name, uses in self._models.items() if name not in gone}
        for uses in self._models.values():
            for name in gone & uses.followers.keys():
                del uses.followers[name]
        self._names = list(self._models)
        if self._asked_last >= len(self._names):
            self._asked_last = 0
        self._recent = [name for name in self._recent if name not in gone]
        self._note_leaders()

    # -- what follows --------------------------------------------------------------------------

    def reuse(self, name: ModelName, counts: UsageCounts) -> Reuse:
        """Returns how likely a model is wanted soon."""
        uses = self._models.get(name) or ModelUses(0.0, 0.0)
        features = self._features(name, uses, counts)
        return Reuse(self._chance(features), features)

    def _chance(self, features: Features) -> float:
        odds = _product(self._weights, features)
        if odds > ODDS_MOST:
            odds = ODDS_MOST
        elif odds < -ODDS_MOST:
            odds = -ODDS_MOST
        return 1 / (1 + exp(-odds))

    def _features(self, name: ModelName, uses: ModelUses, counts: UsageCounts) -> Features:
        age = self.clock - uses.last
        known_for = self.clock - uses.first + KNOWN_LEAST
        short, middle, long = uses.sums
        w1, w10, w100 = WINDOWS
        follows = FOLLOWS_LEAST
        for followers, visits in self._leaders:
            if count := followers.get(name):
                follows += count / visits
        usual = log(counts.usual_count + COUNT_LEAST)
        return (
            log(short * exp(-age / w1) / w1 + RATE_LEAST),
            log(middle * exp(-age / w10) / w10 / (1 - exp(-known_for / w10)) + RATE_LEAST),
            log(long * exp(-age / w100) / w100 / (1 - exp(-known_for / w100)) + RATE_LEAST),
            log(age + AGE_LEAST),
            log(follows),
            usual - log(counts.any_hours_count + COUNT_LEAST),
            log(counts.recent_count + COUNT_LEAST),
            usual,
            1.0,
        )

    # -- learning ------------------------------------------------------------------------------

    def _learn(self, uses: ModelUses) -> None:
        """Closes the question about a model with one step of Bayesian logistic regression (the
        Laplace approximation of Spiegelhalter and Lauritzen 1990)."""
        assert uses.asked_at is not None
        answered_at = self.clock if uses.answered_at is None else uses.answered_at
        answer = exp((uses.asked_at - answered_at) / SOON)
        uses.asked_at = uses.answered_at = None
        features = uses.asked_features
        chance = self._chance(features)
        steep = max(1e-4, chance * (1 - chance))
        spread = [_product(row, features) for row in self._covariance]
        scale = 1 + steep * _product(spread, features)
        missed = answer - chance
        for a, wide in enumerate(spread):
            self._weights[a] += wide / scale * missed
            self._covariance[a] = _less(self._covariance[a], steep / scale * wide, spread)

    def _note_recent(self, name: ModelName, uses: ModelUses) -> None:
        """Counts a model as follower of what was used since its own last use."""
        recent = self._recent
        if recent and recent[0] == name:
            return
        at = recent.index(name) if name in recent else len(recent)
        for before in recent[:at]:
            _count_follower(self._models[before].followers, name)
        uses.visits_count += 1
        del recent[at : at + 1], recent[RECENT_COUNT - 1 :]
        recent.insert(0, name)
        self._note_leaders()

    def _note_leaders(self) -> None:
        leaders = (self._models[name] for name in self._recent[:LEADERS_COUNT])
        self._leaders = [(uses.followers, uses.visits_count + LEADER_DOUBT) for uses in leaders]

    # -- across restarts -----------------------------------------------------------------------

    def __iter__(self) -> Iterator[ModelName]:
        return iter(self._names)

    def export(self, names: Iterable[ModelName] | None = None) -> dict[str, Any]:
        """Returns all of it as plain values, of models those that are named; `restore` reads them
        back."""
        named = self._names if names is None else [name for name in names if name in self._models]
        return {
            "soon": SOON,
            "clock": self.clock,
            "turn": self._asked_last,
            "weights": list(self._weights),
            "covariance": [list(row) for row in self._covariance],
            "recent": [list(name) for name in self._recent],
            "models": [_row(name, self._models[name]) for name in named],
        }

    def restore(self, exported: dict[str, Any]) -> None:
        """Takes back the values of `export`. Those of other code, or that are damaged, are left
        out, and it learns anew: a price of them could not be told. Weights that answer for another
        SOON, or do not say for which, are left out."""
        weights, covariance = exported["weights"], exported["covariance"]
        models = dict(map(_model_of, exported["models"]))
        recent = [ModelName(*name) for name in exported["recent"]]
        count = len(self._weights)
        has_form = [len(row) for row in (weights, *covariance)] == [count] * (count + 1)
        numbers = (exported["clock"], *weights, *(value for row in covariance for value in row))
        if not has_form or not all(map(isfinite, numbers)) or not models.keys() >= {*recent}:
            return
        self.clock, self._asked_last = exported["clock"], exported["turn"]
        if exported.get("soon") == SOON:
            self._weights = list(weights)
            self._covariance = [list(row) for row in covariance]
        self._models, self._names, self._recent = models, list(models), recent
        self._note_leaders()


# A step of learning makes ten products of nine numbers and nine rows: written out, these take two
# thirds and one third of the time that `sum`, `map` and `zip` take.


def _product(row: Sequence[float], other: Sequence[float]) -> float:
    """Returns the sum of nine products, place by place."""
    a, b, c, d, e, f, g, h, i = row
    r, s, t, u, v, w, x, y, z = other
    return a * r + b * s + c * t + d * u + e * v + f * w + g * x + h * y + i * z


def _less(row: Sequence[float], k: float, other: Sequence[float]) -> list[float]:
    """Returns a row less `k` times another."""
    a, b, c, d, e, f, g, h, i = row
    r, s, t, u, v, w, x, y, z = other
    return [
        a - k * r,
        b - k * s,
        c - k * t,
        d - k * u,
        e - k * v,
        f - k * w,
        g - k * x,
        h - k * y,
        i - k * z,
    ]


def _above(value: float, least: float) -> str:
    return f"{max(0.0, value - least):.2g}"


def _count_follower(followers: dict[ModelName, int], name: ModelName) -> None:
    """Counts a follower; of more than FOLLOWERS_COUNT the rarest goes, the oldest of equals."""
    if count := followers.get(name):
        followers[name] = count + 1
        return
    if len(followers) >= FOLLOWERS_COUNT:
        del followers[_rarest(followers)]
    followers[name] = 1


def _rarest(followers: dict[ModelName, int]) -> ModelName:
    """Returns the rarest of some followers, the oldest of equals; by place, because a name hashes
    slowly, and with each use eight models count it."""
    counts = list(followers.values())
    return list(followers)[counts.index(min(counts))]


def _row(name: ModelName, uses: ModelUses) -> list[Any]:
    followers = [[*follower, count] for follower, count in uses.followers.items()]
    question = [uses.asked_at, list(uses.asked_features), uses.answered_at]
    return [*name, uses.first, uses.last, list(uses.sums), uses.visits_count, followers, question]


def _model_of(row: list[Any]) -> tuple[ModelName, ModelUses]:
    capability, model, first, last, sums, visits_count, followers, question = row
    asked_at, features, answered_at = question
    counts = {ModelName(c, m): count for c, m, count in followers}
    uses = ModelUses(
        first, last, tuple(sums), visits_count, counts, asked_at, tuple(features), answered_at
    )
    return ModelName(capability, model), uses
