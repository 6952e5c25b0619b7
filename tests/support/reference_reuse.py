"""The learner of docs/adr/0040 written a second time, as plainly as it can be: every formula stands
where it is used, nothing is kept that can be computed, and nothing is bounded."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp, log

from arbiter.core.records.reuse import BORN, DOUBT
from arbiter.core.records.usage_rates import UsageCounts
from arbiter.core.types import ModelName

WINDOWS = (1.0, 10.0, 100.0)
Counts = Callable[[ModelName], UsageCounts]


@dataclass
class Model:
    first: float
    last: float
    sums: list[float] = field(default_factory=lambda: [0.0] * 3)
    visits: int = 0
    then: dict[ModelName, int] = field(default_factory=dict)
    seen: tuple[float, list[float]] | None = None
    answered: float | None = None


def dot(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


class Reference:
    def __init__(self) -> None:
        self.clock = 0.0
        self.models: dict[ModelName, Model] = {}
        self.turn = 0
        self.late: list[ModelName] = []
        self.weights = list(BORN)
        size = range(len(BORN))
        self.covariance = [[DOUBT[a] ** 2 if a == b else 0.0 for b in size] for a in size]

    def features(self, name: ModelName, counts: UsageCounts) -> list[float]:
        model = self.models[name]
        age, known = self.clock - model.last, self.clock - model.first + 0.1
        rates = [s * exp(-age / w) / w for s, w in zip(model.sums, WINDOWS, strict=True)]
        ahead = [self.models[other] for other in self.late[:4]]
        after = sum(m.then.get(name, 0) / (m.visits + 4) for m in ahead)
        return [
            log(rates[0] + 0.003),
            log(rates[1] / (1 - exp(-known / 10)) + 0.003),
            log(rates[2] / (1 - exp(-known / 100)) + 0.003),
            log(age + 0.02),
            log(after + 0.02),
            log((counts.usual_count + 0.02) / (counts.any_hours_count + 0.02)),
            log(counts.recent_count + 0.02),
            log(counts.usual_count + 0.02),
            1.0,
        ]

    def chance(self, features: list[float]) -> float:
        return 1 / (1 + exp(-min(30, max(-30, dot(self.weights, features)))))

    def learn(self, model: Model) -> None:
        assert model.seen
        (asked, features), model.seen = model.seen, None
        ended, model.answered = model.answered, None
        chance = self.chance(features)
        answer = exp(-((self.clock if ended is None else ended) - asked) / 0.2)
        steep = max(1e-4, chance * (1 - chance))
        spread = [dot(row, features) for row in self.covariance]
        scale = 1 + steep * dot(spread, features)
        for a, row in enumerate(self.covariance):
            self.weights[a] += spread[a] / scale * (answer - chance)
            self.covariance[a] = [
                value - steep / scale * spread[a] * spread[b] for b, value in enumerate(row)
            ]

    def wanted(self, name: ModelName) -> None:
        if name in self.models:
            model = self.models[name]
            if model.seen and model.answered is None:
                model.answered = self.clock
            self.note_late(name)

    def ask_others(self, name: ModelName, counts: Counts) -> None:
        if not (names := list(self.models)):
            return
        for a, row in enumerate(self.covariance):
            row[a] += 1e-5 if row[a] < DOUBT[a] ** 2 else 0.0
        looks = 0
        for _ in names:
            if looks == 2:
                break
            self.turn = (self.turn + 1) % len(names)
            looks += self.look(names[self.turn], name, counts)

    def look(self, other: ModelName, loading: ModelName, counts: Counts) -> bool:
        model = self.models[other]
        is_open = model.seen and model.answered is None
        if other == loading or (is_open and model.seen and self.clock - model.seen[0] < 0.8):
            return False
        if model.seen:
            self.learn(model)
        model.seen = self.clock, self.features(other, counts(other))
        return True

    def used(self, name: ModelName, times: int) -> None:
        once = 1.0
        if name in self.models:
            once = 1 - exp(-(self.clock - self.models[name].last) / 0.3)
            if self.models[name].seen:
                self.learn(self.models[name])
        else:
            self.models[name] = Model(self.clock, self.clock)
            self.note_late(name)
        model = self.models[name]
        gap = self.clock - model.last
        for n, (window, more) in enumerate(zip(WINDOWS, (times, once, once), strict=True)):
            model.sums[n] = model.sums[n] * exp(-gap / window) + more
        model.last = self.clock

    def note_late(self, name: ModelName) -> None:
        at = self.late.index(name) if name in self.late else len(self.late)
        for other in self.late[:at]:
            then = self.models[other].then
            then[name] = then.get(name, 0) + 1
        self.models[name].visits += at > 0 or not self.late
        self.late = [name, *(other for other in self.late if other != name)][:8]
