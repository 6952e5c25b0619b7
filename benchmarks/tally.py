"""What random kills led to: shared by the chaos of the protocol and that of the whole graph."""

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

SLOWEST_COUNT = 5  # answers kept, with what is known of each


def end(pids: Iterable[int]) -> int:
    """How many of them lived, and were killed."""
    killed_count = 0
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed_count += 1
    return killed_count


@dataclass
class Tally:
    answers: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    untyped: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # bytes lost or doubled
    processes: int = 0
    looks: int = 0
    looks_at_rest: int = 0  # of these, only without load
    unanswered_looks: int = 0  # of these, no answer came: neither right nor wrong
    slowest: list[tuple[float, str, str, str]] = field(default_factory=list)

    def answered(self, model: str, outcome: str, took_s: float, about: str = "") -> None:
        """Untyped ones end with what was said, which is not counted apart."""
        self.answers[outcome.partition(":")[0]] += 1
        row = round(took_s, 1), model, outcome, about
        self.slowest = sorted([*self.slowest, row], reverse=True)[:SLOWEST_COUNT]

    @property
    def kills_count(self) -> int:
        return self.kills.total()

    def figures(self, took_s: float) -> dict[str, object]:
        return {
            "kills": dict(self.kills),
            "processes_killed": self.processes,
            "answers": dict(self.answers),
            "slowest": self.slowest,
            "comparisons": self.looks,
            "comparisons_at_rest": self.looks_at_rest,
            "comparisons_unanswered": self.unanswered_looks,
            "lost_or_doubled": self.wrong,
            "untyped": self.untyped,
            "took_s": round(took_s, 1),
        }

    def verdict(self) -> int:
        """Says it all; the exit status."""
        for wrong in (*self.wrong, *self.untyped):
            print(wrong[:300])
        print(f"kills {self.kills_count}: {dict(self.kills)}; processes killed {self.processes}")
        print(f"answers {self.answers.total()}: {dict(self.answers)}")
        for took_s, model, outcome, about in self.slowest:
            print(f"slowest answers: {took_s:.1f} s, {model}, {outcome}; {about}")
        print(f"unanswered or untyped: {len(self.untyped)}")
        print(
            f"books compared with measurement: {self.looks} times, of which at rest"
            f" {self.looks_at_rest}, unanswered {self.unanswered_looks}"
        )
        print(f"bytes lost or doubled: {len(self.wrong)}")
        return 1 if self.wrong or self.untyped else 0
