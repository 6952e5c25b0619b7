"""Who is next and where it goes (SPEC A11, B6, C6, C9). Times in seconds, sizes in GiB."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.records.request_queue import QueueEntry
from arbiter.core.types import Priority
from arbiter.errors import NeverFits
from arbiter.units import DeviceId, HolderId, NodeId, TicketId, seconds
from tests.unit.desk import CPU, PATIENT, PLAIN, Desk, capability, gib, granted, refusal, revoked

LOW, HIGH = Priority.LOW, Priority.HIGH


def loading(desk: Desk, size: float) -> None:
    """`a` is not to be had, so whoever needs its bytes waits."""
    assert granted(desk.ask(0, "a", size)) == ["a"]


@pytest.mark.spec("C6")
def test_one_that_cannot_load_now_does_not_hold_up_one_behind_it_that_can() -> None:
    desk = Desk(device=80)
    loading(desk, 50)
    assert desk.ask(1, "large", 60) == []
    assert granted(desk.ask(2, "small", 1)) == ["small"]


@pytest.mark.spec("C6")
def test_a_ticket_is_overtaken_eight_times_and_then_holds_its_device() -> None:
    desk = Desk(device=80)
    loading(desk, 50)
    desk.ask(1, "large", 60)
    for turn in range(PLAIN.bypass_count):
        assert granted(desk.ask(2, f"b{turn}", 1)) == [f"b{turn}"]
    assert desk.ask(3, "c", 1, priority=Priority.URGENT) == []


@pytest.mark.spec("C6")
def test_who_was_there_before_overtakes_nobody() -> None:
    desk = Desk(device=80)
    loading(desk, 80)
    for turn in range(PLAIN.bypass_count):
        desk.ask(1, f"b{turn}", 8)
    desk.ask(2, "large", 70)
    desk.at(3, ev.LoadBroke(TicketId("a"), "x", False))
    assert len(granted(desk.gone(3, "a"))) == PLAIN.bypass_count
    assert granted(desk.ask(4, "c", 1)) == ["c"]


@pytest.mark.spec("C6")
def test_while_its_holder_is_silent_a_ticket_is_not_overtaken() -> None:
    terms = replace(PATIENT, silent=seconds(5))
    desk = Desk(device=80, settings=replace(PLAIN, timeouts=terms), holders=("h", "mute"))
    loading(desk, 50)
    desk.ask(1, "large", 60, holder="mute")
    desk.beat(7, "a")
    for turn in range(PLAIN.bypass_count):
        assert granted(desk.ask(7, f"b{turn}", 1)) == [f"b{turn}"]
    desk.at(8, ev.Renewed(HolderId("mute"), ()))
    assert granted(desk.ask(9, "c", 1)) == ["c"]


@pytest.mark.spec("C6")
def test_nor_is_it_overtaken_after_half_a_minute() -> None:
    desk = Desk(device=80)
    loading(desk, 50)
    desk.ask(1, "large", 60)
    assert granted(desk.ask(30.9, "small", 1)) == ["small"]
    assert desk.ask(31, "small2", 1, priority=Priority.URGENT) == []
    desk.at(40, ev.LoadBroke(TicketId("a"), "x", True))
    assert granted(desk.gone(41, "a")) == ["large", "small2"]


@pytest.mark.spec("C6", "C2")
def test_one_that_is_due_asks_with_the_urgency_of_whom_it_holds_up() -> None:
    desk = Desk(device=80)
    desk.resident(0, "a", 80, priority=HIGH)
    assert desk.ask(1, "b", 50, priority=LOW) == []
    assert desk.woke(31) == []  # due, but nobody it holds up may have more than it
    assert revoked(desk.ask(32, "c", 50, priority=HIGH)) == [("a", "swap", "gone")]
    desk.at(33, ev.Released(TicketId("a"), "swap"))
    assert granted(desk.gone(34, "a")) == ["b"]


@pytest.mark.spec("C6")
def test_bytes_on_their_way_for_one_are_not_lent_to_another() -> None:
    desk = Desk(device=80)
    desk.resident(0, "a", 60)
    assert revoked(desk.ask(20, "b", 70)) == [("a", "swap", "gone")]
    assert granted(desk.ask(21, "small", 10)) == ["small"]  # 80 - 70 is nobody's
    assert desk.ask(21, "vad", 1) == []  # 10 are free, and promised to `b`


@pytest.mark.spec("C6")
def test_among_equals_the_warm_go_first() -> None:
    """Asleep, or the same model as a load in flight."""
    desk = Desk(device=80, holders=("h", "g"))
    loading(desk, 50)
    desk.ask(1, "b", 40)
    desk.ask(2, "a2", 40, holder="g")  # `a` is being loaded by the other holder
    assert desk.state.queue.tickets() == ["a2", "b"]
    desk.at(3, ev.Loaded(TicketId("a"), seconds(3)))
    assert desk.state.queue.tickets() == ["b", "a2"]


@pytest.mark.spec("C6", "C4")
def test_a_ticket_waiting_for_minimum_residency_is_looked_at_when_it_ends_with_no_other_news() -> (
    None
):
    desk = Desk(device=80)
    desk.ask(0, "a", 80)
    desk.at(8, ev.Loaded(TicketId("a"), seconds(8)))
    desk.beat(8, "a")
    desk.ask(9, "b", 10)
    assert desk.woke(15.9) == []
    assert revoked(desk.woke(16)) == [("a", "swap", "gone")]


# -- groups ---------------------------------------------------------------------------------------

ALONE = replace(PLAIN, one_resident_roles=frozenset({"text"}))


@pytest.mark.spec("A11")
def test_in_an_exclusion_group_one_model_of_a_role_is_resident_and_the_next_swaps_with_it() -> None:
    desk = Desk(device=80, settings=ALONE)
    desk.resident(0, "a", 10)
    assert revoked(desk.ask(20, "b", 10)) == [("a", "swap", "gone")]  # though both would fit
    assert granted(desk.at(21, ev.Released(TicketId("a"), "swap"))) == ["b"]
    assert granted(desk.ask(23, "e1", 10, capability="embedding", model="e1")) == ["e1"]


@pytest.mark.spec("A11")
def test_replicas_of_one_model_share_a_group_and_by_default_there_is_none() -> None:
    desk = Desk(device=80, settings=ALONE, holders=("h", "g"))
    desk.resident(0, "a", 10)
    assert granted(desk.ask(20, "a2", 10, holder="g")) == ["a2"]
    desk = Desk(device=80)
    desk.resident(0, "a", 10)
    assert granted(desk.ask(20, "b", 10)) == ["b"]


@pytest.mark.spec("A11")
def test_of_a_group_all_leave_or_none() -> None:
    desk = Desk(device=80, settings=ALONE, holders=("h", "g"))
    desk.resident(0, "a", 10)
    desk.ask(19, "a2", 10, holder="g")
    desk.at(25, ev.Loaded(TicketId("a2"), seconds(6)))
    desk.beat(25, holder="g")
    assert revoked(desk.ask(26, "b", 10)) == []  # `a2` has its minimum residency before it
    assert sorted(name for name, _, _ in revoked(desk.woke(31))) == ["a", "a2"]


@pytest.mark.spec("A11", "C2")
def test_a_group_takes_nobody_more_urgent_away() -> None:
    desk = Desk(device=80, settings=ALONE)
    desk.resident(0, "a", 10, priority=HIGH)
    assert desk.ask(20, "b", 10) == []
    assert revoked(desk.ask(21, "c", 10, priority=HIGH)) == [("a", "swap", "gone")]


# -- larger than everything -----------------------------------------------------------------------


def oversized() -> Desk:
    desk = Desk(device=80)
    text = capability("text", "text", ("a", "b", "c"))
    models = tuple(replace(m, allow_oversize=m.name == "c") for m in text.models)
    desk.at(0, ev.CapabilitiesSet((replace(text, models=models),)))
    return desk


@pytest.mark.spec("B6")
def test_a_model_larger_than_the_budget_may_be_let_in_when_all_that_is_idle_has_gone() -> None:
    desk = oversized()
    desk.resident(0, "a", 30)
    desk.resident(0, "b", 30)
    desk.beat(1, "b", inflight=1)
    assert revoked(desk.ask(20, "c", 100)) == [("a", "swap", "gone")]  # `b` is in use
    desk.at(21, ev.Released(TicketId("a"), "swap"))
    [grant] = desk.gone(22, "a")
    assert grant.devices == (types.DeviceBytes(DeviceId("n/cpu:0"), gib(50)),)
    warning = desk.last("oversize")
    assert (warning.size_bytes, warning.data["granted_bytes"]) == (gib(100), gib(50))


@pytest.mark.spec("B6")
def test_what_it_takes_beyond_the_budget_does_not_send_it_away() -> None:
    desk = oversized()
    desk.ask(0, "c", 100)
    desk.at(1, ev.Loaded(TicketId("c"), seconds(1)))
    desk.beat(1, "c")
    desk.engines["c"] = {DeviceId("n/cpu:0"): 95}
    assert desk.read(2) == []
    assert desk.free() == -15
    assert isinstance(refusal(desk.ask(3, "b", 100)), NeverFits)


@pytest.mark.spec("B6", "C5")
def test_under_critical_pressure_nothing_oversized_is_let_in() -> None:
    desk = Desk(device=80)
    large = capability("embedding", "embedding", ("e1", "e2"))
    models = tuple(replace(m, allow_oversize=True) for m in large.models)
    desk.at(0, ev.CapabilitiesSet((desk.table[0], replace(large, models=models))))
    desk.ask(0, "a", 10)
    assert desk.ask(1, "e1", 100, capability="embedding", model="e1") == []  # `a` is loading
    desk.at(2, ev.PressurePushed(CPU, types.Level.CRITICAL, gib(1), seconds(60)))
    assert granted(desk.at(3, ev.Loaded(TicketId("a"), seconds(3)))) == []
    assert granted(desk.woke(63)) == ["e1"]


# -- where ----------------------------------------------------------------------------------------


def gpus(count: int, size: float = 80, host: float = 0) -> Desk:
    desk = Desk(settings=replace(PLAIN, timeouts=PATIENT))
    devices = [(f"g/gpu:{n}", types.DeviceKind.GPU, size) for n in range(count)]
    devices.append(("g/host", types.DeviceKind.HOST, host))
    specs = tuple(types.DeviceSpec(DeviceId(name), kind, gib(of)) for name, kind, of in devices)
    desk.at(0, ev.NodeSeen(NodeId("g"), specs))
    readings = tuple(ev.DeviceReading(spec.device, gib(0), gib(0)) for spec in specs)
    desk.at(0, ev.Measured(NodeId("g"), readings, ()))
    for holder in ("h1", "h2"):
        desk.join(0, holder, node="g")
    return desk


def where(desk: Desk, t: float, name: str, size: float, holder: str, host: float = 0) -> str:
    [grant] = desk.ask(t, name, size, holder=holder, host=host)
    return grant.devices[0].device[-1]


@pytest.mark.spec("C9")
def test_replicas_of_one_model_are_spread_over_the_devices() -> None:
    desk = gpus(2)
    assert where(desk, 0, "b", 50, "h1") == "0"
    assert where(desk, 0, "a1", 20, "h1") == "0"  # the smallest hole
    assert where(desk, 0, "a2", 10, "h2") == "1"  # apart from its copy


@pytest.mark.spec("C9")
def test_a_model_comes_back_to_where_it_was_though_a_smaller_hole_has_appeared() -> None:
    desk = gpus(2)
    assert where(desk, 0, "a1", 20, "h1") == "0"
    desk.at(1, ev.Loaded(TicketId("a1"), seconds(1)))
    assert where(desk, 2, "b", 70, "h2") == "1"
    desk.at(3, ev.Released(TicketId("a1"), "idle"))
    desk.at(4, ev.EngineGone(NodeId("g"), TicketId("a1"), True))
    assert where(desk, 5, "a3", 10, "h1") == "0"


@pytest.mark.spec("C9")
def test_a_sleeper_wakes_where_it_sleeps_though_its_model_was_elsewhere_last() -> None:
    desk = gpus(2, host=80)
    assert where(desk, 0, "a1", 50, "h1", host=50) == "0"
    desk.at(1, ev.Loaded(TicketId("a1"), seconds(1)))
    assert where(desk, 2, "a2", 50, "h2") == "1"
    desk.at(3, ev.Loaded(TicketId("a2"), seconds(1)))
    desk.beat(4, "a1", holder="h1")
    desk.at(20, ev.FloorSet("text", "a", types.Floor.HOST))
    desk.at(21, ev.Slept(TicketId("a1")))
    asleep = ev.EngineReading(TicketId("a1"), (types.DeviceBytes(DeviceId("g/host"), gib(50)),))
    devices = desk.state.nodes[NodeId("g")].devices
    readings = tuple(ev.DeviceReading(device, gib(0), gib(0)) for device in devices)
    desk.at(22, ev.Measured(NodeId("g"), readings, (asleep,)))
    assert desk.state_of("a1") == "asleep"
    desk.at(23, ev.Released(TicketId("a2"), "idle"))
    desk.at(24, ev.EngineGone(NodeId("g"), TicketId("a2"), True))
    assert where(desk, 25, "a1", 50, "h1", host=50) == "0"


@pytest.mark.spec("C5", "C6")
def test_whom_pressure_spares_is_not_held_up_by_one_whom_it_does_not() -> None:
    desk = Desk(device=80)
    loading(desk, 75)
    assert desk.ask(1, "e", 10, capability="embedding", model="e1") == []
    assert desk.ask(2, "b", 10) == []
    desk.at(3, ev.PressurePushed(CPU, types.Level.CRITICAL, gib(1), seconds(60)))
    desk.at(4, ev.LoadBroke(TicketId("a"), "x", True))
    assert granted(desk.gone(5, "a")) == ["b"]


def critical(desk: Desk, t: float, number: int) -> None:
    where = DeviceId(f"g/gpu:{number}")
    desk.at(t, ev.PressurePushed(where, types.Level.CRITICAL, gib(1), seconds(60)))


@pytest.mark.spec("C5", "C6")
def test_whom_pressure_spares_goes_where_one_before_it_may_not() -> None:
    desk = gpus(2)
    desk.resident(0, "a", 75, holder="h1", priority=HIGH)
    critical(desk, 1, 1)
    assert desk.ask(2, "e", 20, capability="embedding", model="e1", holder="h1") == []
    assert where(desk, 3, "b", 20, "h2") == "1"


@pytest.mark.spec("B5", "C6")
def test_what_may_be_split_is_not_held_up_by_one_that_needs_less_but_on_one_device() -> None:
    desk = gpus(2, size=70)
    for holder, name, size in (("h1", "a1", 25), ("h2", "a2", 25), ("h1", "d", 10)):
        desk.resident(0, name, size, holder=holder, priority=HIGH)
    assert desk.ask(1, "b", 65, holder="h1") == []
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
    assert desk.at(2, asked) == []  # 40 on each, and 35 are free on one
    desk.at(3, ev.Released(TicketId("d"), "idle"))
    assert granted(desk.at(4, ev.EngineGone(NodeId("g"), TicketId("d"), True))) == ["c"]


@pytest.mark.spec("B6", "C6")
def test_what_may_be_oversized_is_not_held_up_by_one_that_needs_less_but_has_to_fit() -> None:
    desk = oversized()
    desk.ask(0, "a", 50, priority=HIGH)
    assert desk.ask(1, "b", 60) == []
    assert desk.ask(2, "c", 100) == []  # `a` may yet turn out to be idle
    assert granted(desk.at(3, ev.Loaded(TicketId("a"), seconds(3)))) == ["c"]


@pytest.mark.spec("N2")
def test_behind_one_that_cannot_load_only_the_smaller_and_the_more_urgent_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk(device=80)
    loading(desk, 75)
    for n in range(20):
        desk.ask(1, f"b{n}", 10)
    walked: list[str] = []
    walk = desk.state.queue.walk

    def spied(node: NodeId) -> Iterator[QueueEntry]:
        for waiting in walk(node):
            walked.append(waiting.request.ticket)
            yield waiting

    monkeypatch.setattr(desk.state.queue, "walk", spied)
    assert desk.ask(2, "c", 10) == []
    assert walked == ["b0"]
    assert granted(desk.ask(3, "small", 5)) == ["small"]
    assert desk.ask(4, "large", 30, priority=Priority.URGENT) == []
    walked.clear()
    assert desk.ask(5, "c2", 10) == []
    assert walked == ["large", "b0"]


@pytest.mark.spec("C6")
def test_the_urgent_are_looked_at_behind_others_that_cannot_load_whatever_the_policy() -> None:
    desk = Desk(device=80, settings=replace(PLAIN, admit="fifo"))
    desk.resident(0, "a", 80)
    assert desk.ask(1, "b", 50, priority=LOW) == []
    assert revoked(desk.ask(2, "c", 50, priority=HIGH)) == [("a", "swap", "gone")]
