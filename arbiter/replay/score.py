"""What a replay cost the requests, and how far that is from what foresight would have cost."""

from dataclasses import dataclass, field, fields

from arbiter.units import Bytes, Instant, Span, in_seconds


@dataclass(frozen=True, slots=True)
class Score:
    """Describes what demand cost under one policy, over the requests that came at or after the
    instant from which the replay counts."""

    requests_count: int
    missed_count: int  # found their model not ready
    refused_count: int
    loads_count: int  # from disk
    wakes_count: int  # from host RAM
    evictions_count: int
    moved_bytes: Bytes  # onto devices, by loads and wakes
    waited: Span  # all requests together
    waited_p99: Span  # of all requests, those that waited nothing included
    loading: Span = Span(0)  # of all loads and wakes together

    @property
    def miss_fraction(self) -> float:
        return self.missed_count / max(1, self.requests_count)

    @property
    def waited_mean_s(self) -> float:
        return in_seconds(self.waited) / max(1, self.requests_count)


@dataclass(slots=True)
class Tally:
    """Counts while a replay runs; what came before `since` does not count."""

    since: Instant
    requests_count: int = 0
    refused_count: int = 0
    loads_count: int = 0
    wakes_count: int = 0
    evictions_count: int = 0
    moved_bytes: int = 0
    loading: Span = Span(0)
    waits: list[int] = field(default_factory=list)  # ns, of those that waited

    def score(self) -> Score:
        waits = sorted(self.waits)
        beyond = len(waits) - self.requests_count // 100  # the p99 request has 1 % behind it
        p99 = waits[beyond - 1] if 0 < beyond <= len(waits) else 0
        return Score(
            self.requests_count,
            len(waits),
            self.refused_count,
            self.loads_count,
            self.wakes_count,
            self.evictions_count,
            Bytes(self.moved_bytes),
            Span(sum(waits)),
            Span(p99),
            self.loading,
        )


@dataclass(frozen=True, slots=True)
class Closed:
    """Says which share of the gap between two policies a third closes, by each measure: 0 is the
    first, 1 the second. None where there is no gap."""

    missed_fraction: float | None
    moved_fraction: float | None
    waited_fraction: float | None


def closed(worse: Score, best: Score, score: Score) -> Closed:
    return Closed(
        _part(worse.missed_count, best.missed_count, score.missed_count),
        _part(worse.moved_bytes, best.moved_bytes, score.moved_bytes),
        _part(worse.waited, best.waited, score.waited),
    )


def _part(worse: int, best: int, value: int) -> float | None:
    return None if worse <= best else (worse - value) / (worse - best)


def as_plain(score: Score) -> dict[str, float]:
    """Returns the score for JSON: counts and bytes as they are, times in seconds."""
    plain: dict[str, float] = {f.name: getattr(score, f.name) for f in fields(score)}
    plain["waited_s"] = in_seconds(Span(int(plain.pop("waited"))))
    plain["loading_s"] = in_seconds(Span(int(plain.pop("loading"))))
    plain["waited_p99_s"] = in_seconds(Span(int(plain.pop("waited_p99"))))
    plain["miss_fraction"] = score.miss_fraction
    return plain


@dataclass(frozen=True, slots=True)
class ReplayedDay:
    """Says what the demand of the last day costs under each policy, by its part: `chosen` is the
    one in force, `lru` the least recently used, `belady` foresight."""

    span: Span  # from the first event that counts to the replay; a day at most
    scores: dict[str, Score]
