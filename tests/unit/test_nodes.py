"""Devices, readings, node loss (SPEC A16, A19, B1, B7). Times in seconds, sizes in GiB."""

from dataclasses import replace

import pytest

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.units import Bytes, NodeId, TicketId, seconds
from tests.unit.desk import (
    CPU,
    HOST,
    NODE,
    PATIENT,
    PLAIN,
    Desk,
    gib,
    granted,
    is_granted,
    reaped,
)


@pytest.mark.spec("A18", "B1")
def test_nothing_is_granted_on_a_device_before_its_first_reading() -> None:
    desk = Desk(read=False)
    assert desk.ask(0, "a", 10) == []
    assert granted(desk.read(1)) == ["a"]


@pytest.mark.spec("B1")
def test_a_node_whose_agent_fell_silent_gets_no_grants_until_it_reads_again() -> None:
    terms = replace(PATIENT, reading=seconds(5))
    desk = Desk(settings=replace(PLAIN, timeouts=terms), read=False)
    desk.read(1)
    assert is_granted(desk.ask(5.9, "a", 10), "a")
    assert desk.ask(6, "b", 10) == []
    assert "node_silent" in desk.kinds()
    assert granted(desk.read(8)) == ["b"]


@pytest.mark.spec("B1")
def test_an_agent_that_introduces_itself_again_must_read_before_grants() -> None:
    desk = Desk()
    desk.resident(0, "a", 30)
    desk.see_node(1, 80, 0)
    assert desk.charged() == 30
    assert desk.ask(2, "b", 10) == []
    desk.engines["a"] = {CPU: 30}
    assert granted(desk.read(3)) == ["b"]


@pytest.mark.spec("A19")
def test_a_dead_nodes_devices_leave_with_it_and_its_tickets_are_closed() -> None:
    desk = Desk(device=80)
    desk.resident(0, "a", 30)
    desk.ask(1, "b", 30)
    desk.ask(1, "c", 80)
    desk.at(2, ev.NodeLost(NODE))
    assert desk.state.ledger.books == {}
    assert desk.state.ledger.entries() == []
    assert len(desk.state.queue) == 0
    assert desk.state.holders == {}
    assert "node_lost" in desk.kinds()


@pytest.mark.spec("A19")
def test_a_node_that_comes_back_starts_empty_and_what_lives_on_it_is_ended() -> None:
    desk = Desk(device=80)
    desk.resident(0, "a", 30)
    desk.at(2, ev.NodeLost(NODE))
    desk.see_node(3, 80, 0)
    desk.engines["a"] = {CPU: 30}
    assert reaped(desk.read(4)) == ["a"]
    assert desk.free() == 50


def test_losing_one_node_leaves_the_others_alone() -> None:
    desk = Desk(device=80)
    desk.see_node(0, 80, 0, node="m")
    desk.read(0, node="m")
    desk.join(0, "hm", node="m")
    desk.ask(0, "a", 10, holder="hm")
    desk.resident(0, "b", 10)
    desk.at(1, ev.NodeLost(NodeId("m")))
    assert (desk.state_of("a"), desk.state_of("b")) == ("closed", "resident")
    assert desk.at(2, ev.NodeLost(NodeId("m"))) == []


@pytest.mark.spec("A16")
def test_foreign_bytes_follow_the_readings() -> None:
    desk = Desk(device=80)
    for foreign, free in ((10, 70), (25, 55), (0, 80)):
        desk.foreign[CPU] = foreign
        desk.read(1)
        assert desk.free() == free


@pytest.mark.spec("A16", "B2")
def test_under_a_cap_foreign_memory_fills_what_the_cap_leaves_to_others_first() -> None:
    arenas = replace(PLAIN.arenas, cpu_bytes=gib(50))
    desk = Desk(device=80, settings=replace(PLAIN, arenas=arenas))
    desk.foreign[CPU] = 30
    desk.read(1)
    assert desk.free() == 50
    desk.foreign[CPU] = 31
    desk.read(2)
    assert desk.free() == 49


@pytest.mark.spec("B1")
def test_a_device_its_agent_no_longer_sees_takes_its_tickets_along() -> None:
    desk = Desk(device=80)
    desk.resident(0, "a", 30)
    host_only = (types.DeviceSpec(HOST, types.DeviceKind.HOST, gib(80)),)
    desk.at(1, ev.NodeSeen(NODE, host_only))
    assert desk.state_of("a") == "closed"
    assert list(desk.state.ledger.books) == [HOST]


def test_readings_of_an_unknown_node_count_for_nothing() -> None:
    desk = Desk()
    assert desk.read(1, node="nowhere") == []


@pytest.mark.spec("B7")
def test_the_state_says_capacity_charged_measured_foreign_and_largest_fit() -> None:
    desk = Desk(device=80, holders=("h", "g"))
    desk.resident(0, "a", 30)
    desk.beat(0, "a", inflight=1)
    desk.engines["a"] = {CPU: 20}
    desk.foreign[CPU] = 10
    desk.read(1)
    desk.ask(2, "b", 60, deadline_s=10)
    view = desk.arbiter.snapshot(desk.state.now)
    [device] = [d for d in view.devices if d.device == CPU]
    sizes = (
        device.capacity_bytes, device.budget_bytes, device.charged_bytes, device.measured_bytes,
        device.foreign_bytes, device.free_bytes, device.largest_fit_bytes,
    )  # fmt: skip
    assert sizes == tuple(gib(n) for n in (80, 80, 30, 20, 10, 40, 40))
    assert [(t.ticket, t.state) for t in view.tickets] == [("a", "draining"), ("b", "queued")]
    assert [(q.position, q.ticket, q.left) for q in view.queue] == [(1, "b", seconds(10))]
    assert [h.holder for h in view.holders] == ["g", "h"]


def test_the_state_says_who_cools_down_and_who_is_in_quarantine() -> None:
    desk = Desk(device=80)
    desk.ask(0, "a", 30)
    desk.at(1, ev.LoadBroke(TicketId("a"), "bad weights", False))
    desk.woke(1.5)
    [cooldown] = desk.arbiter.snapshot(desk.state.now).cooldowns
    assert (cooldown.model, cooldown.cause, cooldown.left) == ("a", "bad weights", seconds(1.5))
    desk.woke(6)
    view = desk.arbiter.snapshot(desk.state.now)
    assert view.cooldowns == ()
    assert [h.kept_bytes for h in view.holders] == [gib(30)]


def test_a_negative_device_fits_nothing() -> None:
    desk = Desk(device=80)
    desk.foreign[CPU] = 90
    desk.read(1)
    [device] = [d for d in desk.arbiter.snapshot(desk.state.now).devices if d.device == CPU]
    assert (device.free_bytes, device.largest_fit_bytes) == (-gib(10), Bytes(0))
