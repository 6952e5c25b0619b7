"""In which order the rungs of a task are asked, with a reason for each place. Pure.

    score = position x step_s + seconds until it works on the request      the least goes first

A rung whose answer would exceed the budget goes behind those that keep it. A remote goes behind all
models here, unless the soonest of them exceeds the budget. The primary goes first where it is
pinned, and where it is a remote: the operator put it there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deployments.config.task_section import TaskConfig
from deployments.tasks.predict import RESIDENT, Prediction

# The seconds of a rung of which nothing is known. They are more than most loads take (0.5 to 26 s
# in docs/benchmarks.md), so that a model which serves goes first, and less than a client waits.
UNKNOWN_S = 60.0


@dataclass(frozen=True, slots=True)
class RungState:
    """One rung as it is now."""

    position: int  # in the ladder, from 0
    name: str
    is_remote: bool
    predicted: Prediction
    refused: str | None = None  # why it cannot have this request; None: it can
    retry_after_s: float | None = None  # of a refusal that passes

    def score_s(self, step_s: float) -> float:
        begins_s = self.predicted.begins_s
        return self.position * step_s + (UNKNOWN_S if begins_s is None else begins_s)

    def exceeds(self, budget_s: float | None) -> bool:
        """Whether its answer is known to take longer."""
        total_s = self.predicted.total_s
        return budget_s is not None and total_s is not None and total_s > budget_s


@dataclass(frozen=True, slots=True)
class Rung:
    """One rung of a ladder. `why`: the reason for its place, or for which it is left out."""

    state: RungState
    score_s: float
    why: str

    @property
    def name(self) -> str:
        return self.state.name


@dataclass(frozen=True, slots=True)
class Ladder:
    """Every rung, once: those that are asked, in this order, and those left out."""

    rungs: tuple[Rung, ...]
    left_out: tuple[Rung, ...]


def order(task: TaskConfig, states: Sequence[RungState], budget_s: float | None) -> Ladder:
    """Orders the rungs of a task. `states`: in the task's order. `budget_s`: of this request."""
    left_out = {c.name: why for c in states if (why := _left_out(task, c)) is not None}
    usable = [c for c in states if c.name not in left_out]
    rungs = tuple(
        Rung(c, c.score_s(task.step_s), why) for c, why in _ordered(task, usable, budget_s)
    )
    gone = tuple(
        Rung(c, c.score_s(task.step_s), left_out[c.name]) for c in states if c.name in left_out
    )
    return Ladder(rungs, gone)


def leaves_for(task: TaskConfig, waiting: str, ladder: Ladder, left_s: float) -> Rung | None:
    """The rung that a request goes on to from `waiting`, which has not begun to answer it. None: it
    waits on. `ladder`: the rungs as they are now, ordered for `left_s`, the rest of the budget."""
    current = next((rung for rung in ladder.rungs if rung.name == waiting), None)
    if current is None or current.state.predicted.state == RESIDENT:
        return None  # its model serves
    if task.pin_primary and current.state.position == 0:
        return None
    if left_s > 0 and not current.state.exceeds(left_s):
        return None  # the answer may still be complete within the budget
    # While some of the budget is left, only a rung that the order puts before it is asked in its
    # place; afterwards any. Either must be known to be sooner.
    place = ladder.rungs.index(current)
    others = ladder.rungs[:place] + (ladder.rungs[place + 1 :] if left_s <= 0 else ())
    return next((rung for rung in others if _is_sooner(rung.state, current.state)), None)


def _is_sooner(one: RungState, other: RungState) -> bool:
    """Whether the first is known to be complete sooner; the other's time may be unknown."""
    one_s, other_s = one.predicted.total_s, other.predicted.total_s
    return one_s is not None and (other_s is None or one_s < other_s)


def _left_out(task: TaskConfig, state: RungState) -> str | None:
    if state.is_remote and state.position > 0 and not task.allow_cloud_fallback:
        return "`allow_cloud_fallback` is false: no remote but the primary"
    return state.refused


def _ordered(
    task: TaskConfig, usable: list[RungState], budget_s: float | None
) -> Iterator[tuple[RungState, str]]:
    rest = list(usable)
    if rest and rest[0].position == 0 and (task.pin_primary or rest[0].is_remote):
        primary = rest.pop(0)
        pinned = "pinned: no rung goes before it, even a resident one"
        yield primary, f"the primary, {pinned if task.pin_primary else 'a remote put first'}"
    local = [c for c in rest if not c.is_remote]
    local.sort(key=lambda c: (c.exceeds(budget_s), c.score_s(task.step_s), c.position))
    remotes = [c for c in rest if c.is_remote]
    ahead = _sooner(remotes, local, budget_s)
    for state in ahead:
        yield state, _why_ahead(local, budget_s)
    for state in local:
        yield state, _why_here(state, task, budget_s)
    for state in remotes:
        if state not in ahead:
            yield state, _why_behind(local, budget_s)


def _sooner(
    remotes: list[RungState], local: list[RungState], budget_s: float | None
) -> list[RungState]:
    """The remotes that go before the models here: those that answer sooner, where each model here
    exceeds the budget."""
    if not local or not all(c.exceeds(budget_s) for c in local):
        return []
    soonest_s = _soonest_s(local)
    return [c for c in remotes if (total_s := c.predicted.total_s) is None or total_s < soonest_s]


def _soonest_s(local: list[RungState]) -> float:
    return min(c.predicted.total_s or 0.0 for c in local)


def _why_ahead(local: list[RungState], budget_s: float | None) -> str:
    return (
        f"before the models here: the soonest of them takes {_soonest_s(local):.1f} s, "
        f"of a budget of {budget_s:.1f} s"
    )


def _why_behind(local: list[RungState], budget_s: float | None) -> str:
    if not local:
        return "no model here can have the request"
    if budget_s is None:
        return "behind the models here: no budget says how long they may take"
    if all(c.exceeds(budget_s) for c in local):
        return f"behind the models here: it would take longer than their {_soonest_s(local):.1f} s"
    return f"behind the models here: they are not known to exceed the budget of {budget_s:.1f} s"


def _why_here(state: RungState, task: TaskConfig, budget_s: float | None) -> str:
    predicted = state.predicted
    if predicted.state == RESIDENT:
        until = "resident, it serves at once"
    elif predicted.begins_s is None:
        until = f"{predicted.state}, until it serves nothing is known, taken as {UNKNOWN_S:.0f} s"
    else:
        until = f"{predicted.state}, it serves in {predicted.begins_s:.1f} s"
    score = f"score {state.score_s(task.step_s):.1f} s with {state.position} places down"
    if state.exceeds(budget_s):
        most = f"more than the budget of {budget_s:.1f} s"
        score += f"; its answer takes {predicted.total_s:.1f} s, {most}"
    return f"{until}; {score}"
