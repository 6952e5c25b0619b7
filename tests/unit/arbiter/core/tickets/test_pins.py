"""Pins beyond the budget are reported, and those beyond the cap are none."""

from dataclasses import replace

import pytest

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.units import HolderId, TicketId, seconds
from tests.support.core_driver import (
    CPU,
    HOST,
    PLAIN,
    CoreDriver,
    gib,
    is_granted,
)
from tests.support.gpu_core_driver import GPU, GpuCoreDriver


@pytest.mark.spec("B2")
def test_pins_beyond_the_budget_are_reported() -> None:
    driver = CoreDriver(device=80, pinned="a")
    driver.resident(0, "a", 60)
    assert "pinned_overcommit" not in driver.kinds()
    driver.see_node(1, 50, 0)
    told = driver.last("pinned_overcommit")
    assert (told.size_bytes, told.data["device"]) == (gib(10), CPU)
    late = CoreDriver(device=50, pinned="a")
    late.ask(0, "a", 60)
    assert late.last("pinned_overcommit").size_bytes == gib(10)


@pytest.mark.spec("C8")
def test_model_stays_pinned_whatever_ram_its_process_holds() -> None:
    driver = GpuCoreDriver(device=80, host=5, pinned="a")
    driver.resident(0, "a", 60)
    driver.engines["a"] = {GPU: 60, HOST: 10}
    driver.read(1)
    driver.introduce(2)
    assert driver.ticket("a").pinned


@pytest.mark.spec("C8")
def test_pinned_model_replaces_its_dead_predecessor_whose_bytes_are_still_charged() -> None:
    driver = CoreDriver(settings=replace(PLAIN, pinned_most_fraction=0.5), pinned="a")
    driver.resident(0, "a1", 30)
    driver.gone(1, "a1", bytes_back=False)
    driver.resident(2, "a2", 30)
    assert driver.state_of("a1") == "reclaiming"
    assert driver.ticket("a2").pinned


@pytest.mark.spec("C8")
def test_model_pinned_beyond_a_device_is_pinned_again_once_the_device_suffices() -> None:
    driver = CoreDriver(device=80, pinned="a")
    driver.resident(0, "a", 60)
    driver.see_node(1, 50, 0)
    assert not driver.ticket("a").pinned
    driver.see_node(2, 80, 0)
    assert driver.ticket("a").pinned


def capped() -> CoreDriver:
    """`a` and `b` of 30 have the device floor, of which 40 may be pinned: `a` is."""
    driver = CoreDriver(settings=replace(PLAIN, pinned_most_fraction=0.5))
    for name in "ab":
        driver.at(0, ev.FloorSet("text", name, types.Floor.DEVICE))
        driver.resident(0, name, 30)
    assert pinned(driver) == ["a"]
    return driver


def pinned(driver: CoreDriver) -> list[str]:
    return [ticket.id for ticket in driver.tickets() if ticket.pinned]


@pytest.mark.spec("C8")
def test_model_pinned_beyond_the_cap_is_pinned_once_another_pin_has_left() -> None:
    unloaded = capped()
    unloaded.at(1, ev.UnloadAsked(TicketId("a")))
    assert pinned(unloaded) == ["a"], "it may decline"
    unloaded.at(2, ev.Released(TicketId("a"), "manual"))
    assert unloaded.ticket("b").pinned
    assert unloaded.kinds().count("pin_over_cap") == 1

    unpinned = capped()
    unpinned.at(1, ev.FloorSet("text", "a", types.Floor.COLD))
    assert pinned(unpinned) == ["b"]


@pytest.mark.spec("C8", "A14")
def test_growth_of_a_pinned_model_counts_against_the_cap_until_it_is_given_back() -> None:
    driver = CoreDriver(settings=replace(PLAIN, pinned_most_fraction=0.5))
    for name in "ab":
        driver.at(0, ev.FloorSet("text", name, types.Floor.DEVICE))
        driver.resident(0, name, 15)
    assert pinned(driver) == ["a", "b"]
    driver.at(1, ev.GrowthAsked(TicketId("a"), gib(15), seconds(30)))
    driver.fire_timer(2)
    assert pinned(driver) == ["a"] and driver.last("pin_over_cap").ticket == "b"
    driver.at(30, ev.GaveBack(TicketId("a"), (types.DeviceBytes(CPU, gib(15)),)))
    driver.fire_timer(31)
    assert pinned(driver) == ["a", "b"]


@pytest.mark.spec("C8")
def test_model_over_two_devices_is_pinned_on_both_or_on_neither() -> None:
    driver = GpuCoreDriver(settings=replace(PLAIN, pinned_most_fraction=0.75))
    for name in "abc":
        driver.at(0, ev.FloorSet("text", name, types.Floor.DEVICE))
    driver.resident(0, "a", 20)
    need, split = types.Need(gib(100)), types.Split.EQUAL
    asks = ev.Requested(TicketId("b"), HolderId("h"), "text", "b", need, split=split)
    assert is_granted(driver.at(1, asks), "b")
    driver.at(1, ev.Loaded(TicketId("b"), seconds(0)))
    assert pinned(driver) == ["a"]
    driver.resident(2, "c", 25)
    assert pinned(driver) == ["a", "c"]
    driver.at(3, ev.Released(TicketId("c"), "manual"))
    assert not driver.ticket("b").pinned, "its other half has no room yet"
    driver.at(4, ev.Released(TicketId("a"), "manual"))
    assert driver.ticket("b").pinned
