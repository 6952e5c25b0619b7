"""Two models that do not fit together, with interleaved jobs, in the simulated world (C13)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arbiter.units import in_seconds
from benchmarks import collation
from benchmarks.replay.table import SETTINGS
from tests.support.examples import examples

SWAPS_MOST = 3


@pytest.mark.spec("C13")
@given(seed=st.integers(0, 10_000), gap_s=st.floats(0, 0.8))
@settings(max_examples=examples(60), deadline=None, derandomize=True)
def test_twenty_interleaved_jobs_each_cost_three_swaps_and_a_bounded_wait(
    seed: int, gap_s: float
) -> None:
    """The longest wait is that stated when the first job of a batch began to wait, and until then
    what was in flight."""
    cost = collation.collated(collation.jobs(gap_s, seed))
    assert cost.swaps_count <= SWAPS_MOST
    drain_s = max(collation.BUSY_S) + collation.UNLOAD_S
    assert cost.longest_wait_s <= cost.stated_s + drain_s
    bound_s = in_seconds(SETTINGS.collate_most) + 2 * drain_s + collation.LOAD_S
    assert cost.longest_wait_s <= bound_s


@pytest.mark.spec("C13")
def test_by_count_the_same_jobs_cost_many_times_the_swaps() -> None:
    uses = collation.jobs(0.5, 1)
    ours, theirs = collation.collated(uses), collation.by_count(uses)
    assert theirs.swaps_count > 5 * ours.swaps_count
    assert theirs.longest_wait_s > 2 * ours.longest_wait_s


def test_the_comparison_counts_a_swap_for_each_change_of_model() -> None:
    """Against the figures said beforehand: chat is loaded, and each swap takes 4.5 s."""
    use = collation.jobs(0.0, 0)[0]
    image = [u for u in collation.jobs(0.0, 0) if u.position == 0][:1]
    chat = [u for u in collation.jobs(0.0, 0) if u.position == 1][:1]
    cost = collation.by_count(sorted([*image, *chat], key=lambda u: -u.position))
    assert use.at == image[0].at == chat[0].at
    assert (cost.swaps_count, cost.longest_wait_s) == (1, 1 + 4.5)
