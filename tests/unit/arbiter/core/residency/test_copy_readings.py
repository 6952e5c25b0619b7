"""Copies of models' files that engines share: leases of host RAM, which the node agent holds."""

from dataclasses import replace

import pytest

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Decision
from arbiter.errors import HostRamShort
from arbiter.units import HolderId, NodeId, TicketId, seconds
from tests.support.core_driver import (
    HOST,
    NODE,
    PLAIN,
    CoreDriver,
    gib,
    granted,
    listed,
    refusal,
    revoked,
)

pytestmark = pytest.mark.spec("D4")
TERMS = types.LeaseConditions("@host", seconds(1e9), seconds(5), preemptible=True, on_host=True)


def holder(name: str) -> HolderId:
    return HolderId(f"lease:{name}")


def made(driver: CoreDriver, t: float, name: str, size: float, users: int = 0) -> list[Decision]:
    """A copy that has been filled."""
    assert granted(ask(driver, t, name, size)) == [name]
    return beat(driver, t, name, size, users)


def ask(driver: CoreDriver, t: float, name: str, size: float) -> list[Decision]:
    """As the agent does for a copy that it is about to make."""
    driver.at(t, ev.Joined(holder(name), NODE, "lease", ()))
    need = types.Need(gib(size))
    asked = ev.Requested(TicketId(name), holder(name), "lease", name, need, lease=TERMS)
    return driver.at(t, asked)


def beat(driver: CoreDriver, t: float, name: str, size: float, users: int) -> list[Decision]:
    held = ev.HeldTicket(
        TicketId(name), name, types.Phase.RESIDENT, users, seconds(0), listed({HOST: size}),
        types.Need(gib(size)), lease=TERMS,
    )  # fmt: skip
    return driver.at(t, ev.Renewed(holder(name), (held,)))


def reading(name: str, *models: tuple[str, str], t: float = 0) -> ev.Measured:
    devices = tuple(ev.DeviceReading(d, gib(1e6), gib(0)) for d in (NODE_CPU, HOST))
    copies = tuple(
        ev.HostCopyReading(
            name, TicketId(name), tuple(types.ModelName(*m) for m in models), (), gib(1)
        )
        for _ in range(bool(models))
    )
    return ev.Measured(NodeId("n"), devices, (), copies=copies)


NODE_CPU = listed({HOST: 0})[0].device.replace("host", "cpu:0")


def test_a_copy_is_charged_to_the_host_and_to_no_other_device() -> None:
    driver = CoreDriver(host=40)
    assert granted(ask(driver, 0, "copy", 30)) == ["copy"]
    assert driver.state_of("copy") == "resident"
    assert (driver.free(), driver.free(HOST)) == (80, 10)


def test_a_copy_without_room_is_refused_at_once_with_the_numbers() -> None:
    driver = CoreDriver(host=40)
    made(driver, 0, "copy", 30, users=1)
    error = refusal(ask(driver, 2, "second", 11))
    assert error == HostRamShort("second", gib(11), gib(10))
    assert driver.free(HOST) == 10 and driver.find("second") is None


def test_a_copy_is_granted_on_no_reading_of_an_agent_before_it_restarted() -> None:
    driver = CoreDriver(host=40)
    driver.see_node(1, 80, 40)  # another life of the agent
    assert refusal(ask(driver, 1, "copy", 30)) == HostRamShort("copy", gib(30), gib(0))
    driver.read(2)
    assert granted(ask(driver, 2, "second", 30)) == ["second"]


def test_a_copy_that_finds_no_room_has_an_unused_copy_leave_for_the_next() -> None:
    driver = CoreDriver(host=40)
    made(driver, 0, "copy", 30)
    decisions = ask(driver, 2, "second", 11)
    assert isinstance(refusal(decisions), HostRamShort)
    assert revoked(decisions) == [("copy", "fit", "gone")]


def test_a_model_that_finds_no_room_to_sleep_has_an_unused_copy_leave() -> None:
    driver = CoreDriver(host=40)
    made(driver, 0, "copy", 30)
    driver.resident(0, "a", 60, host=20)
    assert revoked(driver.ask(9, "b", 60)) == [("copy", "fit", "gone"), ("a", "swap", "gone")]


def test_a_copy_is_in_use_until_it_has_been_filled() -> None:
    driver = CoreDriver(host=40)
    assert revoked(ask(driver, 0, "copy", 38)) == [] and driver.state_of("copy") == "resident"


def test_a_copy_in_use_never_leaves() -> None:
    driver = CoreDriver(host=40)
    made(driver, 0, "copy", 38, users=2)  # above the high watermark
    driver.resident(1, "a", 60, host=20)
    assert revoked(driver.ask(9, "b", 60)) == [("a", "swap", "gone")]
    push = ev.PressurePushed(HOST, types.Level.CRITICAL, None, seconds(60))
    assert revoked(driver.at(10, push)) == []


def test_an_unused_copy_leaves_before_a_sleeping_model_above_the_watermark() -> None:
    driver = CoreDriver(host=40)
    driver.resident(0, "a", 60, host=10)
    driver.engines["a"] = {NODE_CPU: 60}
    driver.read(1)
    driver.ask(2, "b", 60)
    driver.at(3, ev.Slept(TicketId("a")))
    driver.engines["a"] = {HOST: 10}
    driver.read(4)
    assert driver.state_of("a") == "asleep"
    assert revoked(made(driver, 5, "copy", 28)) == [("copy", "fit", "gone")]
    assert driver.state_of("a") == "asleep"


def test_a_copy_that_came_into_use_while_it_was_to_leave_stays() -> None:
    driver = CoreDriver(host=40)
    made(driver, 0, "copy", 38)
    assert driver.state_of("copy") == "draining"
    driver.at(1, ev.Busy(TicketId("copy"), 1))
    assert driver.state_of("copy") == "resident" and driver.free(HOST) == 2


def test_a_copy_has_no_end_of_its_own() -> None:
    driver = CoreDriver(host=40, settings=replace(PLAIN, lease_term_most=seconds(60)))
    ask(driver, 0, "copy", 10)
    driver.sleep_until(1_000)  # longer than any other lease may last
    assert driver.state_of("copy") == "resident"


def test_a_copy_is_measured_as_any_ticket() -> None:
    driver = CoreDriver(host=40)
    ask(driver, 0, "copy", 10)
    driver.engines["copy"] = {HOST: 12}
    driver.read(1)
    assert driver.free(HOST) == 28


@pytest.mark.spec("C6")
def test_a_model_whose_files_are_in_host_ram_is_granted_before_an_earlier_request() -> None:
    driver = CoreDriver(host=40)
    driver.resident(0, "a", 80)
    driver.beat(1, "a", inflight=1)
    driver.at(1, reading("copy", ("text", "c")))
    driver.ask(2, "b", 80)
    driver.ask(3, "c", 80)
    driver.at(4, ev.Released(TicketId("a"), "manual"))
    assert granted(driver.gone(5, "a")) == ["c"]


@pytest.mark.spec("C6")
def test_a_copy_that_comes_or_goes_moves_the_tickets_that_wait() -> None:
    driver = CoreDriver(host=40)
    driver.resident(0, "a", 80)
    driver.beat(1, "a", inflight=1)
    driver.ask(2, "b", 80)
    driver.ask(3, "c", 80)
    driver.at(4, reading("copy", ("text", "c")))
    driver.at(5, reading("copy"))
    driver.at(6, reading("copy", ("text", "c")))
    driver.at(7, ev.Released(TicketId("a"), "manual"))
    assert granted(driver.gone(8, "a")) == ["c"]


@pytest.mark.spec("C6", "D4")
def test_copies_that_left_with_their_agent_make_no_ticket_warm() -> None:
    driver = CoreDriver(host=40)
    driver.resident(0, "b", 60)
    driver.beat(1, "b", inflight=1)
    driver.at(2, reading("copy", ("text", "a"), t=2))
    driver.ask(3, "c", 60)
    driver.ask(4, "a", 60)
    assert driver.queue() == ["a", "c"]
    driver.see_node(5, 80, 40)
    driver.at(6, reading("copy", t=6))
    assert driver.queue() == ["c", "a"]
