"""The order of a task's rungs, for any facts: what is pinned, stripped, and sent out."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deployments.config.task_section import TaskConfig
from deployments.tasks.ladder import Ladder, RungState, leaves_for, order
from deployments.tasks.predict import NOTHING, Prediction

SECONDS = st.none() | st.sampled_from([0.0, 0.5, 1.0, 4.0, 30.0, 1_000.0])
PREDICTIONS = st.builds(Prediction, st.just("cold"), SECONDS, SECONDS, SECONDS)
REFUSALS = st.none() | st.just("it has no eyes")
SERVES, MUST_LOAD = Prediction("resident", 0.0, 0.0, 0.5), Prediction("cold", 0.0, 8.0, 0.5)


@st.composite
def ladders(draw: st.DrawFn) -> list[RungState]:
    kinds = draw(st.lists(st.tuples(st.booleans(), PREDICTIONS, REFUSALS), min_size=1, max_size=6))
    return [
        RungState(position, f"m{position}", is_remote, predicted, refused)
        for position, (is_remote, predicted, refused) in enumerate(kinds)
    ]


TASKS = st.builds(
    TaskConfig,
    ladder=st.just(("m0",)),
    pin_primary=st.booleans(),
    allow_cloud_fallback=st.booleans(),
    step_s=st.sampled_from([0.0, 1.0, 5.0]),
)
BUDGETS = st.none() | st.sampled_from([0.5, 2.0, 20.0])


def task(**said: Any) -> TaskConfig:
    return TaskConfig(ladder=("m0",), **said)


def here(position: int, predicted: Prediction, refused: str | None = None) -> RungState:
    return RungState(position, f"m{position}", False, predicted, refused)


def remote(position: int, total_s: float | None = None) -> RungState:
    predicted = Prediction("remote", 0.0, 0.0, total_s) if total_s is not None else NOTHING
    return RungState(position, f"m{position}", True, predicted)


def names(made: Ladder) -> list[str]:
    return [rung.name for rung in made.rungs]


@pytest.mark.spec("J5")
@given(TASKS, ladders(), BUDGETS)
def test_each_rung_has_one_place_and_a_reason(
    config: TaskConfig, states: list[RungState], budget_s: float | None
) -> None:
    made = order(config, states, budget_s)
    found = [*made.rungs, *made.left_out]
    assert sorted(rung.name for rung in found) == sorted(c.name for c in states)
    assert all(rung.why for rung in found)
    assert not any(rung.state.refused for rung in made.rungs)


@pytest.mark.spec("J5")
@given(TASKS, ladders(), BUDGETS)
def test_pinned_or_remote_primary_is_first_where_it_can_have_the_request(
    config: TaskConfig, states: list[RungState], budget_s: float | None
) -> None:
    primary = states[0]
    made = order(config, states, budget_s)
    if primary.refused:
        assert primary.name not in names(made)
    elif config.pin_primary or primary.is_remote:
        assert made.rungs[0].state == primary


@pytest.mark.spec("J5")
@given(TASKS, ladders(), BUDGETS)
def test_without_cloud_fallback_no_remote_is_left_but_the_primary_and_no_list_is_emptied_by_it(
    config: TaskConfig, states: list[RungState], budget_s: float | None
) -> None:
    local = order(with_fields(config, allow_cloud_fallback=False), states, budget_s)
    every = order(with_fields(config, allow_cloud_fallback=True), states, budget_s)
    assert not any(rung.state.is_remote and rung.state.position for rung in local.rungs)
    kept = [rung for rung in every.rungs if not (rung.state.is_remote and rung.state.position)]
    assert names(local) == [rung.name for rung in kept], "what is left keeps its order"
    fit = [replace(c, refused=None) for c in states]
    assert order(with_fields(config, allow_cloud_fallback=False), fit, budget_s).rungs


def with_fields(config: TaskConfig, **said: Any) -> TaskConfig:
    return config.model_copy(update=said)


@pytest.mark.spec("J5")
@given(TASKS, ladders(), BUDGETS)
def test_remote_goes_before_a_model_here_only_where_each_of_them_exceeds_the_budget(
    config: TaskConfig, states: list[RungState], budget_s: float | None
) -> None:
    rungs = order(config, states, budget_s).rungs
    for before, after in pairwise(rungs):
        if before.state.position and before.state.is_remote and not after.state.is_remote:
            ours = [r.state for r in rungs if not r.state.is_remote]
            unpinned = [c for c in ours if c.position or not config.pin_primary]
            assert budget_s is not None
            assert all((c.predicted.total_s or 0) > budget_s for c in unpinned)


@pytest.mark.spec("J5")
@given(TASKS, ladders(), BUDGETS, st.data())
def test_model_that_serves_sooner_never_loses_a_place(
    config: TaskConfig, states: list[RungState], budget_s: float | None, data: st.DataObject
) -> None:
    one = data.draw(st.sampled_from(states))
    if one.is_remote or one.predicted.begins_s is None:
        return
    sooner = replace(one, predicted=replace(one.predicted, wait_s=0.0, load_s=0.0))
    before = order(config, states, budget_s)
    after = order(config, [sooner if c is one else c for c in states], budget_s)
    if one.name in names(before):
        assert names(after).index(one.name) <= names(before).index(one.name)


@pytest.mark.spec("J5")
@given(st.integers(1, 6), PREDICTIONS, BUDGETS)
@example(3, NOTHING, 2.0)
def test_equal_models_keep_the_order_of_the_ladder(
    count: int, predicted: Prediction, budget_s: float | None
) -> None:
    states = [here(position, predicted) for position in range(count)]
    for step_s in (0.0, 1.0):
        made = order(task(step_s=step_s), states, budget_s)
        assert names(made) == [c.name for c in states]


@pytest.mark.spec("J5")
def test_resident_rung_goes_before_a_primary_that_must_load_unless_that_is_pinned() -> None:
    ladder = [here(0, MUST_LOAD), here(1, SERVES)]
    assert names(order(task(), ladder, None)) == ["m1", "m0"]
    pinned = order(task(pin_primary=True), ladder, None)
    assert names(pinned) == ["m0", "m1"]
    assert "pinned" in pinned.rungs[0].why
    assert names(order(task(step_s=10), ladder, None)) == ["m0", "m1"], "8 s are within a place"


@pytest.mark.spec("J5")
def test_primary_that_must_load_goes_before_a_rung_of_which_nothing_is_known() -> None:
    assert names(order(task(), [here(0, MUST_LOAD), here(1, NOTHING)], None)) == ["m0", "m1"]
    assert names(order(task(), [here(0, NOTHING), here(1, MUST_LOAD)], None)) == ["m1", "m0"]


@pytest.mark.spec("J5")
def test_rung_that_keeps_the_budget_goes_before_a_better_rung_that_does_not() -> None:
    slow, quick = Prediction("resident", 0.0, 0.0, 20.0), Prediction("cold", 0.0, 2.0, 1.0)
    made = order(task(), [here(0, slow), here(1, quick)], 5.0)
    assert names(made) == ["m1", "m0"]
    assert "20.0 s, more than the budget of 5.0 s" in made.rungs[1].why
    assert names(order(task(), [here(0, slow), here(1, quick)], None)) == ["m0", "m1"]


@pytest.mark.spec("J5")
def test_remote_is_preferred_where_the_models_here_exceed_the_budget_and_it_is_sooner() -> None:
    ladder = [here(0, MUST_LOAD), remote(1, 2.0)]
    assert names(order(task(), ladder, 5.0)) == ["m1", "m0"]
    for budget_s, why in ((None, "no budget"), (10.0, "not known to exceed")):
        made = order(task(), ladder, budget_s)
        assert names(made) == ["m0", "m1"] and why in made.rungs[1].why
    longer = order(task(), [here(0, MUST_LOAD), remote(1, 60.0)], 5.0)
    assert names(longer) == ["m0", "m1"] and "longer than their 8.5 s" in longer.rungs[1].why
    assert names(order(task(), [here(0, MUST_LOAD), remote(1)], 5.0)) == ["m1", "m0"]
    assert names(order(task(), [here(0, MUST_LOAD, "too short"), remote(1)], None)) == ["m1"]


QUEUED, LATE = Prediction("queued", 6.0, 1.0, 0.5), Prediction("queued", None, None, 0.5)


def onward(waiting: Prediction, *others: RungState, left_s: float, **said: Any) -> str | None:
    """To which rung a request goes on from the first, with so much of its budget left."""
    config = task(**said)
    ladder = order(config, [here(0, waiting), *others], max(0.0, left_s))
    found = leaves_for(config, "m0", ladder, left_s)
    return found and found.name


@pytest.mark.spec("J5")
@pytest.mark.parametrize(
    ("waiting", "left_s", "to"),
    [
        pytest.param(QUEUED, 5.0, "m1", id="its answer comes after the budget"),
        pytest.param(QUEUED, 8.0, None, id="its answer comes within it"),
        pytest.param(QUEUED, -1.0, "m1", id="the budget is over"),
        pytest.param(LATE, 5.0, None, id="its answer is not known to come after it"),
        pytest.param(LATE, -1.0, "m1", id="the budget is over, and when it answers is not known"),
        pytest.param(SERVES, -1.0, None, id="its model serves"),
    ],
)
def test_rung_is_left_only_where_it_waits_past_the_budget(
    waiting: Prediction, left_s: float, to: str | None
) -> None:
    assert onward(waiting, here(1, SERVES), left_s=left_s) == to


@pytest.mark.spec("J5")
def test_rung_is_left_only_for_a_rung_that_is_known_to_be_sooner_and_can_have_the_request() -> None:
    assert onward(QUEUED, here(1, MUST_LOAD), here(2, NOTHING), left_s=-1.0) is None
    assert onward(QUEUED, here(1, SERVES, "it has no eyes"), left_s=-1.0) is None
    assert onward(QUEUED, here(1, MUST_LOAD), here(2, SERVES), left_s=-1.0) == "m2"


@pytest.mark.spec("J5")
def test_pinned_primary_is_not_left_and_a_remote_only_as_the_order_has_it() -> None:
    assert onward(QUEUED, here(1, SERVES), left_s=-1.0, pin_primary=True) is None
    assert onward(QUEUED, remote(1, 2.0), left_s=5.0) == "m1"
    assert onward(QUEUED, remote(1, 20.0), left_s=5.0) is None
    assert onward(QUEUED, remote(1, 2.0), left_s=5.0, allow_cloud_fallback=False) is None
    assert onward(QUEUED, remote(1, 2.0), here(2, NOTHING), left_s=5.0) is None, "it may keep it"
    assert onward(LATE, remote(1, 2.0), left_s=-1.0) == "m1"
