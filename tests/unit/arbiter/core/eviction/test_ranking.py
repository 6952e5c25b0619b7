"""Request priorities (C2), at the arbiter and at the holder. Times in seconds."""

import pytest

from arbiter.core import events as ev
from arbiter.core.types import Need, Priority
from arbiter.units import Bytes, HolderId, TicketId
from deployments.config.load_plan import ModelPlan
from deployments.replica.held_model import HeldModel, HolderState
from tests.support.core_driver import CoreDriver, granted, revoked

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
    assert min(driver.wakes) <= 30 * 10**9
    assert [name for name, _, _ in revoked(driver.woke(30))] == ["a"]


@pytest.mark.spec("C2")
@pytest.mark.parametrize("keep_warm_s", [-1, 7200])
def test_model_kept_warm_for_hours_is_not_urgent_for_hours(keep_warm_s: float) -> None:
    driver = CoreDriver(device=80, keep_warm_s=keep_warm_s)
    driver.resident(0, "a", 80, priority=HIGH)
    assert revoked(driver.ask(899, "b", 80)) == []
    assert [name for name, _, _ in revoked(driver.woke(901))] == ["a"]


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


def slot() -> HeldModel:
    plan = ModelPlan("a", "m:f", {}, Need(Bytes(1)), True, "key")
    return HeldModel(plan, TicketId("a-1"), HolderState.RESIDENT)


@pytest.mark.spec("C2")
def test_a_holder_reports_the_most_urgent_in_flight_and_then_the_last() -> None:
    one = slot()
    one.enter(HIGH)
    one.enter(BATCH)
    assert one.account().priority is HIGH
    one.leave()
    one.leave()
    assert one.account().priority is HIGH
    one.enter(LOW)
    assert one.account().priority is LOW


@pytest.mark.spec("C2")
def test_only_a_more_urgent_request_for_a_queued_ticket_is_reported() -> None:
    one = slot()
    one.state = HolderState.QUEUED
    assert not one.note(NORMAL)  # it is not asked for yet
    one.demand.waiters[None] = None  # type: ignore[index]
    assert not one.note(LOW)
    assert one.note(URGENT)
    assert one.request(HolderId("h"), "text").priority is URGENT
