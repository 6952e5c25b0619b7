"""What tickets are told of their wait, in the simulated mixed hour (N5, C13)."""

from functools import cache
from statistics import median

import pytest

from tests.support.mixed_hour import BOUND_S, Wait, waits_of

SEEDS_COUNT = 10


@cache
def waits() -> tuple[Wait, ...]:
    return tuple(wait for seed in range(SEEDS_COUNT) for wait in waits_of(seed))


@pytest.mark.spec("A21", "N5")
def test_seldom_does_a_ticket_wait_longer_than_twice_what_it_was_told() -> None:
    over = [wait for wait in waits() if wait.ratio > 2]
    assert len(over) <= 0.015 * len(waits()), over
    assert max(wait.waited_s - 2 * wait.told_s for wait in waits()) <= 2


@pytest.mark.spec("A21", "N5")
def test_wait_that_is_told_is_not_simply_long() -> None:
    """Where two models trade places, the bound of C13 is told, which few wait for."""
    ratios = [wait.ratio for wait in waits() if wait.told_s < BOUND_S]
    assert len(ratios) >= 0.45 * len(waits())
    assert 0.6 <= median(ratios) <= 1.0
