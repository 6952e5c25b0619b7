"""Late and foreign messages are counted and ignored."""

import pytest

from arbiter import errors, units
from arbiter.core import events as ev
from arbiter.core import types
from arbiter.units import HolderId, TicketId, seconds
from tests.support.core_driver import (
    HOST,
    NODE,
    CoreDriver,
)


def test_a_late_message_is_counted_and_ignored() -> None:
    driver = CoreDriver()
    before = driver.arbiter.stale_count
    for event in (
        ev.Loaded(TicketId("ghost"), seconds(1)), ev.Released(TicketId("ghost"), "swap"),
        ev.Busy(TicketId("ghost"), 1), ev.Slept(TicketId("ghost")),
        ev.EngineGone(NODE, TicketId("ghost"), True), ev.UnloadAsked(TicketId("ghost")),
    ):  # fmt: skip
        assert driver.at(0, event) == []
    assert driver.arbiter.stale_count == before + 6
    assert driver.charged(HOST) == 0


@pytest.mark.spec("A10")
def test_message_of_another_holder_about_a_ticket_is_stale() -> None:
    driver = CoreDriver()
    driver.resident(0, "a", 30)
    thief, ticket = HolderId("thief"), TicketId("a")
    driver.at(1, ev.Released(ticket, "manual", thief))
    driver.at(2, ev.Withdrawn(ticket, thief))
    with pytest.raises(errors.TicketClosed):
        driver.at(3, ev.GrowthAsked(ticket, units.Bytes(1), seconds(1), thief))
    with pytest.raises(errors.TicketClosed):
        driver.at(4, ev.Requested(ticket, thief, "chat", "a", types.Need(units.Bytes(1))))
    assert (
        driver.state_of("a") == "resident"
        and driver.free() == 50
        and driver.arbiter.stale_count == 4
    )
