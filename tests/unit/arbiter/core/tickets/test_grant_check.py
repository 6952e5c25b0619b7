"""What the arbiter says when a node agent asks whether it may spawn an engine under a ticket."""

import pytest

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.types import GrantCheck
from arbiter.units import NodeId, TicketId, seconds
from tests.support.core_driver import NODE, CoreDriver

pytestmark = pytest.mark.spec("A3")
A, B = TicketId("a"), TicketId("b")


def check(driver: CoreDriver, ticket: TicketId, node: NodeId = NODE) -> GrantCheck:
    return driver.arbiter.check_grant(ticket, node)


def test_ticket_may_have_an_engine_from_its_grant_to_its_release() -> None:
    driver = CoreDriver(device=80)
    driver.read(6)
    assert check(driver, A) is GrantCheck.NOT_GRANTED
    driver.ask(7, "a", 60)
    assert check(driver, A) is GrantCheck.GRANTED
    driver.at(8, ev.Loaded(A, seconds(1)))
    assert check(driver, A) is GrantCheck.GRANTED  # its engine may be replaced (A14)
    driver.at(9, ev.Released(A, "manual"))
    assert check(driver, A) is GrantCheck.ENDED
    driver.gone(10, "a")
    assert check(driver, A) is GrantCheck.ENDED


def test_queued_ticket_may_not_have_an_engine() -> None:
    driver = CoreDriver(device=80)
    driver.ask(1, "a", 60)  # it loads, so it cannot make room
    driver.ask(2, "b", 60)
    assert driver.state_of("b") == "queued"
    assert check(driver, B) is GrantCheck.NOT_GRANTED


def test_grant_is_for_one_node() -> None:
    driver = CoreDriver(device=80)
    driver.ask(1, "a", 60)
    assert check(driver, A, NodeId("other")) is GrantCheck.NOT_GRANTED


def test_lease_has_no_engine() -> None:
    driver = CoreDriver(device=80)
    driver.lease(1, "a", 10)
    assert driver.state_of("a") != "queued"
    assert check(driver, A) is GrantCheck.NOT_GRANTED


@pytest.mark.spec("A18")
def test_grant_of_the_last_epoch_counts_once_its_holder_has_rejoined() -> None:
    driver = CoreDriver(known=("h",), holders=())
    assert check(driver, A) is GrantCheck.SETTLING
    driver.join(1, "h", driver.held("a", types.Phase.LOADING, model="a", size=10))
    assert check(driver, A) is GrantCheck.GRANTED
    driver.read(6)
    assert check(driver, B) is GrantCheck.NOT_GRANTED


@pytest.mark.spec("A18")
def test_load_goes_on_though_the_arbiter_lost_its_state_file_once_its_holder_has_rejoined() -> None:
    driver = CoreDriver(holders=())
    driver.read(4)
    assert check(driver, A) is GrantCheck.SETTLING, "its agent asks again"
    driver.join(4.5, "h", driver.held("a", types.Phase.LOADING, model="a", size=10))
    assert check(driver, A) is GrantCheck.GRANTED
    driver.read(5)
    assert check(driver, B) is GrantCheck.NOT_GRANTED
