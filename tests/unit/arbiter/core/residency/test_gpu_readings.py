"""GPUs that do not answer, fall off the bus, or are others than before (A10, A19, B1). Times
in seconds, sizes in GiB.
"""

from dataclasses import replace

import pytest

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Decision, Refuse
from arbiter.core.settings import TenantLimits
from arbiter.errors import GpusLost, NeverFits
from arbiter.protocol.json_codec import plain
from arbiter.units import Bytes, HolderId, TicketId
from tests.support.core_driver import HOST, NODE, PLAIN, gib, granted, is_granted, killed, refusal
from tests.support.gpu_core_driver import GPU, OTHER, UUIDS, GpuCoreDriver

LOST = "nvmlDeviceGetMemoryInfo: Timeout (NVML code 10)"


def kinds_of(driver: GpuCoreDriver, kind: str) -> list[object]:
    return [told.data["device"] for told in driver.logged if told.kind == kind]


def two(host: float = 100) -> GpuCoreDriver:
    """`a` (60) on the first GPU, `b` (60) on the second, each with 2 in its process's RAM."""
    driver = GpuCoreDriver(device=80, host=host)
    driver.resident(0, "a", 60, host=50)
    driver.resident(0, "b", 60, host=50)
    driver.engines = {"a": {GPU: 60, HOST: 2}, "b": {OTHER: 60, HOST: 2}}
    driver.read(1)
    assert (driver.device_of("a"), driver.device_of("b")) == (GPU, OTHER)
    return driver


@pytest.mark.spec("B1")
def test_nothing_is_granted_on_a_gpu_that_cannot_be_read_and_its_neighbour_lends_on() -> None:
    driver = GpuCoreDriver(device=80, host=100)
    driver.unreadable = {GPU: LOST}
    driver.read(1)
    assert is_granted(driver.ask(1, "a", 50), "a")
    assert driver.device_of("a") == OTHER
    assert driver.ask(2, "b", 50) == []
    driver.read(3)
    assert kinds_of(driver, "device_unreadable") == [GPU]  # told once
    assert driver.last("device_unreadable").data["cause"] == LOST
    driver.unreadable = {}
    assert granted(driver.read(4)) == ["b"]
    assert kinds_of(driver, "device_readable") == [GPU]


@pytest.mark.spec("B1", "A10")
def test_what_was_measured_on_a_gpu_stands_while_it_cannot_be_read() -> None:
    driver = two()
    driver.engines["a"] = {GPU: 70, HOST: 2}  # more than it was granted
    driver.foreign[GPU] = 5
    driver.read(2)
    driver.unreadable, driver.foreign = {GPU: LOST}, {}
    driver.read(3)
    assert driver.measured("a") == {GPU: gib(70), HOST: gib(2)}
    assert (driver.charged(GPU), driver.free(GPU)) == (70, 5)


@pytest.mark.spec("B1", "D1")
def test_a_gpu_that_cannot_be_read_confirms_no_sleep() -> None:
    driver = two(host=200)
    driver.ask(20, "c", 60)
    assert driver.state_of("a") == "draining"
    driver.unreadable = {GPU: LOST}
    driver.at(21, ev.Slept(TicketId("a")))
    driver.read(22)
    assert driver.state_of("a") == "draining"
    driver.unreadable, driver.engines["a"] = {}, {HOST: 52}
    assert granted(driver.read(23)) == ["c"]
    assert driver.state_of("a") == "asleep"


@pytest.mark.spec("B1", "A18")
def test_an_agent_that_starts_while_a_gpu_cannot_be_read_takes_no_ticket_from_it() -> None:
    driver = two()
    driver.unreadable = {GPU: LOST}
    assert driver.introduce(2) == []
    driver.read(2)
    assert (driver.state_of("a"), driver.charged(GPU)) == ("resident", 60)
    assert kinds_of(driver, "device_lost") == []


@pytest.mark.spec("B1", "A19")
def test_a_gpu_that_fell_off_the_bus_takes_its_tickets_and_their_ram_comes_back_when_seen() -> None:
    driver = two()
    del driver.there[GPU]
    assert killed(driver.introduce(2)) == ["a"]
    assert kinds_of(driver, "device_lost") == [GPU]
    assert (driver.state_of("a"), driver.charged(HOST)) == ("reclaiming", 4)
    assert (driver.state_of("b"), driver.charged(OTHER)) == ("resident", 60)
    driver.read(3)
    assert driver.charged(HOST) == 4
    driver.gone(4, "a")
    assert (driver.state_of("a"), driver.charged(HOST)) == ("closed", 2)


@pytest.mark.spec("B1", "B6")
def test_ticket_of_a_node_that_lost_all_its_gpus_is_refused_until_one_is_back() -> None:
    driver = GpuCoreDriver(device=80, holders=("h", "k"), pinned="a")
    driver.resident(0, "a", 80)
    driver.resident(0, "b", 80)
    for name, size in (("c", 60), ("d", 70), ("e", 1)):
        assert granted(driver.ask(1, name, size, holder="k")) == []
    driver.there = {}
    refused = [d.ticket for d in driver.introduce(2) if isinstance(d, Refuse)]
    assert sorted(refused) == ["c", "d", "e"]
    again = refusal(driver.ask(3, "a2", 80))
    assert again == GpusLost(NODE)
    assert again.retry_after_s is not None, "so that the holder of a pinned model asks again"
    gang = (TicketId("d2"), TicketId("e2"))
    member = ev.Requested(gang[0], HolderId("h"), "text", "d", types.Need(gib(1)), gang=gang)
    assert refusal(driver.at(4, member)) == GpusLost(NODE)
    driver.there = {GPU: UUIDS[GPU]}
    driver.introduce(5)
    driver.read(5)
    assert is_granted(driver.ask(5, "a3", 80), "a3")


@pytest.mark.spec("B1")
def test_ticket_of_a_node_whose_gpus_were_never_read_waits_for_them() -> None:
    driver = GpuCoreDriver(device=80, holders=())
    driver.at(1, ev.NodeLost(NODE))
    driver.unreadable = {GPU: LOST, OTHER: LOST}
    driver.introduce(2)
    driver.join(2, "h")
    driver.read(2)  # the host's RAM alone
    assert driver.ask(2, "a", 60) == []
    gang = (TicketId("b"), TicketId("c"))
    for name in gang:
        need = types.Need(gib(10))
        asks = ev.Requested(name, HolderId("h"), "text", name, need, "", True, gang=gang)
        assert driver.at(2, asks) == []
    assert driver.read(3) == []
    driver.unreadable = {}
    driver.introduce(4)
    assert granted(driver.read(4)) == ["a", "b", "c"]


def ask_over_both(driver: GpuCoreDriver, t: float, name: str) -> list[Decision]:
    """120, in equal parts on both GPUs."""
    need, split = types.Need(gib(120)), types.Split.EQUAL
    return driver.at(
        t, ev.Requested(TicketId(name), HolderId("h"), "text", name, need, split=split)
    )


@pytest.mark.spec("B1", "B5")
def test_ticket_over_two_gpus_of_which_one_fell_off_the_bus_is_refused_until_it_is_back() -> None:
    driver = GpuCoreDriver(device=80)
    gang = (TicketId("b"), TicketId("c"))
    first, second = (
        ev.Requested(t, HolderId("h"), "text", t, types.Need(gib(60)), "", True, gang=gang)
        for t in gang
    )
    del driver.there[GPU]
    driver.lost = (GPU,)
    driver.introduce(1)
    driver.read(1)
    assert refusal(ask_over_both(driver, 2, "a")) == GpusLost(NODE)
    driver.at(3, first)
    refused = [d.error for d in driver.at(3, second) if isinstance(d, Refuse)]
    assert refused == [GpusLost(NODE)] * 2
    assert is_granted(driver.ask(4, "d", 60), "d"), "the other GPU lends on"
    driver.there[GPU], driver.lost = UUIDS[GPU], ()
    driver.at(5, ev.Released(TicketId("d"), "x"))
    driver.gone(5, "d")
    driver.introduce(6)
    driver.read(6)
    assert is_granted(ask_over_both(driver, 7, "e"), "e")
    assert isinstance(refusal(driver.ask(8, "large", 100)), NeverFits)


def with_reserve() -> GpuCoreDriver:
    """Of each GPU 30 are reserved for another tenant, and one request runs on each."""
    reserve = TenantLimits("y", None, gib(30), None)
    driver = GpuCoreDriver(device=80, settings=replace(PLAIN, tenants=(reserve,)))
    for name in ("d", "e"):
        driver.resident(0, name, 50)
        driver.beat(0, name, inflight=1)
    return driver


def ask_split(driver: GpuCoreDriver, t: float, name: str) -> list[Decision]:
    """70, which one GPU holds but for the reserve of another tenant."""
    need, split = types.Need(gib(70)), types.Split.EQUAL
    return driver.at(
        t, ev.Requested(TicketId(name), HolderId("h"), "text", name, need, split=split)
    )


@pytest.mark.spec("B1", "C10")
def test_what_a_lost_gpu_and_the_reserves_of_others_leave_no_room_for_may_ask_again() -> None:
    driver = with_reserve()
    assert granted(ask_split(driver, 1, "a")) == []
    gang = (TicketId("b"), TicketId("c"))
    for name in gang:
        need = types.Need(gib(40))
        asks = ev.Requested(name, HolderId("h"), "text", name, need, "", True, gang=gang)
        assert granted(driver.at(1, asks)) == []
    del driver.there[GPU]
    driver.lost = (GPU,)
    refused = {d.ticket: d.error for d in driver.introduce(2) if isinstance(d, Refuse)}
    assert refused == dict.fromkeys(("a", "b", "c"), GpusLost(NODE))
    assert refusal(ask_split(driver, 3, "small")) == GpusLost(NODE)


def come_back_without_an_answer(driver: GpuCoreDriver) -> None:
    """The node was lost, and its agent is back while one of its GPUs does not answer."""
    driver.at(1, ev.NodeLost(NODE))
    driver.unreadable = {GPU: LOST}
    driver.introduce(2)
    driver.join(2, "h")
    driver.read(2)


@pytest.mark.spec("B1", "C10")
def test_beside_the_reserves_of_others_a_ticket_waits_for_a_gpu_that_has_not_answered_yet() -> None:
    driver = with_reserve()
    come_back_without_an_answer(driver)
    assert ask_split(driver, 3, "a") == []
    driver.unreadable = {}
    driver.introduce(4)
    assert granted(driver.read(4)) == ["a"]


@pytest.mark.spec("B1", "B6")
def test_gpu_that_an_agent_does_not_count_once_it_is_back_is_lost_until_it_is_seen() -> None:
    driver = GpuCoreDriver(device=80)
    del driver.there[GPU]
    driver.lost = (GPU,)
    driver.introduce(1)
    driver.lost = ()  # the agent has started again, and knows of one GPU only
    driver.introduce(2)
    driver.read(2)
    assert refusal(ask_over_both(driver, 3, "a")) == GpusLost(NODE)
    driver.there[GPU] = UUIDS[GPU]
    driver.introduce(4)
    driver.read(4)
    del driver.there[GPU]  # while the agent was away
    driver.introduce(5)
    driver.read(5)
    assert refusal(ask_over_both(driver, 6, "b")) == GpusLost(NODE)
    driver.there[GPU] = UUIDS[GPU]
    driver.introduce(7)
    driver.read(7)
    assert is_granted(ask_over_both(driver, 8, "c"), "c")


@pytest.mark.spec("B1", "B5")
def test_ticket_over_two_gpus_waits_for_a_gpu_that_has_not_answered_yet() -> None:
    driver = GpuCoreDriver(device=80, holders=())
    come_back_without_an_answer(driver)
    assert ask_over_both(driver, 2, "a") == []
    driver.unreadable = {}
    driver.introduce(3)
    assert granted(driver.read(3)) == ["a"]


@pytest.mark.spec("B1", "B6")
def test_ticket_larger_than_the_node_is_refused_though_a_known_gpu_cannot_be_read() -> None:
    driver = two()
    driver.unreadable = {GPU: LOST}
    driver.introduce(2)
    driver.read(2)
    assert isinstance(refusal(driver.ask(3, "large", 100)), NeverFits)


@pytest.mark.spec("B1", "A19")
def test_an_asleep_model_that_could_wake_only_on_a_lost_gpu_goes_with_it() -> None:
    driver = two()
    driver.ask(20, "c", 60)
    driver.at(21, ev.Slept(TicketId("a")))
    driver.engines["a"] = {HOST: 52}
    driver.read(22)
    assert driver.state_of("a") == "asleep"
    del driver.there[GPU]
    assert "a" in killed(driver.introduce(23))


@pytest.mark.spec("A10", "B5")
def test_a_ticket_over_two_gpus_stays_charged_on_the_gpu_that_is_left() -> None:
    driver = GpuCoreDriver(device=80, host=100)
    need = types.Need(gib(120))
    driver.at(0, ev.Requested(
        TicketId("a"), "h", "text", "a", need, split=types.Split.EQUAL,  # type: ignore[arg-type]
    ))  # fmt: skip
    assert (driver.charged(GPU), driver.charged(OTHER)) == (60, 60)
    del driver.there[GPU]
    driver.introduce(1)
    driver.read(1)
    assert (driver.state_of("a"), driver.charged(OTHER)) == ("reclaiming", 60)
    assert granted(driver.ask(2, "b", 60)) == []
    assert granted(driver.gone(3, "a")) == ["b"]


@pytest.mark.spec("B1")
def test_a_gpu_that_comes_back_is_lent_from_again_once_it_is_read() -> None:
    driver = two()
    del driver.there[GPU]
    driver.introduce(2)
    driver.gone(3, "a")
    driver.there[GPU] = "GPU-aaaa"
    driver.introduce(4)
    assert kinds_of(driver, "device_found") == [GPU]
    assert driver.ask(4, "c", 60) == []
    assert granted(driver.read(5)) == ["c"]
    assert driver.device_of("c") == GPU


@pytest.mark.spec("B1")
def test_another_card_in_the_place_of_a_gpu_has_none_of_its_tickets() -> None:
    """After a restart of the node's driver the first of two may be what the second was."""
    driver = two()
    driver.there[GPU] = "GPU-cccc"
    assert killed(driver.introduce(2)) == ["a"]
    assert (driver.state_of("a"), driver.charged(GPU)) == ("reclaiming", 0)


@pytest.mark.spec("B1", "B7")
def test_the_state_names_the_card_why_it_cannot_be_read_and_who_else_is_on_it() -> None:
    driver = two()
    driver.strangers[GPU] = (ev.ForeignProcess(7, "python", Bytes(3)),)
    driver.unreadable = {OTHER: LOST}
    driver.read(2)
    state = plain(driver.snapshot())
    first, second, host = state["devices"]
    assert (first["name"], first["uuid"], first["unreadable"]) == ("NVIDIA A10G", "GPU-aaaa", None)
    assert first["foreign_processes"] == [{"pid": 7, "name": "python", "size_bytes": 3}]
    assert (second["uuid"], second["unreadable"]) == ("GPU-bbbb", LOST)
    assert (host["name"], host["uuid"], host["unreadable"]) == ("", "", None)
