"""Wait, load and run of one model, from what the arbiter says."""

from typing import Any

import pytest

from deployments.tasks.predict import NOTHING, Prediction, never, of_plan, of_presence


def plan(**changed: Any) -> dict[str, Any]:
    usual = {"is_resident": False, "starts_replica": False, "wait_s": 0.0, "load_s": 3.0}
    return usual | {"answer": "now", "sentences": ["Now."]} | changed


@pytest.mark.spec("J5")
def test_total_is_wait_load_and_run() -> None:
    made = of_plan("cold", plan(wait_s=4.0), None, 0.5)
    assert (made.begins_s, made.total_s) == (7.0, 7.5)
    assert of_plan("cold", plan(starts_replica=True), None, None) == Prediction(
        "cold", 1.5, 3.0, None
    )
    assert of_plan("cold", plan(is_resident=True), 9.0, 0.5).total_s == 0.5


@pytest.mark.spec("J5")
def test_load_that_the_dry_run_cannot_tell_is_as_loads_were_else_unknown() -> None:
    assert of_plan("cold", plan(load_s=0.0), 9.0, None).begins_s == 9.0
    assert of_plan("cold", plan(load_s=0.0), None, 0.5).total_s is None
    assert of_plan("cold", plan(wait_s=None), None, 0.5).total_s is None
    assert NOTHING.total_s is None


@pytest.mark.spec("J5")
def test_model_on_its_way_takes_what_is_left_of_it() -> None:
    assert of_presence("loading", 2.5, 0.5).total_s == 3.0
    assert of_presence("cold", None, 0.5).begins_s is None


@pytest.mark.spec("J5")
def test_what_can_never_be_loaded_says_why() -> None:
    assert never(plan()) is None
    assert (
        never(plan(answer="never", sentences=["Too large.", "Shrink it."]))
        == "Too large. Shrink it."
    )
