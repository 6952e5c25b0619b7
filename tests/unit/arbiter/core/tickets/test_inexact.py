"""A GPU whose driver names no sizes per process: the device's delta says what all engines hold
together, and each engine's share is inferred (A16, A17, D1). Times in seconds, sizes in GiB.
"""

from dataclasses import replace

import pytest

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.records.estimates import ModelKey
from arbiter.units import TicketId
from tests.support.core_driver import HOST, gib, granted, killed
from tests.support.gpu_core_driver import GPU, OTHER, GpuCoreDriver


def shared(driver: GpuCoreDriver, held: float, host: dict[str, float] | None = None) -> None:
    """As the agent says it: what they hold together, split as each was granted at its start."""
    whole = sum(driver.sizes[name] for name in driver.engines)
    for name in driver.engines:
        driver.engines[name] = {
            GPU: held * driver.sizes[name] / whole,
            HOST: (host or {}).get(name, 0),
        }


def two(t: float = 1) -> GpuCoreDriver:
    """`a` (40) and `b` (20) on one GPU of 60; there is no other."""
    driver = GpuCoreDriver(device=60, host=200)
    del driver.there[OTHER]
    driver.introduce(0)
    driver.read(0)
    driver.delta_only = {GPU}
    driver.resident(0, "a", 40, host=30)
    driver.resident(0, "b", 20, host=20)
    driver.engines = {"a": {}, "b": {}}
    shared(driver, 60)
    driver.read(t)
    return driver


@pytest.mark.spec("A16", "D1")
def test_a_sleep_is_seen_by_what_the_whole_device_gives_back() -> None:
    driver = two()
    driver.beat(2, "b", inflight=1)
    driver.ask(20, "c", 40)
    assert driver.state_of("a") == "draining"
    driver.at(21, ev.Slept(TicketId("a")))
    shared(driver, 50, {"a": 10})  # under way
    assert granted(driver.read(22)) == []
    shared(driver, 22, {"a": 30})  # `b`, and what `a` keeps
    assert driver.state_of("a") == "draining"
    driver.read(23)
    assert driver.state_of("a") == "asleep"
    assert driver.charged(GPU) == 22  # not 20 of `b` and a share for `a` on top
    shared(driver, 20, {"a": 30})
    assert granted(driver.read(24)) == ["c"]


@pytest.mark.spec("A16", "D1")
def test_a_device_that_gives_too_little_back_confirms_no_sleep() -> None:
    driver = two()
    driver.beat(2, "b", inflight=1)
    driver.ask(20, "c", 40)
    driver.at(21, ev.Slept(TicketId("a")))
    shared(driver, 30, {"a": 30})
    for t in (22, 23, 24, 25):  # another engine may have taken what this one gave
        assert killed(driver.read(t)) == []
    assert driver.state_of("a") == "draining"
    assert killed(driver.fire_timer(26)) == ["a"]
    assert "not_asleep" in driver.kinds()


@pytest.mark.spec("A16", "D1")
@pytest.mark.parametrize(("awake", "charged"), [("b", 40), ("", 15)], ids=["beside", "alone"])
def test_no_asleep_model_is_ended_for_a_share_that_was_only_inferred(
    awake: str, charged: float
) -> None:
    """`a` (20) sleeps: of what `b` holds a share would fall to it, or all that strangers do."""
    driver = GpuCoreDriver(device=60, host=200, holders=())
    del driver.there[OTHER]
    driver.introduce(0)
    driver.delta_only = {GPU}
    driver.sizes, driver.host_sizes = {"a": 20, "b": 40}, {"a": 20}
    driver.engines = {name: {} for name in ("a", *awake)}
    shared(driver, charged, {"a": 20})
    held = [
        driver.held("a", types.Phase.ASLEEP),
        *(driver.held(n, types.Phase.RESIDENT) for n in awake),
    ]
    on_gpu = (
        replace(h, devices=(types.DeviceBytes(GPU, gib(driver.sizes[h.ticket])),)) for h in held
    )
    driver.join(0, "h", *on_gpu)
    assert killed(driver.read(1)) == []
    assert (driver.state_of("a"), driver.charged(GPU)) == ("asleep", charged)


@pytest.mark.spec("A16", "A17")
def test_an_inferred_share_teaches_nothing_and_a_device_of_its_own_does() -> None:
    driver = two()
    for t in (2, 3, 4):
        driver.read(t)
    assert driver.kinds().count("estimate_error") == 0
    alone = GpuCoreDriver(device=60, host=200)
    alone.delta_only = {GPU, OTHER}
    alone.resident(0, "a", 40)
    alone.engines = {"a": {alone.device_of("a"): 36}}
    for t in (1, 2):
        alone.read(t)
    estimate = alone.state.estimates.size(ModelKey("text", "a", ""), types.Need(gib(30)), False)
    assert (estimate.source, estimate.device_bytes) == ("learned", gib(36))
