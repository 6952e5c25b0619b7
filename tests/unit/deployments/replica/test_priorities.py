"""Request priorities at the holder (C2): what it says of a model that several requests use."""

import pytest

from arbiter.core.types import Need, Priority
from arbiter.units import Bytes, HolderId, TicketId
from deployments.config.load_plan import ModelPlan
from deployments.replica.held_model import HeldModel, HolderState

URGENT, HIGH, NORMAL, LOW, BATCH = Priority


def resident() -> HeldModel:
    plan = ModelPlan("a", "m:f", {}, Need(Bytes(1)), True, "key")
    return HeldModel(plan, TicketId("a-1"), HolderState.RESIDENT)


@pytest.mark.spec("C2")
def test_a_holder_reports_the_most_urgent_in_flight_and_then_the_last() -> None:
    held = resident()
    held.begin_request(HIGH)
    held.begin_request(BATCH)
    assert held.heartbeat_entry().priority is HIGH
    held.end_request()
    held.end_request()
    assert held.heartbeat_entry().priority is HIGH
    held.begin_request(LOW)
    assert held.heartbeat_entry().priority is LOW


@pytest.mark.spec("C2")
def test_only_a_more_urgent_request_for_a_queued_ticket_is_reported() -> None:
    held = resident()
    held.state = HolderState.QUEUED
    assert not held.note_request(NORMAL)  # it is not asked for yet
    held.demand.waiters[None] = None  # type: ignore[index]
    assert not held.note_request(LOW)
    assert held.note_request(URGENT)
    assert held.ticket_request(HolderId("h"), "text").priority is URGENT


@pytest.mark.spec("C11")
def test_first_request_for_a_model_that_was_brought_in_unasked_is_reported() -> None:
    held = resident()
    held.state = HolderState.QUEUED
    held.demand.is_wanted = True
    assert held.note_request(NORMAL)
    held.demand.waiters[None] = None  # type: ignore[index]
    assert not held.note_request(NORMAL)
