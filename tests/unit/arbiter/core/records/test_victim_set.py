"""The set of victims (C3): against every subset there is, and out of a long order."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from arbiter.core import events as ev
from arbiter.core.eviction.ranking import (
    SWEPT_COUNT,
    price_victim,
    ranked_victims,
    victims_no_more_urgent,
)
from arbiter.core.records.ledger import UNREAD_COUNT
from arbiter.core.records.victim_set import PricedVictim, choose, freed
from arbiter.core.types import Priority
from arbiter.units import Bytes, TicketId, seconds
from policies import EVICT
from tests.support.core_driver import PLAIN, CoreDriver, capability, revoked

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


# -- a device with very many tickets -------------------------------------------------------------

MANY = [f"m{n}" for n in range(100)]


def filled_driver(policy: str) -> CoreDriver:
    driver = CoreDriver(device=len(MANY), settings=replace(PLAIN, evict=policy))
    driver.at(0, many(driver))
    for t, model in enumerate(MANY):
        name = f"{model}-t"
        driver.ask(t, name, 1, model=model, priority=list(Priority)[t % 5])
        driver.at(t, ev.Loaded(TicketId(name), seconds(1)))
    driver.beat(len(MANY), *(f"{m}-t" for m in MANY))
    return driver


def many(driver: CoreDriver) -> ev.CapabilitiesSet:
    return ev.CapabilitiesSet((capability("text", "text", tuple(MANY)), driver.table[1]))


@pytest.mark.spec("C3")
@pytest.mark.parametrize("policy", EVICT)
def test_kept_ranking_equals_a_fresh_ranking(policy: str) -> None:
    """Ranked once, then only what changed: the same as if everything were priced anew."""
    driver = filled_driver(policy)
    book = driver.account()
    assert len(book.entries) > SWEPT_COUNT
    list(ranked_victims(driver.state, book))
    for t, model in enumerate(MANY[::3], start=200):
        driver.beat(t, f"{model}-t", inflight=t % 2)
        kept = [entry.ticket for entry, _ in ranked_victims(driver.state, book)]
        if policy in ("priority_lru", "belady"):  # their prices do not drift
            anew = sorted(
                book.entries.values(), key=lambda e: price_victim(driver.state, book, e).place
            )
            assert kept == [e.ticket for e in anew]
        assert sorted(kept) == sorted(book.entries)


@pytest.mark.spec("C3")
def test_victims_of_a_long_ranking_are_those_of_a_short_one() -> None:
    driver = filled_driver("priority_lru")
    driver.beat(200)
    went = [name for name, _, _ in revoked(driver.ask(300, "a", 3, model="m0"))]
    batch = [f"{m}-t" for n, m in enumerate(MANY) if n % 5 == 4]
    assert went == sorted(batch)[:3]  # the least urgent; all were used at once


def test_heartbeat_without_news_reprices_no_candidate() -> None:
    driver = filled_driver("two_rates")
    book = driver.account()
    driver.beat(200)
    list(ranked_victims(driver.state, book))
    driver.beat(201)
    assert book.stale == set()
    driver.beat(202, f"{MANY[0]}-t", inflight=1)
    assert book.stale == {f"{MANY[0]}-t"}


def test_unread_ranking_is_dropped() -> None:
    driver = filled_driver("two_rates")
    book = driver.account()
    list(ranked_victims(driver.state, book))
    for n in range(len(book.entries) + UNREAD_COUNT + 1):
        book.note_stale(TicketId(f"gone{n}"))
    assert book.stale is None
    assert [e.ticket for e, _ in ranked_victims(driver.state, book)]


def old_urgent_ones() -> CoreDriver:
    """Eight, each used last at 0 s, so urgent until 900 s."""
    driver = CoreDriver(device=8)
    for name in ("a", "b", "c", "d", "e", "large", "small", "vad"):
        driver.resident(0, name, 1, priority=Priority.HIGH)
    return driver


@pytest.mark.spec("C2")
def test_all_tickets_whose_priority_has_decayed_become_candidates_at_once() -> None:
    driver = old_urgent_ones()
    book = driver.account()
    driver.woke(899)
    assert not list(victims_no_more_urgent(driver.state, book, Priority.NORMAL))
    driver.woke(901)
    assert len(list(victims_no_more_urgent(driver.state, book, Priority.NORMAL))) == 8


@pytest.mark.spec("C3")
def test_no_price_is_older_than_a_minute() -> None:
    driver = old_urgent_ones()
    book = driver.account()
    for t in (901, 961):
        driver.woke(t)
        priced = list(ranked_victims(driver.state, book))
    assert [kept for _, kept in priced] == [price_victim(driver.state, book, e) for e, _ in priced]
