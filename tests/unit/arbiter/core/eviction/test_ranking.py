"""The order in which tickets leave (C2, C3): priorities, and devices with very many tickets."""

from dataclasses import replace

import pytest

from arbiter.core import events as ev
from arbiter.core.eviction.ranking import (
    SWEPT_COUNT,
    price_victim,
    ranked_victims,
    victims_no_more_urgent,
)
from arbiter.core.records.ledger import UNREAD_COUNT
from arbiter.core.types import Priority
from arbiter.units import HolderId, NodeId, TicketId, seconds
from policies import EVICT
from tests.support.core_driver import PLAIN, CoreDriver, capability, granted, revoked

URGENT, HIGH, NORMAL, LOW, BATCH = Priority


@pytest.mark.spec("C2")
def test_priorities_have_the_numbers_of_the_specification() -> None:
    assert [int(p) for p in Priority] == [1, 5, 10, 20, 40]


@pytest.mark.spec("C2")
@pytest.mark.parametrize("resident", Priority)
@pytest.mark.parametrize("asker", Priority)
def test_a_victim_is_never_more_urgent_than_the_asker(resident: Priority, asker: Priority) -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 80, priority=resident)
    went = revoked(driver.ask(20, "b", 80, priority=asker))
    assert went == ([("a", "swap", "gone")] if asker <= resident else [])


@pytest.mark.spec("C2")
def test_least_urgent_model_is_evicted_first_whatever_its_role_and_last_use() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "e1", 40, capability="embedding", model="e1", priority=NORMAL)
    driver.resident(10, "a", 40, priority=BATCH)
    assert revoked(driver.ask(20, "b", 40)) == [("a", "swap", "gone")]


@pytest.mark.spec("C2", "C4")
def test_minimum_residency_holds_for_equal_askers_and_not_for_more_urgent_ones() -> None:
    driver = CoreDriver(device=80)
    driver.ask(0, "a", 80)
    driver.at(5, ev.Loaded(TicketId("a"), 5 * 10**9))
    driver.beat(5, "a")
    assert driver.ask(6, "b", 80) == []
    assert revoked(driver.ask(7, "c", 80, priority=HIGH)) == [("a", "swap", "gone")]


@pytest.mark.spec("C2")
def test_a_model_counts_as_batch_when_its_keep_warm_seconds_have_passed() -> None:
    driver = CoreDriver(device=80, keep_warm_s=30)
    driver.resident(0, "a", 80, priority=URGENT)
    driver.ticket("a").declined_until = 10**12  # so that it stays when unused
    assert driver.ask(20, "b", 80, priority=LOW) == []
    driver.ticket("a").declined_until = 0
    assert min(driver.timers) <= 30 * 10**9
    assert [name for name, _, _ in revoked(driver.fire_timer(30))] == ["a"]


@pytest.mark.spec("C2")
@pytest.mark.parametrize("keep_warm_s", [-1, 7200])
def test_model_kept_warm_for_hours_is_not_urgent_for_hours(keep_warm_s: float) -> None:
    driver = CoreDriver(device=80, keep_warm_s=keep_warm_s)
    driver.resident(0, "a", 80, priority=HIGH)
    assert revoked(driver.ask(899, "b", 80)) == []
    assert [name for name, _, _ in revoked(driver.fire_timer(901))] == ["a"]


@pytest.mark.spec("C2")
def test_model_in_use_keeps_the_priority_of_its_request_however_long() -> None:
    driver = CoreDriver(device=80, keep_warm_s=30)
    driver.resident(0, "a", 80, priority=HIGH)
    driver.beat(1, "a", inflight=1)
    assert driver.ask(100, "b", 80) == []
    assert revoked(driver.ask(101, "c", 80, priority=HIGH)) == [("a", "swap", "gone")]


@pytest.mark.spec("C2")
def test_the_priority_of_later_requests_comes_with_the_heartbeat() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 80)
    held = driver.held("a")
    urgent = ev.HeldTicket(
        held.ticket, held.model, held.phase, 0, held.idle, held.devices, held.need, "", URGENT
    )
    driver.at(5, ev.Renewed(HolderId("h"), (urgent,)))
    assert driver.ask(20, "b", 80, priority=HIGH) == []
    assert revoked(driver.ask(21, "c", 80, priority=URGENT)) == [("a", "swap", "gone")]


@pytest.mark.spec("C6")
def test_queue_is_served_by_priority_then_by_arrival() -> None:
    driver = CoreDriver(device=80)
    driver.ask(0, "a", 80)
    for t, (name, priority) in enumerate({"b": LOW, "c": NORMAL, "d": NORMAL, "e": HIGH}.items()):
        driver.ask(t + 1, name, 40, priority=priority)
    driver.at(6, ev.LoadBroke(TicketId("a"), "x", False))
    assert granted(driver.gone(7, "a")) == ["e", "c"]


@pytest.mark.spec("C6")
def test_queued_ticket_moves_up_when_a_more_urgent_request_joins_it() -> None:
    driver = CoreDriver(device=80)
    driver.ask(0, "a", 80)
    driver.ask(1, "b", 40)
    driver.ask(2, "c", 50, priority=LOW)
    driver.ask(3, "c", 50, priority=URGENT)
    driver.at(6, ev.LoadBroke(TicketId("a"), "x", False))
    assert granted(driver.gone(7, "a")) == ["c"]


# -- a device with very many tickets -------------------------------------------------------------

MANY = [f"m{n}" for n in range(100)]
EXACT = ("priority_lru", "belady")  # prices do not drift with time alone


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
    """Ranked once, then only what changed: the same as if everything were priced anew, but for what
    prices drift by until their turn comes: costs a hundredth, recency more."""
    driver = filled_driver(policy)
    book = driver.account()
    assert len(book.tickets) > SWEPT_COUNT
    list(ranked_victims(driver.state, book))
    for t, model in enumerate(MANY[::3], start=200):
        driver.beat(t, f"{model}-t", inflight=t % 2)
        kept = list(ranked_victims(driver.state, book))
        anew = {e.id: price_victim(driver.state, book, e) for e, _ in kept}
        places = [priced.place for _, priced in kept]
        assert places == sorted(places) and anew.keys() == book.tickets.keys()
        costs = {e.id: priced.cost_s for e, priced in kept}
        assert costs == pytest.approx({t: p.cost_s for t, p in anew.items()}, rel=0.01)
        if policy in EXACT:
            assert places == sorted(priced.place for priced in anew.values())


@pytest.mark.spec("C3", "N2")
def test_ticket_that_loads_or_leaves_is_priced_only_for_a_reader_that_wants_all() -> None:
    driver = filled_driver("priority_lru")
    book = driver.account()
    went = [name for name, _, _ in revoked(driver.ask(300, "a", 1, model="m0", priority=URGENT))]
    offered = {o.ticket for o in victims_no_more_urgent(driver.state, book, URGENT)}
    assert went and not offered & set(went)
    driver.at(301, ev.Released(TicketId(went[0]), "swap"))
    assert granted(driver.gone(302, went[0])) == ["a"]
    offered = {o.ticket for o in victims_no_more_urgent(driver.state, book, URGENT)}
    assert offered == book.tickets.keys() - {"a"}
    assert {e.id for e, _ in ranked_victims(driver.state, book)} == book.tickets.keys()


@pytest.mark.spec("C3")
def test_victims_of_a_long_ranking_are_those_of_a_short_one() -> None:
    driver = filled_driver("priority_lru")
    driver.beat(200)
    went = [name for name, _, _ in revoked(driver.ask(300, "a", 3, model="m0"))]
    batch = [f"{m}-t" for n, m in enumerate(MANY) if n % 5 == 4]
    assert went == sorted(batch)[:3]  # the least urgent; all were used at once


def test_heartbeat_without_news_reprices_no_candidate() -> None:
    driver = filled_driver("time_of_day")
    book = driver.account()
    driver.beat(200)
    list(ranked_victims(driver.state, book))
    driver.beat(201)
    assert book.stale == set()
    driver.beat(202, f"{MANY[0]}-t", inflight=1)
    assert book.stale == {f"{MANY[0]}-t"}


def test_unread_ranking_is_dropped() -> None:
    driver = filled_driver("time_of_day")
    book = driver.account()
    list(ranked_victims(driver.state, book))
    for n in range(len(book.tickets) + UNREAD_COUNT + 1):
        book.note_stale(TicketId(f"gone{n}"))
    assert book.stale is None
    assert [e.id for e, _ in ranked_victims(driver.state, book)]


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
    driver.fire_timer(899)
    assert not list(victims_no_more_urgent(driver.state, book, Priority.NORMAL))
    driver.fire_timer(901)
    assert len(list(victims_no_more_urgent(driver.state, book, Priority.NORMAL))) == 8


@pytest.mark.spec("C3")
def test_no_price_is_older_than_a_minute() -> None:
    driver = old_urgent_ones()
    book = driver.account()
    for t in (901, 961):
        driver.fire_timer(t)
        priced = list(ranked_victims(driver.state, book))
    assert [kept for _, kept in priced] == [price_victim(driver.state, book, e) for e, _ in priced]


@pytest.mark.spec("N4")
def test_one_clock_counts_bytes_loaded_by_all_that_devices_that_compute_lend() -> None:
    driver = CoreDriver(device=80, host=500)
    driver.see_node(0, 120, 500, node="n2")
    driver.resident(0, "a", 40)
    assert driver.turnovers == pytest.approx(40 / 200)
    driver.at(1, ev.NodeLost(NodeId("n2")))
    driver.resident(2, "b", 40)
    assert driver.turnovers == pytest.approx(40 / 200 + 40 / 80)


@pytest.mark.spec("N4")
def test_learned_prices_are_brought_up_to_date_by_turnovers_within_one_second() -> None:
    driver = filled_driver("learned")
    book = driver.account()
    list(ranked_victims(driver.state, book))
    driver.turn_over(0.5)
    for ticket, priced in ranked_victims(driver.state, book):
        assert priced == price_victim(driver.state, book, ticket)
