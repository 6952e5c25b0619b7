"""How long an answer of one model takes here: wait, load and run, each as measured. Pure.

    wait   until its load may begin: the arbiter's dry run, with what stands before it
    load   as its newest loads or wakes took, else as loads of as many bytes took
    run    the middle of its newest requests, without their wait

The arbiter's state says the first two of models that are there or on their way, its dry run of all
others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

RESIDENT, REMOTE, UNKNOWN = "resident", "remote", "unknown"
# A replica that must start first, in a spare worker of Ray that is at hand (docs/benchmarks.md).
REPLICA_S = 1.5


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is known of one model's answer. None: nothing was measured that would tell."""

    state: str  # of its ticket; `cold` without one, `remote`, `unknown` while no arbiter answers
    wait_s: float | None
    load_s: float | None
    run_s: float | None

    @property
    def begins_s(self) -> float | None:
        """Seconds until the model works on the request."""
        return None if self.wait_s is None or self.load_s is None else self.wait_s + self.load_s

    @property
    def total_s(self) -> float | None:
        """Seconds until the answer is complete; without a run that was seen, until it begins."""
        return None if self.begins_s is None else self.begins_s + (self.run_s or 0.0)


NOTHING = Prediction(UNKNOWN, None, None, None)


def of_presence(state: str, serves_in_s: float | None, run_s: float | None) -> Prediction:
    """Predicts for a model with a ticket that serves, loads or is queued. `serves_in_s`: until it
    serves, by the arbiter's state."""
    return Prediction(state, 0.0 if serves_in_s is not None else None, serves_in_s, run_s)


def of_plan(
    state: str, plan: Mapping[str, Any], load_s: float | None, run_s: float | None
) -> Prediction:
    """Predicts for a model that a request would load or wake. `plan`: the arbiter's dry run of it,
    as JSON, in which a load of 0 says nothing. `load_s`: as loads took so far."""
    if plan["is_resident"]:
        return Prediction(RESIDENT, 0.0, 0.0, run_s)
    starts_s = REPLICA_S if plan["starts_replica"] else 0.0
    wait_s = None if plan["wait_s"] is None else plan["wait_s"] + starts_s
    return Prediction(state, wait_s, plan["load_s"] or load_s, run_s)


def never(plan: Mapping[str, Any]) -> str | None:
    """Why the model cannot be loaded at all; None: it can, now or later."""
    return " ".join(plan["sentences"]) if plan["answer"] == "never" else None
