"""RAM of engines' processes on a node with GPUs: no ticket asks for it, and it is on the books as
measured (A17, B1, B4, D1). Times in seconds, sizes in GiB.
"""

from dataclasses import replace

import pytest

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.records.estimates import ModelKey
from arbiter.units import TicketId, seconds
from tests.support.core_driver import HOST, PLAIN, gib, granted, is_granted, killed, revoked
from tests.support.gpu_core_driver import GPU, OTHER, GpuCoreDriver

RAM = 2


def driver_with(*names: str, host: float = 200, device: float = 60, **how: object) -> GpuCoreDriver:
    """Each name has its own GPU, fills it, and could sleep in 50 of host RAM."""
    driver = GpuCoreDriver(device=device, host=host, **how)
    for name in names:
        driver.resident(0, name, 60, host=50)
        driver.engines[name] = {driver.device_of(name): 60, HOST: RAM}
    driver.read(1)
    return driver


def put_to_sleep(driver: GpuCoreDriver, t: float, name: str, copy: float = 50) -> None:
    driver.at(t, ev.Slept(TicketId(name)))
    driver.engines[name] = {HOST: copy + RAM}
    driver.read(t + 1)


def wake(driver: GpuCoreDriver, t: float, name: str, kept: float = 0) -> None:
    """`kept` of its copy stays in its process, as with a driver that keeps pinned memory."""
    assert is_granted(driver.ask(t, name, 60, host=50), name)
    driver.at(t, ev.Loaded(TicketId(name), seconds(0)))
    driver.engines[name] = {driver.device_of(name): 60, HOST: kept + RAM}
    driver.beat(t, name)
    driver.read(t + 1)


@pytest.mark.spec("B1", "B4")
def test_a_resident_on_a_gpu_is_charged_what_its_process_holds_in_ram() -> None:
    driver = driver_with("a", host=100)
    assert (driver.charged(GPU), driver.charged(HOST), driver.free(HOST)) == (60, 2, 98)
    view = driver.snapshot()
    [host] = [d for d in view.devices if d.device == HOST]
    assert (host.charged_bytes, host.measured_bytes) == (gib(2), gib(2))


@pytest.mark.spec("A17")
def test_process_ram_is_no_part_of_what_is_learned_of_its_model() -> None:
    driver = driver_with("a")
    driver.engines["a"] = {GPU: 55, HOST: 30}
    driver.read(2)
    driver.read(3)
    key = ModelKey("text", "a", "")
    estimate = driver.estimates.size(key, types.Need(gib(50)), False)
    assert (estimate.source, estimate.device_bytes) == ("learned", gib(60))


@pytest.mark.spec("B4", "D1")
def test_an_asleep_model_has_room_for_its_process_beside_its_weights() -> None:
    driver = driver_with("a")
    driver.ask(20, "b", 60), driver.ask(20, "c", 60)
    assert driver.state_of("a") == "draining"
    assert driver.charged(HOST) == 52  # before it is told to go
    put_to_sleep(driver, 21, "a")
    assert (driver.state_of("a"), driver.charged(HOST)) == ("asleep", 52)


@pytest.mark.spec("B4", "D1")
def test_a_model_whose_copy_and_process_do_not_fit_goes_for_good_and_no_asleep_model_with_it() -> (
    None
):
    """Two copies fit into the budget, two copies and two processes do not."""
    driver = driver_with("a", "b", host=103)
    driver.ask(20, "c", 60)
    put_to_sleep(driver, 21, "a")
    assert revoked(driver.ask(40, "d", 60)) == [("b", "swap", "gone")]
    assert driver.state_of("a") == "asleep"
    assert driver.free(HOST) == 49


@pytest.mark.spec("A9", "B4")
def test_a_refused_sleep_gives_back_its_host_reservation_and_keeps_its_process() -> None:
    driver = driver_with("a")
    driver.ask(20, "b", 60), driver.ask(20, "c", 60)
    assert driver.charged(HOST) == 52
    driver.at(30, ev.BarrierDropped(TicketId("a"), 1))
    assert (driver.state_of("a"), driver.charged(HOST)) == ("resident", 2)


@pytest.mark.spec("B4", "D1")
@pytest.mark.parametrize("kept", [0, 50], ids=["freed", "kept"])
def test_the_second_sleep_needs_as_much_as_the_first(kept: float) -> None:
    """Whether the copy of the first was given back or is kept in the process for the next."""
    driver = driver_with("a", host=60)
    driver.ask(20, "b", 60), driver.ask(20, "c", 60)
    put_to_sleep(driver, 21, "a")
    for name, t in (("b", 22.5), ("c", 22.5)):
        driver.at(t, ev.Released(TicketId(name), "manual"))
        driver.gone(t, name)
    wake(driver, 23, "a", kept)
    assert driver.charged(HOST) == 2 + kept
    driver.ask(40, "b2", 60)
    assert revoked(driver.ask(40, "c2", 60)) == [("a", "swap", "asleep")]
    assert driver.charged(HOST) == 52


@pytest.mark.spec("A18", "B4", "D1")
def test_pinned_copy_of_a_model_that_slept_before_a_restart_is_no_ram_of_its_process() -> None:
    driver = GpuCoreDriver(device=60, host=200, known=("h",), holders=())
    home = (types.DeviceBytes(GPU, gib(60)),)
    driver.host_sizes["a"] = 50
    driver.join(1, "h", replace(driver.held("a", size=60), devices=home, has_slept=True))
    driver.engines["a"] = {GPU: 60, HOST: 50 + RAM}
    driver.read(2)
    driver.ask(40, "b", 60), driver.ask(40, "c", 60)
    assert (driver.state_of("a"), driver.charged(HOST)) == ("draining", 50 + RAM)


@pytest.mark.spec("B4")
def test_a_short_host_budget_costs_asleep_models_their_copies_and_no_resident_its_gpu() -> None:
    """What a process needs of RAM was not lent to it: whether RAM is really short is for pressure
    to say."""
    driver = driver_with("a", "b", host=100)
    driver.ask(20, "c", 60)
    put_to_sleep(driver, 21, "a")
    driver.foreign[HOST] = 60
    assert killed(driver.read(23)) == ["a"]
    driver.gone(24, "a")
    driver.foreign[HOST] = 120
    assert revoked(driver.read(25)) == killed(driver.read(26)) == []
    assert (driver.state_of("b"), driver.free(HOST)) == ("resident", -22)


@pytest.mark.spec("C5")
def test_real_shortage_of_ram_takes_the_idle_on_gpus_as_well() -> None:
    driver = GpuCoreDriver(device=60, host=200, settings=replace(PLAIN, arena_fraction=0.9))
    driver.resident(0, "e1x", 40, capability="embedding", model="e1")
    driver.engines["e1x"] = {GPU: 40, HOST: 8}
    driver.physical[HOST] = 20  # of 200
    assert revoked(driver.read(2)) == [("e1x", "pressure", "gone")]


@pytest.mark.spec("A15")
def test_a_tenants_leases_are_of_device_memory_whatever_ram_its_processes_have() -> None:
    settings = replace(PLAIN, lease_tenant_bytes=gib(30))
    driver = GpuCoreDriver(device=60, host=200, settings=settings)
    driver.lease(0, "job", 20)
    driver.engines["job"] = {GPU: 20, HOST: 90}
    driver.read(1)
    assert granted(driver.lease(2, "more", 10)) == ["more"]


@pytest.mark.spec("A18", "B4")
def test_a_restarted_arbiter_charges_a_rejoined_engine_its_ram() -> None:
    driver = GpuCoreDriver(device=60, host=200, holders=())
    driver.engines["a"] = {GPU: 60, HOST: RAM}
    driver.read(1)
    assert driver.charged(HOST) == 0 and driver.free(HOST) == 198  # foreign so far
    held = driver.held("a", types.Phase.RESIDENT, size=60)
    driver.join(2, "h", replace(held, devices=(types.DeviceBytes(GPU, gib(60)),)))
    assert (driver.charged(GPU), driver.charged(HOST), driver.free(HOST)) == (60, 2, 198)
    driver.read(3)
    assert (driver.charged(HOST), driver.free(HOST)) == (2, 198)


@pytest.mark.spec("B4", "D8")
def test_the_state_tells_a_copy_from_the_ram_of_its_process() -> None:
    driver = driver_with("a", "b")
    driver.ask(20, "c", 60)
    put_to_sleep(driver, 21, "a")
    seen = {t.ticket: t for t in driver.snapshot().tickets}
    assert (seen[TicketId("a")].ram_bytes, seen[TicketId("b")].ram_bytes) == (gib(2), gib(2))


def test_the_two_gpus_are_told_apart() -> None:
    driver = driver_with("a", "b")
    assert (driver.charged(GPU), driver.charged(OTHER)) == (60, 60)
