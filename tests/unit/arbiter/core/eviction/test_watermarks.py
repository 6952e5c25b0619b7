"""Watermarks of host RAM and of devices: high and low, and nothing in between."""

from dataclasses import replace

import pytest

from arbiter import units
from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.settings import DEFAULTS, Settings, Watermarks
from arbiter.units import TicketId, seconds
from deployments.config.arbiter_section import ArbiterConfig
from tests.support.core_driver import CPU, HOST, PLAIN, CoreDriver, granted, killed, revoked
from tests.support.gpu_driver import GpuDriver

pytestmark = pytest.mark.spec("C4")
MARKED = replace(PLAIN, device_marks=Watermarks(0.90, 0.80))


def fall_asleep(driver: CoreDriver, t: float, name: str, size: float) -> list[str]:
    """It is loaded and put to sleep for another. Whose engine is ended when it sleeps."""
    driver.resident(t, name, size, host=size)
    driver.engines[name] = {CPU: size}
    driver.read(t + 1)
    other = f"other-{name}"
    assert revoked(driver.ask(t + 20, other, 80, model="large")) == [(name, "swap", "asleep")]
    driver.at(t + 20, ev.Withdrawn(TicketId(other)))
    driver.engines[name] = {HOST: size}
    driver.at(t + 21, ev.Slept(TicketId(name)))
    out = driver.read(t + 22)
    assert driver.state_of(name) == "asleep"
    return killed(out)


def asleep(host: float, sizes: dict[str, float]) -> tuple[CoreDriver, list[str]]:
    driver, gone = CoreDriver(device=80, host=host), []
    for number, (name, size) in enumerate(sizes.items()):
        gone += fall_asleep(driver, 100 * number, name, size)
        for ended in gone:
            driver.gone(100 * number + 30, ended)
    return driver, gone


def test_asleep_models_above_the_high_mark_are_killed_down_to_the_low_mark() -> None:
    driver, gone = asleep(100, {"a": 10, "b": 10, "c": 10, "d": 10, "e": 58})
    assert gone == ["a", "b"]  # 98 of 100: without the one it is 88 yet, without both 78
    assert [driver.state_of(name) for name in "cde"] == ["asleep"] * 3
    assert driver.charged(HOST) == 78
    assert driver.last("eviction").data["reason"] == "fit"


def test_host_ram_between_the_marks_evicts_nothing() -> None:
    driver, gone = asleep(100, {"a": 30, "b": 30, "c": 30})
    assert gone == [] and driver.charged(HOST) == 90


def test_last_model_to_fall_asleep_stays_even_alone_above_the_mark() -> None:
    driver, gone = asleep(32, {"a": 31})
    assert gone == [] and driver.state_of("a") == "asleep"
    driver, gone = asleep(100, {"a": 15, "b": 80})
    assert gone == ["a"] and driver.state_of("b") == "asleep"


def test_asleep_model_with_a_queued_wake_is_not_evicted_by_watermarks() -> None:
    driver, _ = asleep(100, {"a": 40, "b": 40})
    driver.ask(300, "large", 80)  # so that there is no room to wake in
    driver.at(301, ev.Loaded(TicketId("large"), seconds(1)))
    driver.ask(302, "a", 40, host=40)
    driver.foreign[HOST] = 15  # 95 of 100
    assert killed(driver.read(303)) == [] and driver.state_of("a") == "asleep"


def test_host_reservation_of_a_draining_ticket_counts_once_it_is_asleep() -> None:
    driver, _ = asleep(100, {"a": 40, "b": 30})
    driver.resident(300, "c", 25, host=25)
    driver.engines["c"] = {CPU: 25}
    assert revoked(driver.ask(320, "other", 80, model="large")) == [("c", "swap", "asleep")]
    assert driver.charged(HOST) == 95 and driver.state_of("a") == driver.state_of("b") == "asleep"
    assert killed(driver.at(321, ev.BarrierDropped(TicketId("c"), 1))) == []


# -- devices --------------------------------------------------------------------------------------


NAMES = "a b c d e large small text".split()


def filled_driver(settings: Settings) -> CoreDriver:
    """76 of 80; all idle for long."""
    driver = CoreDriver(device=80, settings=settings)
    for at, name in enumerate(NAMES):
        driver.resident(at, name, 9.5)
    driver.fire_timer(50)
    return driver


def test_device_watermarks_are_off_by_default() -> None:
    assert DEFAULTS.device_marks is None and ArbiterConfig().as_settings() == DEFAULTS
    assert revoked(filled_driver(PLAIN).ask(100, "vad", 6)) == [("a", "swap", "gone")]


def test_device_watermarks_act_for_a_queued_ticket_and_evict_to_the_low_mark() -> None:
    driver = filled_driver(MARKED)
    assert all(driver.state_of(name) == "resident" for name in NAMES)
    assert revoked(driver.ask(100, "vad", 6)) == [("a", "swap", "gone"), ("b", "swap", "gone")]
    assert driver.fire_timer(101) == []
    driver.at(102, ev.Released(TicketId("a"), "swap"))
    assert granted(driver.gone(103, "a")) == ["vad"]


def test_device_watermarks_act_for_growth() -> None:
    driver = filled_driver(MARKED)
    grow = ev.GrowthAsked(TicketId("text"), units.Bytes(6 << 30), seconds(30))
    assert [name for name, _, _ in revoked(driver.at(100, grow))] == ["a", "b"]


def test_device_watermarks_evict_no_model_more_urgent_than_the_queued_ticket() -> None:
    driver = CoreDriver(device=80, settings=MARKED)
    driver.resident(0, "a", 78, priority=types.Priority.HIGH)
    assert revoked(driver.ask(100, "b", 6, priority=types.Priority.LOW)) == []


def test_device_watermarks_evict_no_model_more_urgent_than_the_growing_one() -> None:
    driver = CoreDriver(device=80, settings=MARKED)
    driver.resident(0, "a", 68, priority=types.Priority.HIGH)
    driver.resident(1, "text", 9)
    grow = ev.GrowthAsked(TicketId("text"), units.Bytes(6 << 30), seconds(30))
    assert revoked(driver.at(100, grow)) == [] and "text" in driver.growing()
    assert revoked(driver.ask(101, "b", 1)) == []  # something has changed there


def test_device_watermarks_do_not_act_for_growth_on_another_device() -> None:
    driver = GpuDriver(100, 100, settings=MARKED)
    for name, size in (("a", 95), ("b", 50)):
        driver.want(0, name, size)
        driver.done(0, name)
    driver.ask(1, "c", 45, holder="k", priority=types.Priority.HIGH)
    driver.at(1, ev.Loaded(TicketId("c"), seconds(0)))
    assert (driver.home("a"), driver.home("b"), driver.home("c")) == (
        {"0": 95},
        {"1": 50},
        {"1": 45},
    )
    grow = ev.GrowthAsked(TicketId("b"), units.Bytes(20 << 30), seconds(30))
    assert revoked(driver.at(100, grow)) == [] and "b" in driver.growing()
    assert revoked(driver.want(101, "d", 1)) == []  # something has changed there


def test_device_watermarks_do_not_act_for_a_ticket_too_large_for_the_device() -> None:
    driver = GpuDriver(100, 200, settings=MARKED)
    for name, size in (("a", 95), ("b", 150)):
        driver.want(0, name, size)
        driver.done(0, name)
    assert revoked(driver.want(100, "c", 120)) == [("b", "swap", "gone")]
