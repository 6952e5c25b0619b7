"""Devices, readings, node loss (A16, A19, B1, B7). Times in seconds, sizes in GiB."""

from dataclasses import replace

import pytest

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import PurgeCaches
from arbiter.units import Content, DeviceId, HolderId, NodeId, TicketId, seconds
from tests.support.core_driver import (
    CPU,
    HOST,
    NODE,
    PATIENT,
    PLAIN,
    CoreDriver,
    gib,
    granted,
    is_granted,
    killed,
)


@pytest.mark.spec("A18", "B1")
def test_device_gets_no_grant_before_its_first_reading() -> None:
    driver = CoreDriver(read=False)
    assert driver.ask(0, "a", 10) == []
    assert granted(driver.read(1)) == ["a"]


@pytest.mark.spec("B1")
def test_a_node_whose_agent_fell_silent_gets_no_grants_until_it_reads_again() -> None:
    terms = replace(PATIENT, reading=seconds(5))
    driver = CoreDriver(settings=replace(PLAIN, timeouts=terms), read=False)
    driver.read(1)
    assert is_granted(driver.ask(5.9, "a", 10), "a")
    assert driver.ask(6, "b", 10) == []
    assert "node_silent" in driver.kinds()
    assert granted(driver.read(8)) == ["b"]


@pytest.mark.spec("B1")
def test_an_agent_that_introduces_itself_again_must_read_before_grants() -> None:
    driver = CoreDriver()
    driver.resident(0, "a", 30)
    driver.see_node(1, 80, 0)
    assert driver.charged() == 30
    assert driver.ask(2, "b", 10) == []
    driver.engines["a"] = {CPU: 30}
    assert granted(driver.read(3)) == ["b"]


@pytest.mark.spec("A19")
def test_a_dead_nodes_devices_leave_with_it_and_its_tickets_are_closed() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 30)
    driver.ask(1, "b", 30)
    driver.ask(1, "c", 80)
    driver.at(2, ev.NodeLost(NODE))
    assert driver.accounts() == {}
    assert driver.tickets() == []
    assert len(driver.queue()) == 0
    assert driver.holders() == set()
    assert "node_lost" in driver.kinds()


@pytest.mark.spec("A19")
def test_nothing_but_told_evictions_refers_to_a_node_or_device_that_left() -> None:
    scheduled = replace(PLAIN, compact_every_loads_count=100)
    driver = CoreDriver(settings=scheduled, holders=())
    device = DeviceId("leaver/cpu:0")
    driver.see_node(0, 80, 0, node="leaver")
    driver.join(0, "h", node="leaver")
    driver.read(0, node="leaver")
    driver.ask(0, "a", 60)
    driver.at(300, ev.Loaded(TicketId("a"), seconds(300)))  # half of ten minutes
    driver.beat(301, "a")
    assert driver.ask(400, "b", 60, priority=types.Priority.URGENT)  # "a" is to leave for it
    driver.foreign[device], driver.physical[device] = 70, 0
    driver.read(401, node="leaver")
    parts = {"rankings", "pressure", "loading_times", "thrashing", "compactions", "last_home"}
    assert parts | {"ledger"} <= driver.parts_that_name("leaver")
    driver.at(402, ev.NodeLost(NodeId("leaver")))
    driver.at(402, ev.HolderLost(HolderId("h")))
    driver.sleep_until(402 + 2 * 3600)  # what was to be looked at there has been
    assert driver.parts_that_name("leaver") == set()


@pytest.mark.spec("A19")
def test_node_that_comes_back_starts_empty_and_its_old_engines_are_killed() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 30)
    driver.at(2, ev.NodeLost(NODE))
    driver.see_node(3, 80, 0)
    driver.engines["a"] = {CPU: 30}
    assert killed(driver.read(4)) == ["a"]
    assert driver.free() == 50


@pytest.mark.spec("A18", "A19")
def test_node_lost_before_its_agent_found_the_next_epoch_leaves_no_ticket_behind() -> None:
    driver = CoreDriver(known=("h",), holders=())
    driver.join(1, "h", driver.held("a", types.Phase.RESIDENT, size=30), node="gone")
    driver.at(2, ev.NodeLost(NodeId("gone")))
    assert driver.tickets() == []


@pytest.mark.spec("A19")
def test_replica_that_rejoins_after_its_node_was_given_up_leaves_no_ticket_behind() -> None:
    """A raylet that hangs is given up while the workers of its node live on for some seconds."""
    driver = CoreDriver()
    driver.resident(0, "a", 30)
    driver.resident(0, "b", 30)
    held = driver.held("a", t=1), driver.held("b", t=1)
    driver.at(1, ev.NodeLost(NODE))
    again = [replace(each, ticket=TicketId(f"{each.ticket}2")) for each in held]
    driver.join(2, "h", *again)
    assert killed(driver.at(3, ev.Released(TicketId("b2"), "idle"))) == ["b2"]
    driver.at(4, ev.HolderLost(HolderId("h")))
    assert driver.tickets() == []


@pytest.mark.spec("A18", "A19", "B1")
def test_engines_of_a_replica_lost_on_a_node_still_unknown_are_charged_and_killed_once_it_is() -> (
    None
):
    driver = CoreDriver(known=("h", "other"), holders=())
    driver.join(1, "h", driver.held("a", types.Phase.RESIDENT, size=30), node="late")
    driver.at(2, ev.HolderLost(HolderId("h")))
    driver.at(2, ev.HolderLost(HolderId("other")))
    driver.see_node(6, 80, 0, node="late")
    driver.engines["a"] = {DeviceId("late/cpu:0"): 30}
    assert killed(driver.read(6, node="late")) == ["a"]
    assert driver.free(DeviceId("late/cpu:0")) == 50


def test_losing_one_node_leaves_the_others_alone() -> None:
    driver = CoreDriver(device=80)
    driver.see_node(0, 80, 0, node="m")
    driver.read(0, node="m")
    driver.join(0, "hm", node="m")
    driver.ask(0, "a", 10, holder="hm")
    driver.resident(0, "b", 10)
    driver.at(1, ev.NodeLost(NodeId("m")))
    assert (driver.state_of("a"), driver.state_of("b")) == ("closed", "resident")
    assert driver.at(2, ev.NodeLost(NodeId("m"))) == []


@pytest.mark.spec("A16")
def test_foreign_bytes_follow_the_readings() -> None:
    driver = CoreDriver(device=80)
    for foreign, free in ((10, 70), (25, 55), (0, 80)):
        driver.foreign[CPU] = foreign
        driver.read(1)
        assert driver.free() == free


@pytest.mark.spec("A16", "B2")
def test_foreign_memory_fills_what_a_cap_leaves_to_others_first() -> None:
    arenas = replace(PLAIN.arenas, cpu_bytes=gib(50))
    driver = CoreDriver(device=80, settings=replace(PLAIN, arenas=arenas))
    driver.foreign[CPU] = 30
    driver.read(1)
    assert driver.free() == 50
    driver.foreign[CPU] = 31
    driver.read(2)
    assert driver.free() == 49


@pytest.mark.spec("B1")
def test_a_device_its_agent_no_longer_sees_takes_its_tickets_along() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 30)
    host_only = (types.DeviceSpec(HOST, types.DeviceKind.HOST, gib(80)),)
    driver.at(1, ev.NodeSeen(NODE, host_only))
    assert driver.state_of("a") == "closed"
    assert list(driver.accounts()) == [HOST]


def test_readings_of_an_unknown_node_count_for_nothing() -> None:
    driver = CoreDriver()
    assert driver.read(1, node="nowhere") == []


def slab(size: float, ticket: str | None = None) -> ev.SlabReading:
    owner = None if ticket is None else TicketId(ticket)
    counts = (8, 5, 2, 10, 1, 0)
    return ev.SlabReading("1", Content.KV, "text/a", "ab", owner, gib(size), gib(20), *counts)


@pytest.mark.spec("E1", "B4")
def test_slabs_take_from_the_budgets_of_ram_and_are_shown() -> None:
    d = CoreDriver(device=80, host=80)
    before = {v.device: v.free_bytes for v in d.snapshot().devices}
    d.slabs = (slab(10),)
    d.read(1)
    after = {v.device: v.free_bytes for v in d.snapshot().devices}
    assert all(before[device] - after[device] == gib(10) for device in (CPU, HOST))
    [shown] = d.snapshot().slabs
    assert (shown.node, shown.slab) == (NODE, slab(10))
    d.slabs = ()
    d.read(2)
    assert {v.device: v.free_bytes for v in d.snapshot().devices} == before


@pytest.mark.spec("E4")
def test_slab_that_left_is_an_event_with_its_reason() -> None:
    d = CoreDriver()
    gone = ev.SlabDropped("1", Content.KV, "text/a", gib(2), "pressure", was_saved=True)
    d.at(1, ev.Measured(NODE, (), (), dropped=(gone,)))
    assert d.last("slab_dropped").data == {
        "node": NODE, "slab": "1", "content": "kv", "owner": "text/a", "reason": "pressure",
        "saved": True,
    }  # fmt: skip
    assert d.last("slab_dropped").size_bytes == gib(2)


@pytest.mark.spec("E4")
def test_resident_whose_slab_has_more_than_it_may_is_asked_to_shrink_it() -> None:
    d = CoreDriver()
    d.resident(0, "a", 30)
    d.engines["a"] = {CPU: 30}
    d.slabs = (slab(10, "a"),)
    assert d.read(1) == []
    d.slabs = (slab(21, "a"), slab(21))  # of 20; the second one is idle
    assert d.read(2) == [PurgeCaches(TicketId("a"), HolderId("h"), only_slabs=True)]


@pytest.mark.spec("E4", "E6")
def test_sleeping_model_whose_slab_has_more_than_it_may_is_asked_too() -> None:
    d = CoreDriver(device=200, host=200)
    d.resident(0, "a", 80, host=40)
    d.engines["a"] = {CPU: 80}
    d.read(1)
    d.ask(20, "b", 140)
    d.at(21, ev.Slept(TicketId("a")))
    d.engines["a"] = {CPU: 5, HOST: 40}
    d.read(22)
    assert d.state_of("a") == "asleep"
    d.slabs = (slab(21, "a"),)
    assert d.read(23) == [PurgeCaches(TicketId("a"), HolderId("h"), only_slabs=True)]


@pytest.mark.spec("A17")
def test_ticket_that_fits_by_what_a_reading_teaches_is_granted_at_that_reading() -> None:
    """On whichever node: an estimate is of all of them."""
    driver = CoreDriver(holders=("h", "k"))
    driver.see_node(0, 20, 0, node="m")
    driver.read(0, node="m")
    driver.join(0, "l", node="m")
    urgent, need = types.Priority.URGENT, types.Need(gib(10), gib(40))
    first = ev.Requested(TicketId("a"), HolderId("h"), "text", "a", need, priority=urgent)
    driver.at(0, first)
    driver.at(0, ev.Loaded(TicketId("a"), seconds(1)))
    driver.engines = {"a": {CPU: 40}}
    driver.read(1)
    need = types.Need(gib(10), gib(25))
    assert driver.at(2, ev.Requested(TicketId("b"), HolderId("k"), "text", "b", need)) == []
    driver.resident(2, "d", 10, holder="l")
    driver.beat(2, "d", holder="l", inflight=1)
    need = types.Need(gib(2), gib(10))
    assert driver.at(2, ev.Requested(TicketId("c"), HolderId("l"), "text", "c", need)) == []
    assert sorted(granted(driver.read(2.5))) == ["b", "c"]  # 10 less than was computed
