"""Loads that fail, hang or need more memory than planned."""

from dataclasses import replace
from typing import Any

import pytest

from arbiter import errors
from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Grant, KillEngine, LoadModel
from arbiter.units import GIB, HolderId, TicketId, in_seconds, seconds
from tests.support.core_driver import (
    CPU,
    NODE,
    PLAIN,
    CoreDriver,
    gib,
    granted,
    is_granted,
    killed,
    refusal,
    revoked,
    s,
)


@pytest.mark.spec("A12")
def test_failed_load_cools_the_model_down_and_refuses_its_queued_tickets() -> None:
    driver = CoreDriver(device=80)
    driver.ask(0, "a1", 80)
    driver.ask(0, "a2", 80)
    driver.ask(0, "b", 80)
    decisions = driver.at(1, ev.LoadBroke(TicketId("a1"), "bad weights", False))
    assert killed(decisions) == ["a1"]
    assert refusal(decisions) == errors.LoadFailed("a", "bad weights", False)
    assert driver.charged() == 80
    assert granted(driver.gone(2, "a1")) == ["b"]
    assert refusal(driver.ask(2, "a3", 1)) == errors.ModelCoolingDown("a", "bad weights", 1.0)


def settled_gib(driver: CoreDriver, t: float) -> float:
    """Of the one ticket that it has."""
    [ticket] = driver.arbiter.snapshot(s(t)).tickets
    return ticket.settled_bytes / GIB


@pytest.mark.spec("A17", "D7")
def test_load_that_no_request_waits_for_has_no_first_use() -> None:
    driver = CoreDriver(device=80)
    driver.at(0, ev.LoadAsked("text", "a"))
    assert is_granted(driver.ask(0, "a", 20, explicit=False), "a")
    driver.at(1, ev.Loaded(TicketId("a"), seconds(1), is_used=False))
    ticket = driver.ticket("a")
    assert ticket.inflight == 1  # until its holder says otherwise
    driver.beat(2, "a")
    driver.engines["a"] = {CPU: 10}
    for t in (3, 4, 5):
        driver.read(t)
    assert (ticket.uses_count, settled_gib(driver, 5)) == (0, 0)
    driver.at(6, ev.Renewed(HolderId("h"), (replace(driver.held("a", t=6), uses_count=1),)))
    driver.read(7)
    assert (ticket.uses_count, settled_gib(driver, 7)) == (1, 10)


@pytest.mark.spec("A17", "D7")
def test_uses_of_a_load_whose_end_only_a_heartbeat_tells_are_the_holder_s() -> None:
    driver = CoreDriver(device=80)
    driver.ask(0, "a", 20)
    driver.ask(0, "b", 20)
    told = [
        replace(driver.held(name, types.Phase.RESIDENT), uses_count=uses_count)
        for name, uses_count in (("a", 0), ("b", 2))
    ]
    driver.at(20, ev.Renewed(HolderId("h"), tuple(told)))
    assert [driver.state_of("a"), driver.state_of("b")] == ["resident", "resident"]
    assert [driver.ticket("a").uses_count, driver.ticket("b").uses_count] == [0, 2]


@pytest.mark.spec("A12")
def test_what_left_for_a_ticket_that_another_load_s_failure_refuses_is_loaded_again() -> None:
    driver = CoreDriver(device=80, holders=("h", "g"))
    driver.resident(0, "c", 60)
    driver.ask(20, "a1", 20)
    assert revoked(driver.ask(20, "a2", 60, holder="g")) == [("c", "swap", "gone")]
    decisions = driver.at(21, ev.LoadBroke(TicketId("a1"), "bad weights", False))
    assert refusal(decisions) == errors.LoadFailed("a", "bad weights", False)
    assert LoadModel(HolderId("h"), "c") in decisions


@pytest.mark.spec("A12")
def test_cool_down_grows_with_repeats_up_to_a_bound_and_is_cleared_by_success() -> None:
    driver = CoreDriver()
    t, pauses = 0.0, []
    for number in range(10):
        assert is_granted(driver.ask(t, f"a{number}", 1), f"a{number}")
        driver.at(t, ev.LoadBroke(TicketId(f"a{number}"), "x", False))
        driver.gone(t, f"a{number}")
        pauses.append(in_seconds(driver.last("cool_down").took))
        t += pauses[-1]
    assert pauses == [2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    assert is_granted(driver.ask(t, "a", 1), "a")
    driver.at(t, ev.Loaded(TicketId("a"), seconds(1)))
    assert is_granted(driver.ask(t, "a99", 1), "a99")
    driver.at(t, ev.LoadBroke(TicketId("a99"), "x", False))
    assert in_seconds(driver.last("cool_down").took) == 2


@pytest.mark.spec("A12", "A17")
def test_a_load_that_failed_for_memory_is_retried_at_once_and_asks_for_more() -> None:
    driver = CoreDriver(device=80)
    driver.ask(0, "a1", 40)
    driver.ask(0, "a2", 50)
    decisions = driver.at(1, ev.LoadBroke(TicketId("a1"), "out of memory", True))
    assert "cool_down" not in driver.kinds()
    assert decisions == [KillEngine(NODE, TicketId("a1"))]
    driver.at(1, ev.Withdrawn(TicketId("a2")))
    driver.gone(1, "a1")
    [grant] = driver.ask(2, "a3", 40, attempt=2)
    assert isinstance(grant, Grant)
    assert grant.devices[0].size_bytes == gib(50)


@pytest.mark.spec("A12")
def test_queued_ticket_of_a_model_that_ran_out_of_memory_asks_for_more_too() -> None:
    driver = CoreDriver(device=80)
    driver.ask(0, "a1", 40)
    driver.ask(0, "a2", 44)
    driver.at(1, ev.LoadBroke(TicketId("a1"), "out of memory", True))
    [grant] = [d for d in driver.gone(2, "a1") if isinstance(d, Grant)]
    assert grant.devices[0].size_bytes == gib(50)


@pytest.mark.spec("A12")
def test_a_correction_asks_at_most_for_the_whole_device() -> None:
    driver = CoreDriver(device=80)
    driver.ask(0, "a1", 70)
    driver.at(1, ev.LoadBroke(TicketId("a1"), "out of memory", True))
    driver.gone(1, "a1")
    [grant] = driver.ask(2, "a2", 70, attempt=2)
    assert grant.devices[0].size_bytes == gib(80)


@pytest.mark.spec("A12")
def test_second_out_of_memory_failure_is_a_failed_load() -> None:
    driver = CoreDriver(device=80)
    driver.ask(0, "a1", 40)
    driver.at(1, ev.LoadBroke(TicketId("a1"), "out of memory", True))
    driver.gone(1, "a1")
    driver.ask(2, "a2", 40, attempt=2)
    driver.at(3, ev.LoadBroke(TicketId("a2"), "out of memory", True))
    assert isinstance(refusal(driver.ask(4, "a3", 40)), errors.ModelCoolingDown)


@pytest.mark.spec("A12")
def test_failed_swap_reloads_the_evicted_model() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 80)
    driver.ask(20, "b", 80)
    driver.at(21, ev.Released(TicketId("a"), "swap"))
    driver.gone(22, "a")
    decisions = driver.at(23, ev.LoadBroke(TicketId("b"), "bad weights", False))
    assert [d for d in decisions if isinstance(d, LoadModel)] == [LoadModel(HolderId("h"), "a")]


@pytest.mark.spec("A12", "A18")
def test_evicted_model_is_asked_for_again_when_its_holder_joins_again_or_is_lost() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 80)
    driver.join(19, "g", capability="embedding")
    driver.ask(20, "e1", 80, holder="g", capability="embedding", model="e1")
    driver.at(21, ev.Released(TicketId("a"), "swap"))
    driver.gone(22, "a")
    driver.at(23, ev.LoadBroke(TicketId("e1"), "bad weights", False))
    driver.gone(23, "e1")
    assert driver.join(24, "h") == [LoadModel(HolderId("h"), "a")]
    driver.join(25, "h2")
    assert driver.at(26, ev.HolderLost(HolderId("h"))) == [LoadModel(HolderId("h2"), "a")]


@pytest.mark.spec("A12")
def test_evicted_model_is_reloaded_after_out_of_memory_only_without_a_second_try() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 80)
    driver.ask(20, "b", 60)
    driver.at(21, ev.Released(TicketId("a"), "swap"))
    driver.gone(22, "a")
    assert driver.at(23, ev.LoadBroke(TicketId("b"), "out of memory", True)) == [
        KillEngine(NODE, TicketId("b"))
    ]
    driver.gone(24, "b")
    assert driver.fire_timer(28) == [LoadModel(HolderId("h"), "a")]


@pytest.mark.spec("A12")
def test_second_try_that_succeeds_reloads_no_evicted_model() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 80)
    driver.ask(20, "b", 60)
    driver.at(21, ev.Released(TicketId("a"), "swap"))
    driver.gone(22, "a")
    driver.at(23, ev.LoadBroke(TicketId("b"), "out of memory", True))
    driver.gone(24, "b")
    driver.ask(25, "b2", 60, attempt=2)
    assert driver.fire_timer(28) == []
    driver.at(29, ev.Loaded(TicketId("b2"), seconds(3)))
    driver.at(30, ev.Released(TicketId("b2"), "manual"))
    driver.gone(31, "b2")
    assert is_granted(driver.ask(32, "b3", 60), "b3")
    assert driver.at(33, ev.LoadBroke(TicketId("b3"), "x", False)) == [
        KillEngine(NODE, TicketId("b3"))
    ]


@pytest.mark.spec("A12")
def test_engine_killed_while_loading_is_retried_once_then_its_model_cools_down() -> None:
    """Who killed it is not known: perhaps somebody from outside, perhaps its own model."""
    driver = CoreDriver()
    driver.ask(0, "a1", 40)
    driver.gone(1, "a1")
    driver.at(1.1, ev.LoadBroke(TicketId("a1"), errors.ENGINE_DIED, False))
    assert "cool_down" not in driver.kinds() and driver.free() == 80
    assert is_granted(driver.ask(1.2, "a2", 40, attempt=2), "a2")
    driver.at(2, ev.LoadBroke(TicketId("a2"), errors.ENGINE_DIED, False))
    assert "died" in refusal(driver.ask(2.1, "a3", 1)).args[1]


@pytest.mark.spec("D5", "A12")
def test_load_whose_files_were_replaced_is_retried_once_then_its_model_cools_down() -> None:
    driver = CoreDriver()
    driver.ask(0, "a1", 40)
    driver.at(1, ev.LoadBroke(TicketId("a1"), errors.FILES_REPLACED, False))
    driver.gone(1.1, "a1")
    assert "cool_down" not in driver.kinds()
    assert is_granted(driver.ask(1.2, "a2", 40, attempt=2), "a2")
    driver.at(2, ev.LoadBroke(TicketId("a2"), errors.FILES_REPLACED, False))
    assert "replaced" in refusal(driver.ask(2.1, "a3", 1)).args[1]


@pytest.mark.spec("A12")
def test_an_engine_that_dies_while_loading_is_a_failed_load_if_its_cause_follows() -> None:
    driver = CoreDriver()
    driver.ask(0, "a1", 40)
    driver.gone(1, "a1")
    assert driver.free() == 80
    driver.at(1.1, ev.LoadBroke(TicketId("a1"), "bad weights", False))
    assert refusal(driver.ask(1.2, "a3", 1)).args[1] == "bad weights"
    driver.ask(5, "b1", 40)
    driver.gone(6, "b1")
    driver.at(6.1, ev.LoadBroke(TicketId("b1"), "out of memory", True))
    [grant] = driver.ask(6.2, "b2", 40, attempt=2)
    assert grant.devices[0].size_bytes == gib(50)


@pytest.mark.spec("A12")
def test_hanging_load_is_killed_and_its_holder_is_revoked() -> None:
    settings = replace(PLAIN, timeouts=replace(PLAIN.timeouts, load=seconds(60)))
    driver = CoreDriver(settings=settings)
    [grant] = driver.ask(0, "a", 40)
    assert grant.load_by == s(60)
    assert driver.fire_timer(59.9) == []
    decisions = driver.fire_timer(60)
    assert killed(decisions) == ["a"]
    assert revoked(decisions) == [("a", "failed", "gone")]
    assert driver.last("load_failed").data["cause"] == "did not finish within 60 s"


@pytest.mark.spec("A17")
def test_load_seconds_are_learned_and_predicted() -> None:
    driver = CoreDriver()
    [grant] = driver.ask(0, "a", 1)
    assert grant.predicted == 0
    driver.at(10, ev.Loaded(TicketId("a"), seconds(10)))
    [grant] = driver.ask(11, "a1", 1)
    assert grant.predicted == seconds(10)
    driver.at(31, ev.Loaded(TicketId("a1"), seconds(20)))
    [grant] = driver.ask(40, "a2", 1)
    assert grant.predicted == seconds(15)


@pytest.mark.spec("A17")
def test_estimate_error_of_a_load_is_reported_once_measured_while_serving() -> None:
    driver = CoreDriver()
    driver.ask(0, "a", 40)
    driver.engines["a"] = {CPU: 10}
    driver.read(1)
    driver.at(2, ev.Loaded(TicketId("a"), seconds(2)))
    driver.read(2.1)
    assert "estimate_error" not in driver.kinds()
    driver.engines["a"] = {CPU: 30}
    driver.read(3.1)
    told = driver.last("estimate_error")
    assert (told.size_bytes, told.data["error_bytes"]) == (gib(30), -gib(10))
    driver.read(4)
    assert driver.kinds().count("estimate_error") == 1


@pytest.mark.spec("A17")
def test_learned_peak_above_an_explicit_value_wins_and_is_reported() -> None:
    driver = CoreDriver()
    driver.resident(0, "a", 10, explicit=True)
    driver.engines["a"] = {CPU: 15}
    driver.read(1)
    driver.read(2)
    [grant] = driver.ask(3, "a1", 10, explicit=True)
    assert grant.devices[0].size_bytes == gib(15)
    assert driver.last("explicit_too_low").data["explicit_bytes"] == gib(10)
    [grant] = driver.ask(3, "a2", 20, explicit=True)
    assert grant.devices[0].size_bytes == gib(20)


@pytest.mark.spec("A17")
def test_learned_size_replaces_the_computed_one_without_an_explicit_need() -> None:
    driver = CoreDriver()
    driver.resident(0, "a", 30, explicit=False)
    driver.engines["a"] = {CPU: 15}
    driver.read(1)
    driver.read(2)
    [grant] = driver.ask(3, "a1", 30, explicit=False)
    assert grant.devices[0].size_bytes == gib(15)


@pytest.mark.spec("A17")
def test_an_inexact_reading_is_charged_but_teaches_nothing() -> None:
    driver = CoreDriver()
    driver.resident(0, "a", 10, explicit=True)
    driver.engines["a"], driver.inexact = {CPU: 15}, {"a"}
    driver.read(1)
    driver.read(2)
    assert driver.charged() == 15
    [grant] = driver.ask(3, "a1", 10, explicit=True)
    assert grant.devices[0].size_bytes == gib(10)


@pytest.mark.spec("A17", "B6")
def test_a_learned_peak_with_its_headroom_asks_at_most_for_the_whole_device() -> None:
    """It has run there, so it must not be refused as larger than the device."""
    driver = CoreDriver(device=80, settings=replace(PLAIN, learned_headroom_fraction=0.05))
    driver.resident(0, "a", 70)
    driver.engines["a"] = {CPU: 79}
    driver.read(1)
    driver.read(2)
    driver.at(3, ev.Released(TicketId("a"), "manual"))
    driver.gone(3, "a")
    [grant] = driver.ask(4, "a1", 70)
    assert grant.devices[0].size_bytes == gib(80)


@pytest.mark.spec("A12")
@pytest.mark.parametrize(
    "end",
    [
        lambda driver: driver.at(22, ev.Withdrawn(TicketId("b"))),
        lambda driver: driver.at(22, ev.HolderLost(HolderId("h"))),
    ],
)
def test_record_of_the_evicted_model_ends_with_the_load(end: Any) -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 80)
    driver.ask(20, "b", 60)
    driver.at(21, ev.Released(TicketId("a"), "swap"))
    assert granted(driver.gone(21.5, "a")) == ["b"]
    assert driver.evicted_for()
    end(driver)
    assert driver.evicted_for() == {}


@pytest.mark.spec("A12", "A21")
def test_record_of_the_evicted_model_ends_with_the_deadline_of_its_asker() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 80)
    driver.ask(20, "b", 60, deadline_s=1)
    assert driver.evicted_for()
    driver.fire_timer(21)
    assert driver.evicted_for() == {}


@pytest.mark.spec("A12")
def test_a_second_try_does_not_wait_for_a_cool_down_that_came_in_between() -> None:
    driver = CoreDriver(holders=("h", "g"))
    driver.ask(0, "a1", 30)
    driver.ask(0, "a2", 30, holder="g")
    driver.at(1, ev.LoadBroke(TicketId("a1"), "out of memory", True))
    driver.gone(1, "a1")
    driver.at(1.1, ev.LoadBroke(TicketId("a2"), "no such file", False))
    driver.gone(1.1, "a2")
    assert isinstance(refusal(driver.ask(1.2, "a3", 30, holder="g")), errors.ModelCoolingDown)
    assert granted(driver.ask(1.3, "a4", 30, attempt=2)) == ["a4"]
