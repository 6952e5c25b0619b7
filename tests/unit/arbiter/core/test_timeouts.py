"""Keep-warm, replica counts, shutdown (A20, C8, H0). Times in seconds, sizes in GiB."""

import pytest

from arbiter import errors
from arbiter.core import events as ev
from arbiter.core import types
from arbiter.units import HolderId, TicketId, seconds
from tests.support.core_driver import CoreDriver, capability, gib, killed, refusal, revoked, s


@pytest.mark.spec("C8")
def test_an_idle_model_goes_after_keep_warm_since_its_last_use() -> None:
    driver = CoreDriver(keep_warm_s=60, host=80)
    driver.resident(0, "a", 10, host=5)
    driver.beat(30, "a", inflight=1)
    driver.beat(40, "a", inflight=0)
    assert driver.fire_timer(99.9) == []
    assert driver.timers == [s(100)]
    assert revoked(driver.fire_timer(100)) == [("a", "idle", "gone")]


@pytest.mark.spec("C8", "J2")
def test_a_model_that_its_holder_keeps_warm_is_not_idle_meanwhile() -> None:
    """Nothing is in flight and nothing was served since; only its idle time begins anew."""
    driver = CoreDriver(keep_warm_s=60, host=80)
    driver.resident(0, "a", 10)
    for t in (20, 40, 59):
        driver.at(t, ev.Renewed(HolderId("h"), (driver.held("a", idle_s=0),)))
    assert driver.fire_timer(118.9) == []
    assert revoked(driver.fire_timer(119)) == [("a", "idle", "gone")]


@pytest.mark.spec("C8")
@pytest.mark.parametrize(("keep_warm_s", "pinned"), [(-1, ""), (60, "a")])
def test_pinned_and_unlimited_keep_warm_models_stay(keep_warm_s: float, pinned: str) -> None:
    driver = CoreDriver(keep_warm_s=keep_warm_s, pinned=pinned)
    driver.resident(0, "a", 10)
    assert driver.fire_timer(7_000) == []
    assert driver.state_of("a") == "resident"


@pytest.mark.spec("C8")
def test_model_with_keep_warm_zero_is_unloaded_at_once_when_idle() -> None:
    driver = CoreDriver(keep_warm_s=0)
    driver.ask(0, "a", 10)
    driver.at(1, ev.Loaded(TicketId("a"), seconds(1)))
    assert driver.beat(2, "a", inflight=1) == []
    assert revoked(driver.beat(3, "a", inflight=0)) == [("a", "idle", "gone")]


@pytest.mark.spec("A6", "C8")
def test_a_model_in_use_outlives_its_keep_warm_and_one_found_busy_stays() -> None:
    driver = CoreDriver(keep_warm_s=60)
    driver.resident(0, "a", 10)
    driver.beat(30, "a", inflight=1)
    assert driver.fire_timer(500) == []
    driver.beat(501, "a", inflight=0)
    assert revoked(driver.fire_timer(561)) == [("a", "idle", "gone")]
    assert driver.at(562, ev.Busy(TicketId("a"), 1)) == []
    assert driver.state_of("a") == "resident"
    assert driver.fire_timer(700) == []


def test_changed_keep_warm_applies_to_an_idle_model() -> None:
    driver = CoreDriver(keep_warm_s=1000)
    driver.resident(0, "a", 10)
    assert driver.fire_timer(100) == []
    text = capability("text", "text", ("a",), keep_warm_s=50)
    assert revoked(driver.at(101, ev.CapabilitiesSet((text,)))) == [("a", "idle", "gone")]


@pytest.mark.spec("A20")
def test_shutdown_refuses_the_queue_and_unloads_each_model_once_idle() -> None:
    driver = CoreDriver(device=80, pinned="a")
    for name in "abc":
        driver.resident(0, name, 20)
    driver.beat(1, "b", inflight=1)
    driver.ask(1, "d", 60, deadline_s=1000)
    decisions = driver.at(2, ev.ClosingDown())
    assert refusal(decisions) == errors.ArbiterClosing()
    assert ("a", "shutdown", "gone") in revoked(decisions)
    assert driver.state_of("b") in ("resident", "draining")
    assert refusal(driver.ask(3, "e", 1)) == errors.ArbiterClosing()
    assert set(driver.arbiter.replica_targets(s(3)).values()) == {0}


@pytest.mark.spec("A20")
def test_a_model_in_use_at_shutdown_leaves_when_idle_and_at_the_latest_at_the_bound() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 20)
    driver.resident(0, "b", 20)
    driver.beat(1, "a", "b", inflight=1)
    assert driver.at(2, ev.ClosingDown()) == []
    held = [driver.held(n, inflight=i) for n, i in (("a", 0), ("b", 1))]
    decisions = driver.at(3, ev.Renewed(HolderId("h"), tuple(held)))
    assert revoked(decisions) == [("a", "shutdown", "gone")]
    assert driver.fire_timer(31.9) == []
    assert set(killed(driver.fire_timer(32))) == {"a", "b"}
    driver.gone(33, "a")
    driver.gone(33, "b")
    assert driver.arbiter.snapshot(s(33)).tickets == ()
    assert driver.charged() == 0
    assert gib(80) == driver.account("n/cpu:0").free_bytes


def test_asleep_model_is_killed_at_shutdown() -> None:
    driver = CoreDriver(device=80, host=80, known=("h",), holders=())
    driver.host_sizes["a"] = 20
    driver.join(0, "h", driver.held("a", types.Phase.ASLEEP, size=30))
    assert killed(driver.at(1, ev.ClosingDown())) == ["a"]


@pytest.mark.spec("C8")
def test_missed_timer_is_set_again_by_the_audit() -> None:
    driver = CoreDriver(keep_warm_s=60, host=80)
    driver.resident(0, "a", 10, host=5)
    driver.lose_timers(next_audit_s=60)  # all of them, lost
    driver.fire_timer(60)
    assert revoked(driver.fire_timer(61)) == [("a", "idle", "gone")]
