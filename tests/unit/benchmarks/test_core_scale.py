"""One decision of the core is as much work in a large cluster as in a small one."""

import gc
from collections.abc import Iterator

import pytest

from benchmarks.core_scale import ACTS, Scene

FEW, MANY = 10, 200  # devices; a walk over all of them calls 190 functions more
RESIDENT, QUEUED = 3, 5  # on each
TOUCHED = range(4)  # devices, five times each: the first time its device is priced anew
GROWTH_MOST = 1.15  # one grant calls 900 functions, and which models are drawn moves that by 5 %


@pytest.fixture(scope="module")
def least_calls() -> Iterator[dict[int, dict[str, float]]]:
    """By the number of devices, the functions that each act calls, which no machine changes."""
    yield {devices: _least_calls(Scene(devices, RESIDENT, QUEUED)) for devices in (FEW, MANY)}
    gc.unfreeze()  # a scene freezes what there is


def _least_calls(scene: Scene) -> dict[str, float]:
    scene.counts_calls = True
    return {name: min(act(scene, n) for n in (*TOUCHED,) * 5) for name, act in ACTS.items()}


@pytest.mark.spec("N2")
@pytest.mark.parametrize("act", ACTS)
def test_a_decision_calls_no_more_functions_among_many_devices(
    act: str, least_calls: dict[int, dict[str, float]]
) -> None:
    assert least_calls[MANY][act] <= GROWTH_MOST * least_calls[FEW][act]
