"""What a snapshot says of devices, cool-downs and pressure."""

import pytest

from arbiter.core import events as ev
from arbiter.units import Bytes, HolderId, TicketId, seconds
from tests.support.core_driver import (
    CPU,
    CoreDriver,
    gib,
)


@pytest.mark.spec("B7")
def test_snapshot_gives_capacity_charged_measured_foreign_and_largest_fit() -> None:
    driver = CoreDriver(device=80, holders=("h", "g"))
    driver.resident(0, "a", 30)
    driver.beat(0, "a", inflight=1)
    driver.engines["a"] = {CPU: 20}
    driver.foreign[CPU] = 10
    driver.read(1)
    driver.ask(2, "b", 60, deadline_s=10)
    view = driver.snapshot()
    [device] = [d for d in view.devices if d.device == CPU]
    sizes = (
        device.capacity_bytes, device.budget_bytes, device.charged_bytes, device.measured_bytes,
        device.foreign_bytes, device.free_bytes, device.largest_fit_bytes,
    )  # fmt: skip
    assert sizes == tuple(gib(n) for n in (80, 80, 30, 20, 10, 40, 40))
    assert [(t.ticket, t.state) for t in view.tickets] == [("a", "draining"), ("b", "queued")]
    assert [(q.position, q.ticket, q.left) for q in view.queue] == [(1, "b", seconds(10))]
    assert [h.holder for h in view.holders] == ["g", "h"]


def test_snapshot_lists_cooldowns_and_quarantined_holders() -> None:
    driver = CoreDriver(device=80)
    driver.ask(0, "a", 30)
    driver.at(1, ev.LoadBroke(TicketId("a"), "bad weights", False))
    driver.fire_timer(1.5)
    [cooldown] = driver.snapshot().cooldowns
    assert (cooldown.model, cooldown.cause, cooldown.left) == ("a", "bad weights", seconds(1.5))
    driver.fire_timer(6)
    view = driver.snapshot()
    assert view.cooldowns == ()
    assert [h.kept_bytes for h in view.holders] == [gib(30)]


def test_overcommitted_device_has_no_largest_fit() -> None:
    driver = CoreDriver(device=80)
    driver.foreign[CPU] = 90
    driver.read(1)
    [device] = [d for d in driver.snapshot().devices if d.device == CPU]
    assert (device.free_bytes, device.largest_fit_bytes) == (-gib(10), Bytes(0))


@pytest.mark.spec("B7", "J1")
def test_snapshot_tells_how_long_loads_and_wakes_took() -> None:
    driver = CoreDriver(device=80)
    assert driver.snapshot().load_times == ()
    driver.ask(0, "a", 30)
    driver.at(3, ev.Loaded(TicketId("a"), seconds(3)))
    [seen] = driver.snapshot().load_times
    assert (seen.capability, seen.model, seen.load, seen.wake) == ("text", "a", seconds(3), None)


@pytest.mark.spec("J5")
def test_snapshot_tells_how_long_answered_requests_ran() -> None:
    driver = CoreDriver(device=80)
    driver.ask(0, "a", 30)
    driver.at(3, ev.Loaded(TicketId("a"), seconds(3)))
    ended = [("answered", 1), ("answered", 4), ("answered", 2), ("left", 9), ("answered", None)]
    runs = tuple(
        ev.FinishedRequest(TicketId("a"), "a", seconds(20), word, "r", ran and seconds(ran))
        for word, ran in ended
    )
    driver.at(4, ev.Renewed(HolderId("h"), (driver.held("a", t=4),), runs))
    [seen] = driver.snapshot().load_times
    assert (seen.run, seen.run_long) == (seconds(2), seconds(4))
