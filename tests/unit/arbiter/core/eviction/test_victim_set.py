"""The set of victims (C3): against every subset there is."""

from collections.abc import Iterable
from itertools import combinations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from arbiter.core.eviction.victim_set import choose, freed
from arbiter.core.records.priced_victim import PricedVictim
from arbiter.units import Bytes, TicketId

# Few ranks, costs and sizes, so that ties and exact sums are common.
OPTIONS = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 2), st.integers(1, 5)), min_size=1, max_size=9
).map(
    lambda rows: [
        PricedVictim(TicketId(f"t{n}"), Bytes(size), (rank,), float(cost))
        for n, (size, rank, cost) in enumerate(rows)
    ]
)


def cost_of(chosen: Iterable[PricedVictim]) -> list[float]:
    """The sum in each rank, the dearest rank first."""
    sums = [0.0, 0.0, 0.0]
    for one in chosen:
        sums[2 - one.rank[0]] += one.cost_s
    return sums


def brute_force(options: list[PricedVictim], short: int) -> list[float] | None:
    subsets = (s for n in range(1, len(options) + 1) for s in combinations(options, n))
    return min((cost_of(s) for s in subsets if freed(s) >= short), default=None)


@pytest.mark.spec("C3")
@given(OPTIONS, st.integers(1, 40))
def test_no_other_sufficient_victim_set_costs_less(options: list[PricedVictim], short: int) -> None:
    best = brute_force(options, short)
    chosen = choose(options, Bytes(short))
    assert (cost_of(chosen) if chosen else None) == best


@pytest.mark.spec("C3")
@example([PricedVictim(TicketId(f"t{n}"), Bytes(n + 1), (0,), 1.0) for n in range(12)], 40)
@given(OPTIONS, st.integers(1, 40))
def test_no_victim_in_the_set_could_stay(options: list[PricedVictim], short: int) -> None:
    chosen = choose(options, Bytes(short))
    assert all(freed(chosen) - one.freed_bytes < short for one in chosen)


@pytest.mark.spec("C3")
def test_twelve_victims_of_one_rank_are_chosen_exactly() -> None:
    sizes = [7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47]
    costs = [9, 8, 15, 14, 22, 19, 31, 28, 36, 44, 41, 50]
    options = [
        PricedVictim(TicketId(f"t{n:02}"), Bytes(size), (0,), float(cost))
        for n, (size, cost) in enumerate(zip(sizes, costs, strict=True))
    ]
    for short in (5, 50, 100, 200, 300):
        assert cost_of(choose(options, Bytes(short))) == brute_force(options, short)


@pytest.mark.spec("C3")
def test_victim_set_beyond_twelve_candidates_suffices_and_is_irreducible() -> None:
    options = [
        PricedVictim(TicketId(f"t{n:03}"), Bytes(1 + n * 7 % 13), (0,), 1.0 + n * 5 % 11)
        for n in range(200)
    ]
    for short in (1, 40, 400, 1000):
        chosen = choose(options, Bytes(short))
        assert freed(chosen) >= short
        assert all(freed(chosen) - one.freed_bytes < short for one in chosen)
