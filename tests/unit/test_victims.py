"""The set of victims (SPEC C3): against every subset there is, and out of a long order."""

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
from arbiter.core.records.usage_rates import UsageRates
from arbiter.core.records.victim_set import PricedVictim, choose, freed
from arbiter.core.types import Priority
from arbiter.units import Bytes, Instant, Span, TicketId, seconds
from policies import EVICT
from tests.unit.desk import CPU, PLAIN, Desk, capability, revoked

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
def test_no_other_set_that_suffices_costs_less(options: list[PricedVictim], short: int) -> None:
    best = brute_force(options, short)
    chosen = choose(options, Bytes(short))
    assert (cost_of(chosen) if chosen else None) == best


@pytest.mark.spec("C3")
@example([PricedVictim(TicketId(f"t{n}"), Bytes(n + 1), (0,), 1.0) for n in range(12)], 40)
@given(OPTIONS, st.integers(1, 40))
def test_nobody_in_the_set_could_stay(options: list[PricedVictim], short: int) -> None:
    chosen = choose(options, Bytes(short))
    assert all(freed(chosen) - one.freed_bytes < short for one in chosen)


@pytest.mark.spec("C3")
def test_twelve_of_one_rank_are_solved_exactly() -> None:
    sizes = [7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47]
    costs = [9, 8, 15, 14, 22, 19, 31, 28, 36, 44, 41, 50]
    options = [
        PricedVictim(TicketId(f"t{n:02}"), Bytes(size), (0,), float(cost))
        for n, (size, cost) in enumerate(zip(sizes, costs, strict=True))
    ]
    for short in (5, 50, 100, 200, 300):
        assert cost_of(choose(options, Bytes(short))) == brute_force(options, short)


@pytest.mark.spec("C3")
def test_beyond_twelve_the_set_suffices_and_spares_whom_it_can() -> None:
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


def crowded(policy: str) -> Desk:
    desk = Desk(device=len(MANY), settings=replace(PLAIN, evict=policy))
    desk.at(0, many(desk))
    for t, model in enumerate(MANY):
        name = f"{model}-t"
        desk.ask(t, name, 1, model=model, priority=list(Priority)[t % 5])
        desk.at(t, ev.Loaded(TicketId(name), seconds(1)))
    desk.beat(len(MANY), *(f"{m}-t" for m in MANY))
    return desk


def many(desk: Desk) -> ev.CapabilitiesSet:
    return ev.CapabilitiesSet((capability("text", "text", tuple(MANY)), desk.table[1]))


@pytest.mark.spec("C3")
@pytest.mark.parametrize("policy", EVICT)
def test_an_order_that_is_kept_is_the_order_of_today(policy: str) -> None:
    """Ranked once, then only what changed: the same as if everything were priced anew."""
    desk = crowded(policy)
    book = desk.state.ledger.books[CPU]
    assert len(book.entries) > SWEPT_COUNT
    list(ranked_victims(desk.state, book))
    for t, model in enumerate(MANY[::3], start=200):
        desk.beat(t, f"{model}-t", inflight=t % 2)
        kept = [entry.ticket for entry, _ in ranked_victims(desk.state, book)]
        if policy in ("priority_lru", "belady"):  # their prices do not drift
            anew = sorted(
                book.entries.values(), key=lambda e: price_victim(desk.state, book, e).place
            )
            assert kept == [e.ticket for e in anew]
        assert sorted(kept) == sorted(book.entries)


@pytest.mark.spec("C3")
def test_victims_come_out_of_a_long_order_as_out_of_a_short_one() -> None:
    desk = crowded("priority_lru")
    desk.beat(200)
    went = [name for name, _, _ in revoked(desk.ask(300, "a", 3, model="m0"))]
    batch = [f"{m}-t" for n, m in enumerate(MANY) if n % 5 == 4]
    assert went == sorted(batch)[:3]  # the least urgent; all were used at once


@pytest.mark.spec("C3")
def test_rates_fade_to_a_third_within_a_window_and_add_up() -> None:
    rates = UsageRates(Span(100))
    rates.used(("c", "m"), 2, Instant(0))
    rates.used(("c", "m"), 1, Instant(100))
    assert rates.recent(("c", "m"), Instant(100)) == pytest.approx(1 + 2 * 0.3679, rel=1e-3)
    assert rates.recent(("c", "other"), Instant(100)) == 0


def test_a_heartbeat_that_says_nothing_new_has_nobody_priced_again() -> None:
    desk = crowded("two_rates")
    book = desk.state.ledger.books[CPU]
    desk.beat(200)
    list(ranked_victims(desk.state, book))
    desk.beat(201)
    assert book.stale == set()
    desk.beat(202, f"{MANY[0]}-t", inflight=1)
    assert book.stale == {f"{MANY[0]}-t"}


def test_the_order_is_given_up_where_nobody_looks_for_long() -> None:
    desk = crowded("two_rates")
    book = desk.state.ledger.books[CPU]
    list(ranked_victims(desk.state, book))
    for n in range(len(book.entries) + UNREAD_COUNT + 1):
        book.note_stale(TicketId(f"gone{n}"))
    assert book.stale is None
    assert [e.ticket for e, _ in ranked_victims(desk.state, book)]


def old_urgent_ones() -> Desk:
    """Eight, each used last at 0 s, so urgent until 900 s."""
    desk = Desk(device=8)
    for name in ("a", "b", "c", "d", "e", "large", "small", "vad"):
        desk.resident(0, name, 1, priority=Priority.HIGH)
    return desk


@pytest.mark.spec("C2")
def test_all_whose_urgency_has_faded_may_have_to_yield_at_once() -> None:
    desk = old_urgent_ones()
    book = desk.state.ledger.books[CPU]
    desk.woke(899)
    assert not list(victims_no_more_urgent(desk.state, book, Priority.NORMAL))
    desk.woke(901)
    assert len(list(victims_no_more_urgent(desk.state, book, Priority.NORMAL))) == 8


@pytest.mark.spec("C3")
def test_no_price_is_older_than_a_minute() -> None:
    desk = old_urgent_ones()
    book = desk.state.ledger.books[CPU]
    for t in (901, 961):
        desk.woke(t)
        priced = list(ranked_victims(desk.state, book))
    assert [kept for _, kept in priced] == [price_victim(desk.state, book, e) for e, _ in priced]
