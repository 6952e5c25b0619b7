"""Who is next and where it goes (A11, B6, C6, C9). Times in seconds, sizes in GiB."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.records.request_queue import QueueEntry
from arbiter.core.settings import Settings
from arbiter.core.types import Priority
from arbiter.errors import NeverFits, RolePinned
from arbiter.units import DeviceId, HolderId, NodeId, TicketId, seconds
from tests.support.core_driver import (
    CPU,
    HOST,
    PATIENT,
    PLAIN,
    CoreDriver,
    capability,
    gib,
    granted,
    refusal,
    revoked,
)

LOW, HIGH = Priority.LOW, Priority.HIGH


def loading(driver: CoreDriver, size: float) -> None:
    """`a` is not to be had, so whoever needs its bytes waits."""
    assert granted(driver.ask(0, "a", size)) == ["a"]


def is_aged(driver: CoreDriver, name: str) -> bool:
    waiting = driver.request_queue.find(TicketId(name))
    return waiting is not None and waiting.is_aged


@pytest.mark.spec("C6")
def test_ticket_that_cannot_load_does_not_hold_up_a_later_ticket_that_can() -> None:
    driver = CoreDriver(device=80)
    loading(driver, 50)
    assert driver.ask(1, "large", 60) == []
    assert granted(driver.ask(2, "small", 1)) == ["small"]


@pytest.mark.spec("C6")
def test_ticket_is_bypassed_eight_times_and_then_reserves_its_device() -> None:
    driver = CoreDriver(device=80)
    loading(driver, 50)
    driver.ask(1, "large", 60)
    for turn in range(PLAIN.bypass_count):
        assert granted(driver.ask(2, f"b{turn}", 1)) == [f"b{turn}"]
    assert driver.ask(3, "c", 1, priority=Priority.URGENT) == []


@pytest.mark.spec("C6")
def test_no_ticket_is_bypassed_where_the_settings_allow_no_bypass() -> None:
    driver = CoreDriver(device=80, settings=replace(PLAIN, bypass_count=0))
    loading(driver, 50)
    driver.ask(1, "large", 60)
    assert driver.ask(2, "b", 1, priority=Priority.URGENT) == []
    driver.at(3, ev.LoadBroke(TicketId("a"), "x", False))
    assert granted(driver.gone(3, "a")) == ["large", "b"]


@pytest.mark.spec("C6")
def test_earlier_ticket_granted_first_does_not_count_as_a_bypass() -> None:
    driver = CoreDriver(device=80)
    loading(driver, 80)
    for turn in range(PLAIN.bypass_count):
        driver.ask(1, f"b{turn}", 8)
    driver.ask(2, "large", 70)
    driver.at(3, ev.LoadBroke(TicketId("a"), "x", False))
    assert len(granted(driver.gone(3, "a"))) == PLAIN.bypass_count
    assert granted(driver.ask(4, "c", 1)) == ["c"]


@pytest.mark.spec("C6")
def test_ticket_of_a_silent_holder_is_not_counted_as_bypassed() -> None:
    terms = replace(PATIENT, silent=seconds(5))
    driver = CoreDriver(device=80, settings=replace(PLAIN, timeouts=terms), holders=("h", "mute"))
    loading(driver, 50)
    driver.ask(1, "large", 60, holder="mute")
    driver.beat(7, "a")
    for turn in range(PLAIN.bypass_count):
        assert granted(driver.ask(7, f"b{turn}", 1)) == [f"b{turn}"]
    driver.at(8, ev.Renewed(HolderId("mute"), ()))
    assert granted(driver.ask(9, "c", 1)) == ["c"]


@pytest.mark.spec("C6")
def test_ticket_is_not_bypassed_after_half_a_minute() -> None:
    driver = CoreDriver(device=80)
    loading(driver, 50)
    driver.ask(1, "large", 60)
    assert granted(driver.ask(30.9, "small", 1)) == ["small"]
    assert driver.ask(31, "small2", 1, priority=Priority.URGENT) == []
    driver.at(40, ev.LoadBroke(TicketId("a"), "x", True))
    assert granted(driver.gone(41, "a")) == ["large", "small2"]


@pytest.mark.spec("C6", "C2")
def test_aged_ticket_asks_with_the_priority_of_the_ticket_it_holds_up() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 80, priority=HIGH)
    assert driver.ask(1, "b", 50, priority=LOW) == []
    assert driver.fire_timer(31) == []  # due, but no ticket it holds up may have more than it
    assert revoked(driver.ask(32, "c", 50, priority=HIGH)) == [("a", "swap", "gone")]
    driver.at(33, ev.Released(TicketId("a"), "swap"))
    assert granted(driver.gone(34, "a")) == ["b"]


@pytest.mark.spec("C6")
def test_bytes_coming_back_for_one_ticket_are_not_lent_to_another() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 60)
    assert revoked(driver.ask(20, "b", 70)) == [("a", "swap", "gone")]
    assert granted(driver.ask(21, "small", 10)) == ["small"]  # 80 - 70 is nobody's
    assert driver.ask(21, "vad", 1) == []  # 10 are free, and promised to `b`


@pytest.mark.spec("C6")
def test_warm_ticket_goes_first_among_equals() -> None:
    """Asleep, or the same model as a load in flight."""
    driver = CoreDriver(device=80, holders=("h", "g"))
    loading(driver, 50)
    driver.ask(1, "b", 40)
    driver.ask(2, "a2", 40, holder="g")  # `a` is being loaded by the other holder
    assert driver.queue() == ["a2", "b"]
    driver.at(3, ev.Loaded(TicketId("a"), seconds(3)))
    assert driver.queue() == ["b", "a2"]


@pytest.mark.spec("C6", "C4")
def test_end_of_minimum_residency_triggers_a_grant_pass_without_other_events() -> None:
    driver = CoreDriver(device=80)
    driver.ask(0, "a", 80)
    driver.at(8, ev.Loaded(TicketId("a"), seconds(8)))
    driver.beat(8, "a")
    driver.ask(9, "b", 10)
    assert driver.fire_timer(15.9) == []
    assert revoked(driver.fire_timer(16)) == [("a", "swap", "gone")]


# -- groups ---------------------------------------------------------------------------------------

ALONE = replace(PLAIN, one_resident_roles=frozenset({"text"}))


@pytest.mark.spec("A11")
def test_exclusion_group_keeps_one_model_of_a_role_resident_and_swaps_the_next() -> None:
    driver = CoreDriver(device=80, settings=ALONE)
    driver.resident(0, "a", 10)
    assert revoked(driver.ask(20, "b", 10)) == [("a", "swap", "gone")]  # though both would fit
    assert granted(driver.at(21, ev.Released(TicketId("a"), "swap"))) == ["b"]
    assert granted(driver.ask(23, "e1", 10, capability="embedding", model="e1")) == ["e1"]


@pytest.mark.spec("A11")
def test_replicas_of_one_model_share_a_group_and_by_default_there_is_none() -> None:
    driver = CoreDriver(device=80, settings=ALONE, holders=("h", "g"))
    driver.resident(0, "a", 10)
    assert granted(driver.ask(20, "a2", 10, holder="g")) == ["a2"]
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 10)
    assert granted(driver.ask(20, "b", 10)) == ["b"]


@pytest.mark.spec("A11")
def test_exclusion_group_members_leave_all_or_none() -> None:
    driver = CoreDriver(device=80, settings=ALONE, holders=("h", "g"))
    driver.resident(0, "a", 10)
    driver.ask(19, "a2", 10, holder="g")
    driver.at(25, ev.Loaded(TicketId("a2"), seconds(6)))
    driver.beat(25, holder="g")
    assert revoked(driver.ask(26, "b", 10)) == []  # `a2` has its minimum residency before it
    assert sorted(name for name, _, _ in revoked(driver.fire_timer(31))) == ["a", "a2"]


@pytest.mark.spec("A11", "C2")
def test_exclusion_group_never_evicts_a_more_urgent_ticket() -> None:
    driver = CoreDriver(device=80, settings=ALONE)
    driver.resident(0, "a", 10, priority=HIGH)
    assert driver.ask(20, "b", 10) == []
    assert revoked(driver.ask(21, "c", 10, priority=HIGH)) == [("a", "swap", "gone")]


def age_behind_its_group(driver: CoreDriver) -> None:
    """`b` waits until it is aged, because `a` of its exclusion group is in use."""
    driver.resident(0, "a", 10)
    driver.beat(1, "a", inflight=1)
    assert revoked(driver.ask(20, "b", 10)) == [("a", "swap", "gone")]
    driver.at(21, ev.Busy(TicketId("a"), 1))
    driver.fire_timer(50)
    assert is_aged(driver, "b")


def embedding_asks(driver: CoreDriver, t: float) -> list[str]:
    return granted(driver.ask(t, "e1", 10, capability="embedding", model="e1"))


@pytest.mark.spec("A11", "C6")
def test_aged_ticket_that_waits_for_its_exclusion_group_holds_up_no_other_role() -> None:
    driver = CoreDriver(device=80, settings=ALONE)
    age_behind_its_group(driver)
    assert embedding_asks(driver, 51) == ["e1"]
    assert driver.state_of("b") == "queued"


@pytest.mark.spec("A11", "C6")
def test_aged_ticket_is_bypassed_by_no_replica_of_the_model_in_its_place() -> None:
    driver = CoreDriver(device=80, settings=ALONE, holders=("h", "g"))
    age_behind_its_group(driver)
    assert granted(driver.ask(51, "a2", 10, holder="g")) == []
    assert granted(driver.at(52, ev.Released(TicketId("a"), "swap"))) == ["b"]
    assert driver.state_of("a2") == "queued"


@pytest.mark.spec("A11", "C6")
def test_aged_ticket_that_waits_for_its_exclusion_group_holds_up_no_other_node() -> None:
    driver = CoreDriver(device=80, settings=ALONE)
    driver.see_node(0, 80, 0, "m")
    driver.read(0, "m")
    driver.join(0, "far", node="m")
    age_behind_its_group(driver)
    driver.read(51, "m")
    driver.resident(51, "c", 10, holder="far")
    driver.beat(52, "c", holder="far", inflight=1)
    assert granted(driver.ask(53, "d", 10, holder="far")) == []
    driver.beat(53, "c", holder="far")
    assert granted(driver.at(54, ev.Released(TicketId("c"), "idle"))) == ["d"]


@pytest.mark.spec("A11", "C8")
def test_ticket_whose_exclusion_group_has_a_pinned_model_is_refused_by_its_name() -> None:
    driver = CoreDriver(device=80, settings=ALONE, pinned="a")
    driver.resident(0, "a", 10)
    error = refusal(driver.ask(20, "b", 10))
    assert error == RolePinned("b", "text", NodeId("n"), "a")
    assert driver.state_of("a") == "resident"


@pytest.mark.spec("C5", "C6")
def test_aged_ticket_that_pressure_keeps_from_its_home_holds_up_no_ticket_it_spares() -> None:
    driver = CoreDriver(device=80, host=80)
    driver.resident(0, "e1", 20, capability="embedding", model="e1", host=15)
    driver.engines["e1"] = {CPU: 20}
    driver.read(1)
    driver.ask(10, "a", 70, priority=HIGH)
    driver.at(11, ev.Slept(TicketId("e1")))
    driver.engines["e1"] = {HOST: 15}
    driver.read(12)
    driver.at(13, ev.Loaded(TicketId("a"), seconds(1)))
    driver.beat(13, "a", inflight=1)
    driver.ask(16, "e1", 20, capability="embedding", model="e1", host=15)
    driver.at(17, ev.PressurePushed(CPU, types.Level.CRITICAL, None, seconds(3000)))
    driver.fire_timer(46)
    assert is_aged(driver, "e1")
    driver.at(48, ev.Released(TicketId("a"), "idle"))
    driver.gone(49, "a")
    assert granted(driver.ask(50, "b", 10)) == ["b"]


# -- larger than everything -----------------------------------------------------------------------


def oversized(settings: Settings = PLAIN) -> CoreDriver:
    driver = CoreDriver(device=80, settings=settings)
    text = capability("text", "text", ("a", "b", "c"))
    models = tuple(replace(m, allow_oversize=m.name == "c") for m in text.models)
    driver.at(0, ev.CapabilitiesSet((replace(text, models=models),)))
    return driver


@pytest.mark.spec("B6")
def test_oversized_model_is_granted_once_all_idle_models_have_left() -> None:
    driver = oversized()
    driver.resident(0, "a", 30)
    driver.resident(0, "b", 30)
    driver.beat(1, "b", inflight=1)
    assert revoked(driver.ask(20, "c", 100)) == [("a", "swap", "gone")]  # `b` is in use
    driver.at(21, ev.Released(TicketId("a"), "swap"))
    [grant] = driver.gone(22, "a")
    assert grant.devices == (types.DeviceBytes(DeviceId("n/cpu:0"), gib(50)),)
    warning = driver.last("oversize")
    assert (warning.size_bytes, warning.data["granted_bytes"]) == (gib(100), gib(50))


@pytest.mark.spec("B6", "A15")
def test_oversized_model_waits_for_no_lease_that_may_not_be_interrupted() -> None:
    driver = oversized()
    driver.lease(0, "job", 10)
    driver.resident(1, "a", 30)
    assert revoked(driver.ask(20, "c", 100)) == [("a", "swap", "gone")]
    driver.at(21, ev.Released(TicketId("a"), "swap"))
    [grant] = driver.gone(22, "a")
    assert grant.devices == (types.DeviceBytes(DeviceId("n/cpu:0"), gib(70)),)


@pytest.mark.spec("B6", "A15")
def test_oversized_model_waits_for_a_lease_that_may_be_interrupted() -> None:
    driver = oversized()
    driver.lease(0, "job", 10, preemptible=True)
    assert revoked(driver.ask(20, "c", 100)) == [("job", "swap", "gone")]
    assert driver.state_of("c") == "queued"
    driver.at(21, ev.Released(TicketId("job"), "swap"))
    assert granted(driver.gone(22, "job")) == ["c"]


@pytest.mark.spec("B6")
def test_oversized_model_is_not_evicted_for_its_overcommit() -> None:
    driver = oversized()
    driver.ask(0, "c", 100)
    driver.at(1, ev.Loaded(TicketId("c"), seconds(1)))
    driver.beat(1, "c")
    driver.engines["c"] = {DeviceId("n/cpu:0"): 95}
    assert driver.read(2) == []
    assert driver.free() == -15
    assert isinstance(refusal(driver.ask(3, "b", 100)), NeverFits)


@pytest.mark.spec("B6", "C5")
def test_oversized_model_is_not_granted_under_critical_pressure() -> None:
    driver = CoreDriver(device=80)
    large = capability("embedding", "embedding", ("e1", "e2"))
    models = tuple(replace(m, allow_oversize=True) for m in large.models)
    driver.at(0, ev.CapabilitiesSet((driver.table[0], replace(large, models=models))))
    driver.ask(0, "a", 10)
    assert driver.ask(1, "e1", 100, capability="embedding", model="e1") == []  # `a` is loading
    driver.at(2, ev.PressurePushed(CPU, types.Level.CRITICAL, gib(1), seconds(60)))
    assert granted(driver.at(3, ev.Loaded(TicketId("a"), seconds(3)))) == []
    assert granted(driver.fire_timer(63)) == ["e1"]


# -- where ----------------------------------------------------------------------------------------


def gpus(count: int, size: float = 80, host: float = 0, settings: Settings = PLAIN) -> CoreDriver:
    driver = CoreDriver(settings=settings)
    devices = [(f"g/gpu:{n}", types.DeviceKind.GPU, size) for n in range(count)]
    devices.append(("g/host", types.DeviceKind.HOST, host))
    specs = tuple(types.DeviceSpec(DeviceId(name), kind, gib(of)) for name, kind, of in devices)
    driver.at(0, ev.NodeSeen(NodeId("g"), specs))
    readings = tuple(ev.DeviceReading(spec.device, gib(0), gib(0)) for spec in specs)
    driver.at(0, ev.Measured(NodeId("g"), readings, ()))
    for holder in ("h1", "h2"):
        driver.join(0, holder, node="g")
    return driver


def where(
    driver: CoreDriver, t: float, name: str, size: float, holder: str, host: float = 0
) -> str:
    [grant] = driver.ask(t, name, size, holder=holder, host=host)
    return grant.devices[0].device[-1]


@pytest.mark.spec("C9")
def test_replicas_of_one_model_are_spread_over_the_devices() -> None:
    driver = gpus(2)
    assert where(driver, 0, "b", 50, "h1") == "0"
    assert where(driver, 0, "a1", 20, "h1") == "0"  # the smallest hole
    assert where(driver, 0, "a2", 10, "h2") == "1"  # apart from its copy


@pytest.mark.spec("C9")
def test_a_model_comes_back_to_where_it_was_though_a_smaller_hole_has_appeared() -> None:
    driver = gpus(2)
    assert where(driver, 0, "a1", 20, "h1") == "0"
    driver.at(1, ev.Loaded(TicketId("a1"), seconds(1)))
    assert where(driver, 2, "b", 70, "h2") == "1"
    driver.at(3, ev.Released(TicketId("a1"), "idle"))
    driver.at(4, ev.EngineGone(NodeId("g"), TicketId("a1"), True))
    assert where(driver, 5, "a3", 10, "h1") == "0"


@pytest.mark.spec("C9")
def test_asleep_ticket_wakes_on_its_device_though_its_model_was_elsewhere_last() -> None:
    driver = gpus(2, host=80)
    assert where(driver, 0, "a1", 50, "h1", host=50) == "0"
    driver.at(1, ev.Loaded(TicketId("a1"), seconds(1)))
    assert where(driver, 2, "a2", 50, "h2") == "1"
    driver.at(3, ev.Loaded(TicketId("a2"), seconds(1)))
    driver.beat(4, "a1", holder="h1")
    driver.at(20, ev.FloorSet("text", "a", types.Floor.HOST))
    driver.at(21, ev.Slept(TicketId("a1")))
    asleep = ev.EngineReading(TicketId("a1"), (types.DeviceBytes(DeviceId("g/host"), gib(50)),))
    devices = driver.devices_of("g")
    readings = tuple(ev.DeviceReading(device, gib(0), gib(0)) for device in devices)
    driver.at(22, ev.Measured(NodeId("g"), readings, (asleep,)))
    assert driver.state_of("a1") == "asleep"
    driver.at(23, ev.Released(TicketId("a2"), "idle"))
    driver.at(24, ev.EngineGone(NodeId("g"), TicketId("a2"), True))
    assert where(driver, 25, "a1", 50, "h1", host=50) == "0"


@pytest.mark.spec("C5", "C6")
def test_ticket_exempt_from_pressure_is_not_held_up_by_a_ticket_that_is_not() -> None:
    driver = CoreDriver(device=80)
    loading(driver, 75)
    assert driver.ask(1, "e", 10, capability="embedding", model="e1") == []
    assert driver.ask(2, "b", 10) == []
    driver.at(3, ev.PressurePushed(CPU, types.Level.CRITICAL, gib(1), seconds(60)))
    driver.at(4, ev.LoadBroke(TicketId("a"), "x", True))
    assert granted(driver.gone(5, "a")) == ["b"]


def critical(driver: CoreDriver, t: float, number: int, term_s: float = 60) -> None:
    where = DeviceId(f"g/gpu:{number}")
    driver.at(t, ev.PressurePushed(where, types.Level.CRITICAL, gib(1), seconds(term_s)))


@pytest.mark.spec("C5", "C6")
def test_ticket_exempt_from_pressure_is_placed_where_an_earlier_one_may_not() -> None:
    driver = gpus(2)
    driver.resident(0, "a", 75, holder="h1", priority=HIGH)
    critical(driver, 1, 1)
    assert driver.ask(2, "e", 20, capability="embedding", model="e1", holder="h1") == []
    assert where(driver, 3, "b", 20, "h2") == "1"


@pytest.mark.spec("B5", "C6")
def test_splittable_ticket_is_not_held_up_by_a_smaller_single_device_ticket() -> None:
    driver = gpus(2, size=70)
    for holder, name, size in (("h1", "a1", 25), ("h2", "a2", 25), ("h1", "d", 10)):
        driver.resident(0, name, size, holder=holder, priority=HIGH)
    assert driver.ask(1, "b", 65, holder="h1") == []
    asked = ev.Requested(
        TicketId("c"),
        HolderId("h2"),
        "text",
        "c",
        types.Need(gib(80)),
        "",
        True,
        split=types.Split.EQUAL,
    )
    assert driver.at(2, asked) == []  # 40 on each, and 35 are free on one
    driver.at(3, ev.Released(TicketId("d"), "idle"))
    assert granted(driver.at(4, ev.EngineGone(NodeId("g"), TicketId("d"), True))) == ["c"]


@pytest.mark.spec("B5", "C5", "C6")
def test_aged_split_ticket_that_pressure_keeps_from_one_device_holds_up_no_ticket_it_spares() -> (
    None
):
    driver = gpus(2, size=70)
    critical(driver, 0, 1, term_s=3000)
    what = HolderId("h1"), "embedding", "e1", types.Need(gib(80))
    split = types.Split.EQUAL
    assert driver.at(1, ev.Requested(TicketId("e1"), *what, "", True, split=split)) == []
    driver.fire_timer(31)
    assert is_aged(driver, "e1")
    assert where(driver, 32, "b", 20, "h2") == "0"


@pytest.mark.spec("A11", "B5")
def test_split_ticket_swaps_within_its_exclusion_group() -> None:
    driver = gpus(2, size=70, settings=ALONE)
    driver.resident(0, "a", 10, holder="h1")
    what = HolderId("h2"), "text", "b", types.Need(gib(100))
    asked = ev.Requested(TicketId("b"), *what, "", True, split=types.Split.EQUAL)
    assert revoked(driver.at(20, asked)) == [("a", "swap", "gone")]
    assert driver.state_of("b") == "queued"
    assert granted(driver.at(21, ev.Released(TicketId("a"), "swap"))) == ["b"]


@pytest.mark.spec("A11", "B6")
def test_oversized_ticket_swaps_within_its_exclusion_group() -> None:
    driver = oversized(ALONE)
    driver.resident(0, "a", 30)
    driver.beat(1, "a", inflight=1)
    assert revoked(driver.ask(20, "c", 100)) == [("a", "swap", "gone")]
    assert driver.state_of("c") == "queued"


@pytest.mark.spec("B6", "C6")
def test_oversizable_ticket_is_not_held_up_by_a_smaller_ticket_that_must_fit() -> None:
    driver = oversized()
    driver.ask(0, "a", 50, priority=HIGH)
    assert driver.ask(1, "b", 60) == []
    assert driver.ask(2, "c", 100) == []  # `a` may yet turn out to be idle
    assert granted(driver.at(3, ev.Loaded(TicketId("a"), seconds(3)))) == ["c"]


@pytest.mark.spec("N2")
def test_grant_pass_skips_tickets_no_smaller_than_an_unplaceable_ticket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = CoreDriver(device=80)
    loading(driver, 75)
    for n in range(20):
        driver.ask(1, f"b{n}", 10)
    walked: list[str] = []
    walk = driver.request_queue.walk

    def spied(node: NodeId) -> Iterator[QueueEntry]:
        for waiting in walk(node):
            walked.append(waiting.request.ticket)
            yield waiting

    monkeypatch.setattr(driver.request_queue, "walk", spied)
    assert driver.ask(2, "c", 10) == []
    assert walked == ["b0"]
    assert granted(driver.ask(3, "small", 5)) == ["small"]
    assert driver.ask(4, "large", 30, priority=Priority.URGENT) == []
    walked.clear()
    assert driver.ask(5, "c2", 10) == []
    assert walked == ["large", "b0"]


@pytest.mark.spec("C6")
def test_grant_pass_reaches_urgent_tickets_behind_unplaceable_ones_in_any_policy() -> None:
    driver = CoreDriver(device=80, settings=replace(PLAIN, admit="fifo"))
    driver.resident(0, "a", 80)
    assert driver.ask(1, "b", 50, priority=LOW) == []
    assert revoked(driver.ask(2, "c", 50, priority=HIGH)) == [("a", "swap", "gone")]


@pytest.mark.spec("B2", "A17")
def test_headroom_over_a_learned_peak_asks_for_no_more_than_pinned_models_leave() -> None:
    fraction = replace(PLAIN, learned_headroom_fraction=0.1)
    driver = CoreDriver(device=80, settings=fraction, pinned="vad")
    driver.resident(0, "vad", 10)
    driver.resident(1, "b", 60, explicit=False)
    driver.engines = {"vad": {CPU: 10}, "b": {CPU: 66}}
    for t in (2, 3):
        driver.read(t)
    driver.at(20, ev.Released(TicketId("b"), "manual"))
    driver.gone(21, "b")
    assert granted(driver.ask(22, "b2", 60, explicit=False)) == ["b2"]
    assert driver.charged() == 80
