"""Queued tickets steered by hand (K4). Times in seconds, sizes in GiB."""

import pytest

from arbiter import errors
from arbiter.core import events as ev
from arbiter.core.types import Priority
from arbiter.units import TicketId
from tests.support.core_driver import CoreDriver, granted, refusal, s

A, B, C = (TicketId(name) for name in "abc")


def waiting() -> CoreDriver:
    """`a` holds the device; `b` waits before `c`."""
    driver = CoreDriver(device=80)
    driver.ask(0, "a", 80)
    driver.ask(1, "b", 80)
    driver.ask(2, "c", 80)
    return driver


@pytest.mark.spec("K4", "C6")
def test_a_raised_ticket_is_granted_before_the_others() -> None:
    driver = waiting()
    driver.at(3, ev.PriorityRaised(C, Priority.HIGH))
    assert [row.priority for row in driver.arbiter.snapshot(s(3)).queue] == ["high", "normal"]
    assert granted(driver.gone(4, "a")) == ["c"]


@pytest.mark.spec("K4")
def test_a_ticket_is_never_lowered_by_hand() -> None:
    driver = waiting()
    assert driver.at(3, ev.PriorityRaised(B, Priority.BATCH)) == []
    assert granted(driver.gone(4, "a")) == ["b"]


@pytest.mark.spec("K4")
def test_a_cancelled_ticket_is_refused_for_good_and_the_next_is_granted() -> None:
    driver = waiting()
    assert refusal(driver.at(3, ev.CancelAsked(B))) == errors.RequestCancelled(B)
    assert refusal(driver.ask(4, "b", 80)) == errors.RequestCancelled(B)
    assert granted(driver.gone(5, "a")) == ["c"]


@pytest.mark.spec("K4")
@pytest.mark.parametrize("steer", [ev.CancelAsked, lambda t: ev.PriorityRaised(t, Priority.HIGH)])
def test_what_does_not_wait_is_not_steered(steer: type[ev.CancelAsked]) -> None:
    driver = waiting()
    with pytest.raises(errors.TicketNotQueued, match="it is loading"):
        driver.at(3, steer(A))
    with pytest.raises(errors.UnknownTicket):
        driver.at(3, steer(TicketId("ghost")))
