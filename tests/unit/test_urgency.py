"""Request priorities (SPEC C2), at the arbiter and at the holder. Times in seconds."""

import pytest

from arbiter.core import events as ev
from arbiter.core.types import Need, Priority
from arbiter.units import Bytes, HolderId, TicketId
from deployments.config.load_plan import ModelPlan
from deployments.replica.held_model import HeldModel, HolderState
from tests.unit.desk import Desk, granted, revoked

URGENT, HIGH, NORMAL, LOW, BATCH = Priority


@pytest.mark.spec("C2")
def test_priorities_have_the_numbers_of_the_specification() -> None:
    assert [int(p) for p in Priority] == [1, 5, 10, 20, 40]


@pytest.mark.spec("C2")
@pytest.mark.parametrize("resident", Priority)
@pytest.mark.parametrize("asker", Priority)
def test_a_victim_is_never_more_urgent_than_the_asker(resident: Priority, asker: Priority) -> None:
    desk = Desk(device=80)
    desk.resident(0, "a", 80, priority=resident)
    went = revoked(desk.ask(20, "b", 80, priority=asker))
    assert went == ([("a", "swap", "gone")] if asker <= resident else [])


@pytest.mark.spec("C2")
def test_the_least_urgent_goes_first_whatever_its_role_and_its_last_use() -> None:
    desk = Desk(device=80)
    desk.resident(0, "e1", 40, capability="embedding", model="e1", priority=NORMAL)
    desk.resident(10, "a", 40, priority=BATCH)
    assert revoked(desk.ask(20, "b", 40)) == [("a", "swap", "gone")]


@pytest.mark.spec("C2", "C4")
def test_equals_wait_for_the_minimum_residency_and_the_more_urgent_do_not() -> None:
    desk = Desk(device=80)
    desk.ask(0, "a", 80)
    desk.at(5, ev.Loaded(TicketId("a"), 5 * 10**9))
    desk.beat(5, "a")
    assert desk.ask(6, "b", 80) == []
    assert revoked(desk.ask(7, "c", 80, priority=HIGH)) == [("a", "swap", "gone")]


@pytest.mark.spec("C2")
def test_a_model_counts_as_batch_when_its_keep_warm_seconds_have_passed() -> None:
    desk = Desk(device=80, keep_warm_s=30)
    desk.resident(0, "a", 80, priority=URGENT)
    desk.state.ledger.find(TicketId("a")).declined_until = 10**12  # so that it stays when unused
    assert desk.ask(20, "b", 80, priority=LOW) == []
    desk.state.ledger.find(TicketId("a")).declined_until = 0
    assert min(desk.wakes) <= 30 * 10**9
    assert [name for name, _, _ in revoked(desk.woke(30))] == ["a"]


@pytest.mark.spec("C2")
@pytest.mark.parametrize("keep_warm_s", [-1, 7200])
def test_kept_warm_for_hours_does_not_mean_urgent_for_hours(keep_warm_s: float) -> None:
    desk = Desk(device=80, keep_warm_s=keep_warm_s)
    desk.resident(0, "a", 80, priority=HIGH)
    assert revoked(desk.ask(899, "b", 80)) == []
    assert [name for name, _, _ in revoked(desk.woke(901))] == ["a"]


@pytest.mark.spec("C2")
def test_in_use_it_keeps_the_priority_of_its_request_however_long() -> None:
    desk = Desk(device=80, keep_warm_s=30)
    desk.resident(0, "a", 80, priority=HIGH)
    desk.beat(1, "a", inflight=1)
    assert desk.ask(100, "b", 80) == []
    assert revoked(desk.ask(101, "c", 80, priority=HIGH)) == [("a", "swap", "gone")]


@pytest.mark.spec("C2")
def test_the_priority_of_later_requests_comes_with_the_heartbeat() -> None:
    desk = Desk(device=80)
    desk.resident(0, "a", 80)
    held = desk.held("a")
    urgent = ev.HeldTicket(
        held.ticket, held.model, held.phase, 0, held.idle, held.devices, held.need, "", URGENT
    )
    desk.at(5, ev.Renewed(HolderId("h"), (urgent,)))
    assert desk.ask(20, "b", 80, priority=HIGH) == []
    assert revoked(desk.ask(21, "c", 80, priority=URGENT)) == [("a", "swap", "gone")]


@pytest.mark.spec("C6")
def test_the_line_is_served_by_urgency_then_by_arrival() -> None:
    desk = Desk(device=80)
    desk.ask(0, "a", 80)
    for t, (name, priority) in enumerate({"b": LOW, "c": NORMAL, "d": NORMAL, "e": HIGH}.items()):
        desk.ask(t + 1, name, 40, priority=priority)
    desk.at(6, ev.LoadBroke(TicketId("a"), "x", False))
    assert granted(desk.gone(7, "a")) == ["e", "c"]


@pytest.mark.spec("C6")
def test_a_ticket_that_waits_moves_up_when_somebody_more_urgent_joins_it() -> None:
    desk = Desk(device=80)
    desk.ask(0, "a", 80)
    desk.ask(1, "b", 40)
    desk.ask(2, "c", 50, priority=LOW)
    desk.ask(3, "c", 50, priority=URGENT)
    desk.at(6, ev.LoadBroke(TicketId("a"), "x", False))
    assert granted(desk.gone(7, "a")) == ["c"]


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
def test_only_a_more_urgent_request_for_a_waiting_ticket_must_be_told() -> None:
    one = slot()
    one.life = HolderState.QUEUED
    assert not one.note(NORMAL)  # it is not asked for yet
    one.waiters[None] = None  # type: ignore[index]
    assert not one.note(LOW)
    assert one.note(URGENT)
    assert one.asks(HolderId("h"), "text").priority is URGENT
