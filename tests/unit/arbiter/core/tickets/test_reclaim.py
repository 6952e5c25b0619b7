"""Bytes on their way back, and loads that break (A8, A10, A12). Seconds and GiB."""

import pytest

from arbiter import errors
from arbiter.core import events as ev
from arbiter.core.decisions import KillEngine
from arbiter.units import HolderId, TicketId
from tests.support.core_driver import (
    NODE,
    CoreDriver,
    gib,
    granted,
    is_granted,
    killed,
    refusal,
    revoked,
)


@pytest.mark.spec("A10")
def test_released_bytes_stay_charged_until_seen_back() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 80)
    driver.ask(20, "b", 80)
    assert driver.at(21, ev.Released(TicketId("a"), "swap")) == [KillEngine(NODE, TicketId("a"))]
    assert driver.free() == 0
    assert granted(driver.gone(22, "a", bytes_back=False)) == []
    assert driver.free() == 0
    assert granted(driver.gone(23, "a", bytes_back=True)) == ["b"]


@pytest.mark.spec("A10")
def test_kill_is_repeated_each_250_ms_then_the_holder_is_quarantined() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 30)
    driver.at(10, ev.Released(TicketId("a"), "manual"))
    kills = [t / 4 for t in range(41, 61) if killed(driver.fire_timer(t / 4))]
    assert kills == [10 + n / 4 for n in range(1, 21)]
    told = driver.last("quarantine")
    assert (told.size_bytes, told.data["holder"]) == (gib(30), "h")
    assert driver.charged() == 30  # the bytes remain on the books
    assert refusal(driver.ask(16, "b", 1)) == errors.HolderQuarantined(HolderId("h"), gib(30))


@pytest.mark.spec("A10")
def test_quarantine_refuses_queued_tickets_and_ends_when_the_bytes_are_back() -> None:
    driver = CoreDriver(device=80, holders=("h", "g"))
    driver.resident(0, "a", 80)
    driver.ask(10, "b", 80)
    driver.ask(10, "c", 80, holder="g")
    driver.at(11, ev.Released(TicketId("a"), "swap"))
    assert refusal(driver.fire_timer(16)) == errors.HolderQuarantined(HolderId("h"), gib(80))
    assert granted(driver.gone(20, "a")) == ["c"]
    driver.at(21, ev.LoadBroke(TicketId("c"), "x", False))
    driver.gone(22, "c")
    assert is_granted(driver.ask(23, "d", 80), "d")


@pytest.mark.spec("A10", "C3")
def test_bytes_a_quarantined_holder_keeps_are_not_counted_on() -> None:
    driver = CoreDriver(device=80, holders=("h", "g"))
    driver.resident(0, "a", 40)
    driver.resident(0, "b", 40, holder="g")
    driver.at(10, ev.Released(TicketId("a"), "manual"))
    assert revoked(driver.ask(11, "c", 40, holder="g")) == []  # `a` is coming back
    assert revoked(driver.fire_timer(15)) == [("b", "swap", "gone")]  # it is not


@pytest.mark.spec("A10")
def test_an_engine_that_ends_by_itself_is_off_the_books_at_once() -> None:
    driver = CoreDriver()
    driver.resident(0, "a", 40)
    driver.gone(5, "a")
    assert driver.free() == 80
    assert driver.last("model_unload").data["reason"] == "lost"
