"""Bytes on their way back, and loads that break (SPEC A8, A10, A12). Seconds and GiB."""

from dataclasses import replace
from typing import Any

import pytest

from arbiter import errors, units
from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Grant, KillEngine, LoadModel
from arbiter.units import HolderId, TicketId, in_seconds, seconds
from tests.unit.desk import (
    CPU,
    HOST,
    NODE,
    PLAIN,
    Desk,
    gib,
    granted,
    is_granted,
    reaped,
    refusal,
    revoked,
    s,
)


@pytest.mark.spec("A10")
def test_released_bytes_stay_charged_until_seen_back() -> None:
    desk = Desk(device=80)
    desk.resident(0, "a", 80)
    desk.ask(20, "b", 80)
    assert desk.at(21, ev.Released(TicketId("a"), "swap")) == [KillEngine(NODE, TicketId("a"))]
    assert desk.free() == 0
    assert granted(desk.gone(22, "a", bytes_back=False)) == []
    assert desk.free() == 0
    assert granted(desk.gone(23, "a", bytes_back=True)) == ["b"]


@pytest.mark.spec("A10")
def test_the_reap_is_repeated_each_250_ms_then_an_event_and_the_holder_is_quarantined() -> None:
    desk = Desk(device=80)
    desk.resident(0, "a", 30)
    desk.at(10, ev.Released(TicketId("a"), "manual"))
    reaps = [t / 4 for t in range(41, 61) if reaped(desk.woke(t / 4))]
    assert reaps == [10 + n / 4 for n in range(1, 21)]
    told = desk.last("quarantine")
    assert (told.size_bytes, told.data["holder"]) == (gib(30), "h")
    assert desk.charged() == 30  # the bytes remain on the books
    assert refusal(desk.ask(16, "b", 1)) == errors.HolderQuarantined(HolderId("h"), gib(30))


@pytest.mark.spec("A10")
def test_quarantine_refuses_those_who_wait_and_ends_when_the_bytes_are_back() -> None:
    desk = Desk(device=80, holders=("h", "g"))
    desk.resident(0, "a", 80)
    desk.ask(10, "b", 80)
    desk.ask(10, "c", 80, holder="g")
    desk.at(11, ev.Released(TicketId("a"), "swap"))
    assert refusal(desk.woke(16)) == errors.HolderQuarantined(HolderId("h"), gib(80))
    assert granted(desk.gone(20, "a")) == ["c"]
    desk.at(21, ev.LoadBroke(TicketId("c"), "x", False))
    desk.gone(22, "c")
    assert is_granted(desk.ask(23, "d", 80), "d")


@pytest.mark.spec("A10", "C3")
def test_bytes_a_quarantined_holder_keeps_are_not_counted_on() -> None:
    desk = Desk(device=80, holders=("h", "g"))
    desk.resident(0, "a", 40)
    desk.resident(0, "b", 40, holder="g")
    desk.at(10, ev.Released(TicketId("a"), "manual"))
    assert revoked(desk.ask(11, "c", 40, holder="g")) == []  # `a` is coming back
    assert revoked(desk.woke(15)) == [("b", "swap", "gone")]  # it is not


@pytest.mark.spec("A10")
def test_an_engine_that_ends_by_itself_is_off_the_books_at_once() -> None:
    desk = Desk()
    desk.resident(0, "a", 40)
    desk.gone(5, "a")
    assert desk.free() == 80
    assert desk.last("model_unload").data["reason"] == "lost"


@pytest.mark.spec("A12")
def test_a_failed_load_cools_the_model_down_and_answers_every_waiter_with_the_cause() -> None:
    desk = Desk(device=80)
    desk.ask(0, "a1", 80)
    desk.ask(0, "a2", 80)
    desk.ask(0, "b", 80)
    decisions = desk.at(1, ev.LoadBroke(TicketId("a1"), "bad weights", False))
    assert reaped(decisions) == ["a1"]
    assert refusal(decisions) == errors.LoadFailed("a", "bad weights", False)
    assert desk.charged() == 80
    assert granted(desk.gone(2, "a1")) == ["b"]
    assert refusal(desk.ask(2, "a3", 1)) == errors.ModelCoolingDown("a", "bad weights", 1.0)


@pytest.mark.spec("A12")
def test_the_pause_grows_with_repeats_up_to_a_bound_and_is_cleared_by_success() -> None:
    desk = Desk()
    t, pauses = 0.0, []
    for number in range(10):
        assert is_granted(desk.ask(t, f"a{number}", 1), f"a{number}")
        desk.at(t, ev.LoadBroke(TicketId(f"a{number}"), "x", False))
        desk.gone(t, f"a{number}")
        pauses.append(in_seconds(desk.last("cool_down").took))
        t += pauses[-1]
    assert pauses == [2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    assert is_granted(desk.ask(t, "a", 1), "a")
    desk.at(t, ev.Loaded(TicketId("a"), seconds(1)))
    assert is_granted(desk.ask(t, "a99", 1), "a99")
    desk.at(t, ev.LoadBroke(TicketId("a99"), "x", False))
    assert in_seconds(desk.last("cool_down").took) == 2


@pytest.mark.spec("A12", "A17")
def test_a_load_that_failed_for_memory_is_retried_at_once_and_asks_for_more() -> None:
    desk = Desk(device=80)
    desk.ask(0, "a1", 40)
    desk.ask(0, "a2", 50)
    decisions = desk.at(1, ev.LoadBroke(TicketId("a1"), "out of memory", True))
    assert "cool_down" not in desk.kinds()
    assert decisions == [KillEngine(NODE, TicketId("a1"))]
    desk.at(1, ev.Withdrawn(TicketId("a2")))
    desk.gone(1, "a1")
    [grant] = desk.ask(2, "a3", 40, attempt=2)
    assert isinstance(grant, Grant)
    assert grant.devices[0].size_bytes == gib(50)


@pytest.mark.spec("A12")
def test_what_waits_for_the_model_meanwhile_asks_for_more_as_well() -> None:
    desk = Desk(device=80)
    desk.ask(0, "a1", 40)
    desk.ask(0, "a2", 44)
    desk.at(1, ev.LoadBroke(TicketId("a1"), "out of memory", True))
    [grant] = [d for d in desk.gone(2, "a1") if isinstance(d, Grant)]
    assert grant.devices[0].size_bytes == gib(50)


@pytest.mark.spec("A12")
def test_a_correction_asks_at_most_for_the_whole_device() -> None:
    desk = Desk(device=80)
    desk.ask(0, "a1", 70)
    desk.at(1, ev.LoadBroke(TicketId("a1"), "out of memory", True))
    desk.gone(1, "a1")
    [grant] = desk.ask(2, "a2", 70, attempt=2)
    assert grant.devices[0].size_bytes == gib(80)


@pytest.mark.spec("A12")
def test_failing_for_memory_twice_is_a_failure() -> None:
    desk = Desk(device=80)
    desk.ask(0, "a1", 40)
    desk.at(1, ev.LoadBroke(TicketId("a1"), "out of memory", True))
    desk.gone(1, "a1")
    desk.ask(2, "a2", 40, attempt=2)
    desk.at(3, ev.LoadBroke(TicketId("a2"), "out of memory", True))
    assert isinstance(refusal(desk.ask(4, "a3", 40)), errors.ModelCoolingDown)


@pytest.mark.spec("A12")
def test_a_failed_switch_brings_back_the_model_that_made_room() -> None:
    desk = Desk(device=80)
    desk.resident(0, "a", 80)
    desk.ask(20, "b", 80)
    desk.at(21, ev.Released(TicketId("a"), "swap"))
    desk.gone(22, "a")
    decisions = desk.at(23, ev.LoadBroke(TicketId("b"), "bad weights", False))
    assert [d for d in decisions if isinstance(d, LoadModel)] == [LoadModel(HolderId("h"), "a")]


@pytest.mark.spec("A12")
def test_after_a_failure_for_memory_it_comes_back_only_if_nobody_tries_again() -> None:
    desk = Desk(device=80)
    desk.resident(0, "a", 80)
    desk.ask(20, "b", 60)
    desk.at(21, ev.Released(TicketId("a"), "swap"))
    desk.gone(22, "a")
    assert desk.at(23, ev.LoadBroke(TicketId("b"), "out of memory", True)) == [
        KillEngine(NODE, TicketId("b"))
    ]
    desk.gone(24, "b")
    assert desk.woke(28) == [LoadModel(HolderId("h"), "a")]


@pytest.mark.spec("A12")
def test_a_second_try_that_succeeds_brings_nothing_back() -> None:
    desk = Desk(device=80)
    desk.resident(0, "a", 80)
    desk.ask(20, "b", 60)
    desk.at(21, ev.Released(TicketId("a"), "swap"))
    desk.gone(22, "a")
    desk.at(23, ev.LoadBroke(TicketId("b"), "out of memory", True))
    desk.gone(24, "b")
    desk.ask(25, "b2", 60, attempt=2)
    assert desk.woke(28) == []
    desk.at(29, ev.Loaded(TicketId("b2"), seconds(3)))
    desk.at(30, ev.Released(TicketId("b2"), "manual"))
    desk.gone(31, "b2")
    assert is_granted(desk.ask(32, "b3", 60), "b3")
    assert desk.at(33, ev.LoadBroke(TicketId("b3"), "x", False)) == [
        KillEngine(NODE, TicketId("b3"))
    ]


@pytest.mark.spec("A12")
def test_an_engine_killed_while_it_loads_is_tried_once_more_and_then_cools_its_model_down() -> None:
    """Who killed it is not known: perhaps somebody from outside, perhaps its own model."""
    desk = Desk()
    desk.ask(0, "a1", 40)
    desk.gone(1, "a1")
    desk.at(1.1, ev.LoadBroke(TicketId("a1"), errors.ENGINE_DIED, False))
    assert "cool_down" not in desk.kinds() and desk.free() == 80
    assert is_granted(desk.ask(1.2, "a2", 40, attempt=2), "a2")
    desk.at(2, ev.LoadBroke(TicketId("a2"), errors.ENGINE_DIED, False))
    assert "died" in refusal(desk.ask(2.1, "a3", 1)).args[1]


@pytest.mark.spec("A12")
def test_an_engine_that_dies_while_loading_is_a_failed_load_if_its_cause_follows() -> None:
    desk = Desk()
    desk.ask(0, "a1", 40)
    desk.gone(1, "a1")
    assert desk.free() == 80
    desk.at(1.1, ev.LoadBroke(TicketId("a1"), "bad weights", False))
    assert refusal(desk.ask(1.2, "a3", 1)).args[1] == "bad weights"
    desk.ask(5, "b1", 40)
    desk.gone(6, "b1")
    desk.at(6.1, ev.LoadBroke(TicketId("b1"), "out of memory", True))
    [grant] = desk.ask(6.2, "b2", 40, attempt=2)
    assert grant.devices[0].size_bytes == gib(50)


@pytest.mark.spec("A12")
def test_a_load_that_hangs_is_ended_and_its_holder_told() -> None:
    settings = replace(PLAIN, timeouts=replace(PLAIN.timeouts, load=seconds(60)))
    desk = Desk(settings=settings)
    [grant] = desk.ask(0, "a", 40)
    assert grant.load_by == s(60)
    assert desk.woke(59.9) == []
    decisions = desk.woke(60)
    assert reaped(decisions) == ["a"]
    assert revoked(decisions) == [("a", "failed", "gone")]
    assert desk.last("load_failed").data["cause"] == "did not finish within 60 s"


@pytest.mark.spec("A17")
def test_seconds_are_learned_and_predicted() -> None:
    desk = Desk()
    [grant] = desk.ask(0, "a", 1)
    assert grant.predicted == 0
    desk.at(10, ev.Loaded(TicketId("a"), seconds(10)))
    [grant] = desk.ask(11, "a1", 1)
    assert grant.predicted == seconds(10)
    desk.at(31, ev.Loaded(TicketId("a1"), seconds(20)))
    [grant] = desk.ask(40, "a2", 1)
    assert grant.predicted == seconds(15)


@pytest.mark.spec("A17")
def test_the_error_of_each_load_is_told_once_it_was_measured_serving() -> None:
    desk = Desk()
    desk.ask(0, "a", 40)
    desk.engines["a"] = {CPU: 10}
    desk.read(1)
    desk.at(2, ev.Loaded(TicketId("a"), seconds(2)))
    desk.read(2.1)
    assert "estimate_error" not in desk.kinds()
    desk.engines["a"] = {CPU: 30}
    desk.read(3.1)
    told = desk.last("estimate_error")
    assert (told.size_bytes, told.data["error_bytes"]) == (gib(30), -gib(10))
    desk.read(4)
    assert desk.kinds().count("estimate_error") == 1


@pytest.mark.spec("A17")
def test_a_learned_peak_above_an_explicit_value_wins_and_is_told() -> None:
    desk = Desk()
    desk.resident(0, "a", 10, explicit=True)
    desk.engines["a"] = {CPU: 15}
    desk.read(1)
    desk.read(2)
    [grant] = desk.ask(3, "a1", 10, explicit=True)
    assert grant.devices[0].size_bytes == gib(15)
    assert desk.last("explicit_too_low").data["explicit_bytes"] == gib(10)
    [grant] = desk.ask(3, "a2", 20, explicit=True)
    assert grant.devices[0].size_bytes == gib(20)


@pytest.mark.spec("A17")
def test_without_an_explicit_value_what_was_learned_replaces_what_was_computed() -> None:
    desk = Desk()
    desk.resident(0, "a", 30, explicit=False)
    desk.engines["a"] = {CPU: 15}
    desk.read(1)
    desk.read(2)
    [grant] = desk.ask(3, "a1", 30, explicit=False)
    assert grant.devices[0].size_bytes == gib(15)


@pytest.mark.spec("A17")
def test_an_inexact_reading_is_charged_but_teaches_nothing() -> None:
    desk = Desk()
    desk.resident(0, "a", 10, explicit=True)
    desk.engines["a"], desk.inexact = {CPU: 15}, {"a"}
    desk.read(1)
    desk.read(2)
    assert desk.charged() == 15
    [grant] = desk.ask(3, "a1", 10, explicit=True)
    assert grant.devices[0].size_bytes == gib(10)


@pytest.mark.spec("A17", "B6")
def test_a_learned_peak_with_its_headroom_asks_at_most_for_the_whole_device() -> None:
    """It has run there, so it must not be refused as larger than the device."""
    desk = Desk(device=80, settings=replace(PLAIN, learned_headroom_fraction=0.05))
    desk.resident(0, "a", 70)
    desk.engines["a"] = {CPU: 79}
    desk.read(1)
    desk.read(2)
    desk.at(3, ev.Released(TicketId("a"), "manual"))
    desk.gone(3, "a")
    [grant] = desk.ask(4, "a1", 70)
    assert grant.devices[0].size_bytes == gib(80)


def test_a_late_message_is_counted_and_ignored() -> None:
    desk = Desk()
    before = desk.arbiter.stale_count
    for event in (
        ev.Loaded(TicketId("ghost"), seconds(1)), ev.Released(TicketId("ghost"), "swap"),
        ev.Busy(TicketId("ghost"), 1), ev.Slept(TicketId("ghost")),
        ev.EngineGone(NODE, TicketId("ghost"), True), ev.UnloadAsked(TicketId("ghost")),
    ):  # fmt: skip
        assert desk.at(0, event) == []
    assert desk.arbiter.stale_count == before + 6
    assert desk.charged(HOST) == 0


@pytest.mark.spec("A12")
@pytest.mark.parametrize(
    "end",
    [
        lambda desk: desk.at(22, ev.Withdrawn(TicketId("b"))),
        lambda desk: desk.at(22, ev.HolderLost(HolderId("h"))),
    ],
)
def test_what_made_room_for_a_load_is_forgotten_with_it(end: Any) -> None:
    desk = Desk(device=80)
    desk.resident(0, "a", 80)
    desk.ask(20, "b", 60)
    desk.at(21, ev.Released(TicketId("a"), "swap"))
    assert granted(desk.gone(21.5, "a")) == ["b"]
    assert desk.state.evicted_for
    end(desk)
    assert desk.state.evicted_for == {}


@pytest.mark.spec("A12", "A21")
def test_what_made_room_for_a_request_past_its_deadline_is_forgotten() -> None:
    desk = Desk(device=80)
    desk.resident(0, "a", 80)
    desk.ask(20, "b", 60, deadline_s=1)
    assert desk.state.evicted_for
    desk.woke(21)
    assert desk.state.evicted_for == {}


@pytest.mark.spec("B2")
def test_more_pinned_than_can_be_lent_is_an_event() -> None:
    desk = Desk(device=80, pinned="a")
    desk.resident(0, "a", 60)
    assert "pinned_overcommit" not in desk.kinds()
    desk.see_node(1, 50, 0)
    told = desk.last("pinned_overcommit")
    assert (told.size_bytes, told.data["device"]) == (gib(10), CPU)
    late = Desk(device=50, pinned="a")
    late.ask(0, "a", 60)
    assert late.last("pinned_overcommit").size_bytes == gib(10)


@pytest.mark.spec("A10")
def test_what_another_holder_says_of_a_ticket_is_stale() -> None:
    desk = Desk()
    desk.resident(0, "a", 30)
    thief, ticket = HolderId("thief"), TicketId("a")
    desk.at(1, ev.Released(ticket, "manual", thief))
    desk.at(2, ev.Withdrawn(ticket, thief))
    desk.at(3, ev.GrowthAsked(ticket, units.Bytes(1), seconds(1), thief))
    with pytest.raises(errors.TicketClosed):
        desk.at(4, ev.Requested(ticket, thief, "chat", "a", types.Need(units.Bytes(1))))
    assert desk.state_of("a") == "resident" and desk.free() == 50 and desk.arbiter.stale_count == 4


@pytest.mark.spec("A12")
def test_a_second_try_does_not_wait_for_a_cool_down_that_came_in_between() -> None:
    desk = Desk(holders=("h", "g"))
    desk.ask(0, "a1", 30)
    desk.ask(0, "a2", 30, holder="g")
    desk.at(1, ev.LoadBroke(TicketId("a1"), "out of memory", True))
    desk.gone(1, "a1")
    desk.at(1.1, ev.LoadBroke(TicketId("a2"), "no such file", False))
    desk.gone(1.1, "a2")
    assert isinstance(refusal(desk.ask(1.2, "a3", 30, holder="g")), errors.ModelCoolingDown)
    assert granted(desk.ask(1.3, "a4", 30, attempt=2)) == ["a4"]
