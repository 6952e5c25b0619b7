"""Asking, the line, grants (SPEC A2-A4, A8, B6, C6, C7). Times in seconds, sizes in GiB."""

from dataclasses import replace

import pytest

from arbiter import errors
from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Grant
from arbiter.units import GIB, Bytes, HolderId, NodeId, TicketId, in_seconds, seconds
from tests.unit.desk import (
    CPU,
    PATIENT,
    PLAIN,
    Desk,
    capability,
    gib,
    granted,
    is_granted,
    reaped,
    refusal,
    revoked,
    s,
)


@pytest.mark.spec("A3")
def test_grants_up_to_the_last_byte() -> None:
    desk = Desk(device=80)
    [grant] = desk.ask(0, "a", 60)
    assert grant == Grant(TicketId("a"), (types.DeviceBytes(CPU, gib(60)),), s(600), seconds(0))
    assert granted(desk.ask(0, "b", 20)) == ["b"]
    assert desk.free() == 0
    assert desk.ask(0, "c", 1 / GIB) == []


@pytest.mark.spec("B6")
def test_one_byte_over_the_budget_is_refused_with_the_numbers() -> None:
    desk = Desk(device=80)
    error = refusal(desk.ask(0, "a", 80 + 1 / GIB))
    assert error == errors.NeverFits(TicketId("a"), Bytes(80 * GIB + 1), gib(80))
    assert desk.state_of("a") == "closed"


@pytest.mark.spec("A4")
def test_different_models_load_at_once_and_loads_in_flight_are_charged() -> None:
    desk = Desk(device=80)
    assert granted(desk.ask(0, "a", 40)) == ["a"]
    assert granted(desk.ask(0, "b", 40)) == ["b"]
    assert desk.charged() == 80


@pytest.mark.spec("A3", "A4")
def test_asking_again_repeats_the_answer_and_charges_once() -> None:
    desk = Desk()
    first = desk.ask(0, "a", 10)
    assert desk.ask(1, "a", 10) == first
    desk.at(2, ev.Loaded(TicketId("a"), seconds(2)))
    assert desk.ask(3, "a", 10) == first
    assert desk.charged() == 10


def test_asking_again_while_waiting_keeps_one_place() -> None:
    desk = Desk(device=80)
    desk.ask(0, "a", 80)
    desk.ask(1, "b", 80)
    assert desk.ask(2, "b", 80) == []
    assert len(desk.state.queue) == 1


def test_a_refusal_is_repeated_not_reconsidered() -> None:
    desk = Desk(device=80)
    first = refusal(desk.ask(0, "a", 90))
    assert refusal(desk.ask(1, "a", 10)) == first


@pytest.mark.spec("A7")
def test_use_after_release_is_a_typed_error() -> None:
    desk = Desk()
    desk.resident(0, "a", 10)
    desk.at(1, ev.Released(TicketId("a"), "manual"))
    assert refusal(desk.ask(1, "a", 10)) == errors.TicketClosed(TicketId("a"))
    desk.gone(2, "a")
    assert refusal(desk.ask(3, "a", 10)) == errors.TicketClosed(TicketId("a"))


@pytest.mark.spec("A2")
def test_an_unknown_capability_or_model_is_named_with_what_exists_nearest_first() -> None:
    desk = Desk()
    error = refusal(desk.ask(0, "x", 1, capability="tetx"))
    assert error == errors.UnknownCapability("tetx", ("text", "embedding"))
    error = refusal(desk.ask(0, "y", 1, model="smal"))
    assert isinstance(error, errors.UnknownModel)
    assert error.known[0] == "small"


@pytest.mark.spec("A2")
def test_registering_the_same_name_differently_is_an_error_that_names_the_difference() -> None:
    desk = Desk()
    desk.at(0, ev.CapabilityRegistered(desk.table[0]))
    other = capability("text", "vision", tuple(m.name for m in desk.table[0].models))
    with pytest.raises(errors.CapabilityConflict, match="other role"):
        desk.at(0, ev.CapabilityRegistered(other))
    assert desk.arbiter.replica_targets(s(0))["text"] == 1
    assert desk.state.registry.specs["text"].role == "text"


@pytest.mark.spec("A2")
def test_a_capability_can_be_added_from_python() -> None:
    desk = Desk()
    desk.at(0, ev.CapabilityRegistered(capability("vad", "vad", ("silero",))))
    assert granted(desk.ask(0, "v", 1, capability="vad", model="silero")) == ["v"]


def test_a_role_nobody_knows_is_refused_when_registered() -> None:
    desk = Desk()
    with pytest.raises(errors.UnknownRole, match="poet"):
        desk.at(0, ev.CapabilityRegistered(capability("odes", "poet", ("keats",))))
    assert "odes" not in desk.state.registry.specs


def test_a_removed_model_is_refused_to_those_who_wait_and_its_resident_goes_when_idle() -> None:
    desk = Desk(device=80)
    desk.resident(0, "a", 50)
    desk.beat(0, "a", inflight=1)
    assert desk.ask(0.5, "b", 80) == []  # `a` is within its minimum residency
    only_c = (capability("text", "text", ("c",)),)
    assert isinstance(refusal(desk.at(0.6, ev.CapabilitiesSet(only_c))), errors.UnknownModel)
    assert desk.state_of("a") == "resident"
    assert revoked(desk.beat(3, "a", inflight=0)) == [("a", "idle", "gone")]


@pytest.mark.spec("A18")
def test_a_holder_that_never_joined_is_told_to_rejoin() -> None:
    desk = Desk()
    assert isinstance(refusal(desk.ask(0, "a", 1, holder="ghost")), errors.StaleEpoch)


@pytest.mark.spec("C6")
def test_the_line_is_served_in_order_of_arrival() -> None:
    desk = Desk(device=80)
    desk.ask(0, "a", 80)
    for t, name in enumerate(["c", "b", "d"], start=1):
        desk.ask(t, name, 40)
    desk.at(5, ev.LoadBroke(TicketId("a"), "x", False))
    assert granted(desk.gone(6, "a")) == ["c", "b"]


def test_a_ticket_waiting_on_one_node_does_not_block_another_node() -> None:
    desk = Desk(device=80)
    desk.see_node(0, 80, 0, node="m")
    desk.read(0, node="m")
    desk.join(0, "hm", node="m")
    desk.ask(0, "a", 80)
    assert desk.ask(1, "b", 80) == []
    assert is_granted(desk.ask(2, "c", 80, holder="hm"), "c")


def test_best_fit_leaves_the_smallest_hole() -> None:
    desk = Desk(device=80)
    gpus = tuple(
        types.DeviceSpec(f"n/gpu:{number}", types.DeviceKind.GPU, gib(size))
        for number, size in enumerate([80, 30, 50])
    )
    desk.at(0, ev.NodeSeen(NodeId("g"), gpus))
    readings = tuple(ev.DeviceReading(g.device, gib(80), gib(0)) for g in gpus)
    desk.at(0, ev.Measured(NodeId("g"), readings, ()))
    desk.join(0, "hg", node="g")
    [grant] = desk.ask(0, "a", 25, holder="hg")
    assert grant.devices == (types.DeviceBytes("n/gpu:1", gib(25)),)
    [grant] = desk.ask(0, "b", 25, holder="hg")
    assert grant.devices == (types.DeviceBytes("n/gpu:2", gib(25)),)
    [grant] = desk.ask(0, "c", 60, holder="hg")
    assert grant.devices == (types.DeviceBytes("n/gpu:0", gib(60)),)


@pytest.mark.spec("A8")
def test_a_caller_that_gave_up_leaves_the_queue_and_nothing_is_loaded_for_it() -> None:
    desk = Desk(device=80)
    desk.ask(0, "a", 80)
    desk.ask(1, "b", 80)
    desk.at(2, ev.Withdrawn(TicketId("b")))
    assert desk.state_of("b") == "closed"
    desk.at(3, ev.Released(TicketId("a"), "manual"))
    assert granted(desk.gone(4, "a")) == []


def test_a_withdrawal_that_overtakes_its_request_is_honoured() -> None:
    desk = Desk()
    desk.at(0, ev.Withdrawn(TicketId("a")))
    assert refusal(desk.ask(1, "a", 1)) == errors.TicketClosed(TicketId("a"))


@pytest.mark.spec("A8")
def test_a_load_whose_caller_left_is_stopped_unless_a_fifth_of_it_remains() -> None:
    desk = Desk()
    desk.ask(0, "a", 10)
    desk.at(10, ev.Loaded(TicketId("a"), seconds(10)))
    desk.ask(20, "a1", 10)
    assert reaped(desk.at(27.9, ev.Withdrawn(TicketId("a1")))) == ["a1"]
    assert desk.state_of("a1") == "reclaiming"
    desk.gone(28, "a1")
    desk.ask(30, "a2", 10)
    assert desk.at(38, ev.Withdrawn(TicketId("a2"))) == []
    assert desk.state_of("a2") == "loading"


def test_a_load_of_unknown_length_is_stopped_when_its_caller_leaves() -> None:
    desk = Desk()
    desk.ask(0, "a", 10)
    decisions = desk.at(1, ev.Withdrawn(TicketId("a")))
    assert reaped(decisions) == ["a"]
    assert revoked(decisions) == [("a", "withdrawn", "gone")]


@pytest.mark.spec("A21")
def test_a_request_not_granted_by_its_deadline_is_refused_and_may_come_back() -> None:
    desk = Desk(device=80)
    desk.ask(0, "a", 80)
    desk.ask(1, "b", 80, deadline_s=5)
    desk.sleep_until(6)
    assert desk.wakes == [s(6)] and "b" in desk.state.queue
    error = refusal(desk.woke(6))
    assert error == errors.DeadlineUnmet(TicketId("b"), 5.0, 1.0)
    assert desk.state_of("b") == "closed"


@pytest.mark.spec("C7")
def test_the_line_is_bounded_per_model_and_in_all() -> None:
    desk = Desk(settings=replace(PLAIN, queue_per_model_count=2, queue_total_count=3))
    desk.ask(0, "a", 80)
    for name in ("b1", "b2"):
        assert desk.ask(1, name, 80) == []
    assert refusal(desk.ask(1, "b3", 80)) == errors.QueueFull("b", 2, 2, 1.0)
    assert desk.ask(1, "c1", 80) == []
    assert refusal(desk.ask(1, "d1", 80)) == errors.QueueFull("the arbiter", 3, 3, 1.0)
    assert is_granted(desk.at(2, ev.Loaded(TicketId("a"), seconds(1))), "a") is False
    desk.at(3, ev.Withdrawn(TicketId("b1")))
    assert desk.ask(4, "b4", 80) == []  # room again


def test_what_never_fits_after_a_device_shrank_leaves_the_line() -> None:
    desk = Desk(device=80)
    desk.ask(0, "a", 80)
    desk.ask(1, "b", 60)
    desk.state.ledger.find(TicketId("a"))
    specs = (types.DeviceSpec(CPU, types.DeviceKind.CPU, gib(50)),)
    assert isinstance(refusal(desk.at(2, ev.NodeSeen(NodeId("n"), specs))), errors.NeverFits)


def test_nothing_is_granted_to_a_silent_holder_and_it_keeps_its_place() -> None:
    terms = replace(PATIENT, silent=seconds(10))
    desk = Desk(device=80, settings=replace(PLAIN, timeouts=terms), holders=("h", "mute"))
    desk.resident(0, "a", 80)
    desk.ask(1, "b", 80, holder="mute")
    desk.beat(12, "a")
    desk.at(12, ev.Released(TicketId("a"), "manual"))
    assert granted(desk.gone(12.1, "a")) == []
    assert granted(desk.at(13, ev.Renewed(HolderId("mute"), ()))) == ["b"]


def test_waited_time_and_place_are_told() -> None:
    desk = Desk(device=80)
    desk.ask(0, "a", 80)
    desk.ask(1, "b", 80)
    assert desk.last("ticket_queued").data["position"] == 1
    desk.at(2, ev.LoadBroke(TicketId("a"), "x", False))
    desk.gone(4, "a")
    assert in_seconds(desk.last("ticket_granted").took) == 3
