"""How long each kind of holder may be silent before it counts as dead, by the default times."""

from dataclasses import replace

import pytest

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.settings import Timeouts
from arbiter.units import Bytes, HolderId, NodeId, Span, TicketId, seconds
from tests.support.core_driver import CPU, PLAIN, CoreDriver, is_granted, killed, listed

DEFAULT_TIMES = replace(PLAIN, timeouts=Timeouts(), lease_tenant_fraction=1.0)
JUST_S = 0.1


def lost_after(silent_s: float, driver: CoreDriver) -> bool:
    """Ticket `a`, whose holder is silent from 5 s on, is killed after that long and not before."""
    before = killed(driver.fire_timer(5 + silent_s - JUST_S))
    return before == [] and killed(driver.fire_timer(5 + silent_s)) == ["a"]


@pytest.mark.spec("A5")
@pytest.mark.parametrize(("is_driver", "silent_s"), [(True, 10), (False, 60)])
def test_driver_is_dead_after_ten_silent_seconds_and_a_replica_after_sixty(
    is_driver: bool, silent_s: float
) -> None:
    driver = CoreDriver(settings=DEFAULT_TIMES, holders=())
    joined = ev.Joined(HolderId("h"), NodeId("n"), "text", (), is_driver=is_driver)
    driver.at(0, joined)
    driver.resident(1, "a", 30)
    driver.beat(5, "a")
    assert lost_after(silent_s, driver)
    assert driver.state_of("a") == "reclaiming" and driver.holders() == set()


@pytest.mark.spec("A15")
def test_lease_lapses_after_ten_silent_seconds() -> None:
    driver = CoreDriver(settings=DEFAULT_TIMES)
    driver.lease(0, "a", 30)
    terms = types.LeaseConditions("t", seconds(100), seconds(5))
    held = ev.HeldTicket(
        TicketId("a"), "a", types.Phase.RESIDENT, 0, Span(0), listed({CPU: 30}),
        types.Need(Bytes(0)), lease=terms,
    )  # fmt: skip
    driver.at(5, ev.Renewed(HolderId("lease:a"), (held,)))
    driver.beat(9)  # the replica of the driver goes on
    assert lost_after(10, driver)
    assert driver.state_of("a") == "reclaiming"


@pytest.mark.spec("A5")
def test_holder_silent_for_ten_seconds_is_granted_nothing() -> None:
    driver = CoreDriver(settings=DEFAULT_TIMES, holders=("h", "g"))
    driver.resident(0, "a", 80)
    driver.beat(1, "a")
    driver.ask(2, "b", 80, holder="g")
    driver.beat(11.5)
    driver.read(11.9)
    driver.at(11.9, ev.Released(TicketId("a"), "released"))
    driver.engines.clear()
    driver.gone(12, "a")
    assert driver.state_of("b") == "queued"
    assert is_granted(driver.beat(12.5, holder="g"), "b")
