"""Models that trade places are collated, and stay longer where loads take too much time (C13)."""

from dataclasses import replace

import pytest

from arbiter.core import events as ev
from arbiter.core.residency import loading_share
from arbiter.core.types import Priority
from arbiter.units import HolderId, Span, TicketId, in_seconds, seconds
from tests.support.core_driver import CPU, PLAIN, CoreDriver, refusal, revoked, s

pytestmark = pytest.mark.spec("C13")


def traded(settings: object = PLAIN) -> CoreDriver:
    """`a` has left for `b`, which is resident since 10 and in use; each loads in 2 s."""
    driver = CoreDriver(device=80, settings=settings)  # type: ignore[arg-type]
    driver.ask(0, "a", 60)
    driver.at(2, ev.Loaded(TicketId("a"), seconds(2)))
    driver.beat(2, "a")
    assert revoked(driver.ask(7, "b", 60)) == [("a", "swap", "gone")]
    driver.at(8, ev.Released(TicketId("a"), "swap"))
    driver.gone(8, "a")
    driver.at(10, ev.Loaded(TicketId("b"), seconds(2)))
    driver.beat(10, "b", inflight=1)
    return driver


def test_a_model_in_use_stays_for_a_model_that_left_for_it_until_that_has_waited_enough() -> None:
    driver = traded()
    assert driver.ask(14, "a2", 60) == []
    assert in_seconds(driver.queued[0].predicted) >= 30
    for t in range(15, 44):
        assert driver.beat(t, "b", inflight=1) == [], t
    assert revoked(driver.fire_timer(44)) == [("b", "swap", "gone")]


def test_collated_model_leaves_once_it_had_no_request_for_as_long_as_its_load_took() -> None:
    driver = traded()
    driver.ask(14, "a2", 60)
    driver.beat(20, "b", inflight=0)
    assert driver.fire_timer(21.9) == []
    assert driver.timers[0] <= s(22)
    assert revoked(driver.fire_timer(22)) == [("b", "swap", "gone")]


def test_explain_says_that_both_trade_places_and_for_how_long() -> None:
    driver = traded()
    driver.ask(14, "a2", 60)
    sentences = driver.arbiter.explain(TicketId("a2"), s(15)).sentences
    assert any("both trade places" in line and "waited 30 s" in line for line in sentences)


def test_a_model_that_never_left_for_it_is_asked_after_its_minimum_residency() -> None:
    driver = traded()
    assert revoked(driver.ask(14, "c", 60)) == [("b", "swap", "gone")]


def test_a_collated_ticket_holds_up_no_model_that_never_left_for_the_resident() -> None:
    driver = traded()
    assert driver.ask(14, "a2", 60) == []
    assert revoked(driver.ask(15, "c", 60)) == [("b", "swap", "gone")]


def test_a_more_urgent_request_does_not_wait_for_the_collation() -> None:
    driver = traded()
    assert revoked(driver.ask(14, "a2", 60, priority=Priority.HIGH)) == [("b", "swap", "gone")]


def test_a_deadline_shortens_the_collation_to_half_of_the_time_it_leaves() -> None:
    driver = traded()
    driver.ask(17, "a2", 60, deadline_s=15)  # 2 s to load and 1 s to leave: 12 s are left
    assert driver.timers == [s(20)]  # the books are audited every ten seconds
    assert revoked(driver.fire_timer(20)) == []
    assert driver.timers == [s(23)]
    assert revoked(driver.fire_timer(23)) == [("b", "swap", "gone")]


def test_a_deadline_too_soon_is_refused_and_not_collated_away() -> None:
    assert "deadline" in str(refusal(traded().ask(14, "a2", 60, deadline_s=1)))


def test_collation_may_be_switched_off() -> None:
    driver = traded(replace(PLAIN, collate_most=Span(0)))
    assert revoked(driver.ask(14, "a2", 60)) == [("b", "swap", "gone")]


def test_a_trade_is_forgotten_after_ten_minutes() -> None:
    driver = traded()
    driver.beat(620, "b", inflight=1)
    assert revoked(driver.ask(620, "a2", 60)) == [("b", "swap", "gone")]


def test_a_revoke_that_is_declined_is_no_trade() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "b", 60)
    assert revoked(driver.ask(7, "a", 60)) == [("b", "swap", "gone")]
    driver.at(7.1, ev.BarrierDropped(TicketId("b"), 1))
    driver.at(7.2, ev.Withdrawn(TicketId("a"), HolderId("h")))
    driver.beat(7.3, "b")
    driver.at(30, ev.Released(TicketId("b"), "manual"))
    driver.gone(30, "b")
    driver.ask(31, "a2", 60)
    driver.at(31, ev.Loaded(TicketId("a2"), seconds(0)))
    driver.beat(31, "a2", inflight=1)
    assert revoked(driver.ask(40, "b2", 60)) == [("a2", "swap", "gone")]


def test_a_request_that_gives_up_and_asks_again_goes_on_waiting() -> None:
    driver = traded()
    assert driver.ask(14, "a2", 60) == []
    driver.at(34, ev.Withdrawn(TicketId("a2"), HolderId("h")))
    assert driver.ask(35, "a3", 60, deadline_s=100) == []
    assert driver.timers[0] <= s(40)
    for t in range(36, 44):
        assert driver.beat(t, "b", inflight=1) == [], t
    assert revoked(driver.fire_timer(44)) == [("b", "swap", "gone")]


def test_a_request_long_after_it_gave_up_waits_anew() -> None:
    driver = traded()
    driver.ask(14, "a2", 60)
    driver.at(34, ev.Withdrawn(TicketId("a2"), HolderId("h")))
    driver.beat(64, "b", inflight=1)
    assert driver.ask(65, "a3", 60) == []
    assert driver.fire_timer(94.9) == []
    assert revoked(driver.fire_timer(95)) == [("b", "swap", "gone")]


# -- the share of time spent loading ---------------------------------------------------------------


def loaded_much() -> CoreDriver:
    """`a` took 200 of the last 600 s to load, and `b` 20 s; both have left but `b`."""
    driver = CoreDriver(device=80, keep_warm_s=-1)
    driver.ask(0, "a", 60)
    driver.at(200, ev.Loaded(TicketId("a"), seconds(200)))
    driver.at(201, ev.Released(TicketId("a"), "manual"))
    driver.gone(201, "a")
    driver.ask(202, "b", 60)
    driver.at(222, ev.Loaded(TicketId("b"), seconds(20)))
    driver.beat(222, "b")
    driver.fire_timer(232)  # the books are audited every ten seconds
    return driver


def test_the_share_of_ten_minutes_that_a_device_spent_loading_is_shown() -> None:
    driver = loaded_much()
    [device] = [d for d in driver.arbiter.snapshot(s(300)).devices if d.device == CPU]
    assert device.loading_fraction == pytest.approx(220 / 600)
    [device] = [d for d in driver.arbiter.snapshot(s(700)).devices if d.device == CPU]
    assert device.loading_fraction == pytest.approx(120 / 600)  # the first 100 s are long ago


def test_above_the_bound_requests_as_urgent_wait_out_a_longer_residency() -> None:
    driver = loaded_much()
    assert driver.last("loading_share").data == {
        "device": CPU, "fraction": 0.333, "most": 0.3,
    }  # fmt: skip
    assert driver.ask(243, "c", 60) == []  # its own load is over, and twice that is not
    sentences = driver.arbiter.explain(TicketId("c"), s(243)).sentences
    assert any(
        "longer because loads took 37% of the last ten minutes" in line for line in sentences
    )
    assert driver.beat(268, "b") == []
    assert revoked(driver.fire_timer(268.7)) == [("b", "swap", "gone")]  # 20 s x (1 / 0.3 - 1)


def test_a_more_urgent_request_does_not_wait_for_it() -> None:
    driver = loaded_much()
    asked = driver.ask(243, "c", 60, priority=Priority.HIGH)
    assert revoked(asked) == [("b", "swap", "gone")]


def test_below_the_bound_the_residency_is_as_before_and_the_event_log_tells() -> None:
    driver = loaded_much()
    driver.fire_timer(650)  # of the first load 150 s count
    assert driver.last("loading_share").data["fraction"] == pytest.approx(170 / 600, abs=1e-3)
    assert revoked(driver.ask(651, "c", 60)) == [("b", "swap", "gone")]


def test_queue_is_looked_at_again_once_a_device_is_below_the_bound() -> None:
    driver = loaded_much()
    state = driver.state
    for now_s, is_looked_at in ((240, False), (700, True)):
        state.now = s(now_s)
        state.take_dirty_nodes()
        loading_share.watch_thrashing(state)
        assert bool(state.dirty_nodes()) == is_looked_at
