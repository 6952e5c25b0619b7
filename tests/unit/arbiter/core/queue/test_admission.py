"""Asking, the line, grants (A2-A4, A8, B6, C6, C7). Times in seconds, sizes in GiB."""

from dataclasses import replace

import pytest

from arbiter import errors
from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Grant
from arbiter.units import GIB, Bytes, DeviceId, HolderId, NodeId, TicketId, in_seconds, seconds
from tests.support.core_driver import (
    CPU,
    PATIENT,
    PLAIN,
    CoreDriver,
    capability,
    gib,
    granted,
    is_granted,
    killed,
    refusal,
    revoked,
    s,
)


@pytest.mark.spec("A3")
def test_arbiter_grants_up_to_the_last_byte() -> None:
    driver = CoreDriver(device=80)
    [grant] = driver.ask(0, "a", 60)
    assert grant == Grant(TicketId("a"), (types.DeviceBytes(CPU, gib(60)),), s(600), seconds(0))
    assert granted(driver.ask(0, "b", 20)) == ["b"]
    assert driver.free() == 0
    assert driver.ask(0, "c", 1 / GIB) == []


@pytest.mark.spec("B6")
def test_one_byte_over_the_budget_is_refused_with_the_numbers() -> None:
    driver = CoreDriver(device=80)
    error = refusal(driver.ask(0, "a", 80 + 1 / GIB))
    assert error == errors.NeverFits(TicketId("a"), Bytes(80 * GIB + 1), gib(80))
    assert driver.state_of("a") == "closed"


@pytest.mark.spec("A4")
def test_different_models_load_at_once_and_loads_in_flight_are_charged() -> None:
    driver = CoreDriver(device=80)
    assert granted(driver.ask(0, "a", 40)) == ["a"]
    assert granted(driver.ask(0, "b", 40)) == ["b"]
    assert driver.charged() == 80


@pytest.mark.spec("A3", "A4")
def test_repeated_request_repeats_the_answer_and_charges_once() -> None:
    driver = CoreDriver()
    first = driver.ask(0, "a", 10)
    assert driver.ask(1, "a", 10) == first
    driver.at(2, ev.Loaded(TicketId("a"), seconds(2)))
    assert driver.ask(3, "a", 10) == first
    assert driver.charged() == 10


def test_repeated_request_while_queued_keeps_one_place() -> None:
    driver = CoreDriver(device=80)
    driver.ask(0, "a", 80)
    driver.ask(1, "b", 80)
    assert driver.ask(2, "b", 80) == []
    assert len(driver.queue()) == 1


def test_a_refusal_is_repeated_not_reconsidered() -> None:
    driver = CoreDriver(device=80)
    first = refusal(driver.ask(0, "a", 90))
    assert refusal(driver.ask(1, "a", 10)) == first


@pytest.mark.spec("A7")
def test_use_after_release_is_a_typed_error() -> None:
    driver = CoreDriver()
    driver.resident(0, "a", 10)
    driver.at(1, ev.Released(TicketId("a"), "manual"))
    assert refusal(driver.ask(1, "a", 10)) == errors.TicketClosed(TicketId("a"))
    driver.gone(2, "a")
    assert refusal(driver.ask(3, "a", 10)) == errors.TicketClosed(TicketId("a"))


@pytest.mark.spec("A2")
def test_an_unknown_capability_or_model_is_named_with_what_exists_nearest_first() -> None:
    driver = CoreDriver()
    error = refusal(driver.ask(0, "x", 1, capability="tetx"))
    assert error == errors.UnknownCapability("tetx", ("text", "embedding"))
    error = refusal(driver.ask(0, "y", 1, model="smal"))
    assert isinstance(error, errors.UnknownModel)
    assert error.known[0] == "small"


@pytest.mark.spec("A2")
def test_registration_conflict_is_an_error_that_names_the_difference() -> None:
    driver = CoreDriver()
    driver.at(0, ev.CapabilityRegistered(driver.table[0]))
    other = capability("text", "vision", tuple(m.name for m in driver.table[0].models))
    with pytest.raises(errors.CapabilityConflict, match="other role"):
        driver.at(0, ev.CapabilityRegistered(other))
    assert driver.arbiter.replica_targets(s(0))["text"] == 1
    assert driver.capabilities()["text"].role == "text"


@pytest.mark.spec("A2")
def test_a_capability_can_be_added_from_python() -> None:
    driver = CoreDriver()
    driver.at(0, ev.CapabilityRegistered(capability("vad", "vad", ("silero",))))
    assert granted(driver.ask(0, "v", 1, capability="vad", model="silero")) == ["v"]


def test_unknown_role_is_refused_at_registration() -> None:
    driver = CoreDriver()
    with pytest.raises(errors.UnknownRole, match="poet"):
        driver.at(0, ev.CapabilityRegistered(capability("odes", "poet", ("keats",))))
    assert "odes" not in driver.capabilities()


def test_removed_model_refuses_its_queued_tickets_and_leaves_the_device_when_idle() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 50)
    driver.beat(0, "a", inflight=1)
    assert driver.ask(0.5, "b", 80) == []  # `a` is within its minimum residency
    only_c = (capability("text", "text", ("c",)),)
    assert isinstance(refusal(driver.at(0.6, ev.CapabilitiesSet(only_c))), errors.UnknownModel)
    assert driver.state_of("a") == "resident"
    assert revoked(driver.beat(3, "a", inflight=0)) == [("a", "idle", "gone")]


@pytest.mark.spec("A18")
def test_a_holder_that_never_joined_is_told_to_rejoin() -> None:
    driver = CoreDriver()
    assert isinstance(refusal(driver.ask(0, "a", 1, holder="ghost")), errors.StaleEpoch)


@pytest.mark.spec("A18", "A5")
def test_request_of_a_holder_that_counted_as_dead_is_granted_once_it_has_joined_again() -> None:
    terms = replace(PATIENT, silent=seconds(10))
    driver = CoreDriver(settings=replace(PLAIN, timeouts=terms), holders=())
    joins = ev.Joined(HolderId("h"), NodeId("n"), "text", (), is_driver=True)
    driver.at(0, joins)
    driver.fire_timer(10)
    assert driver.holders() == set()
    assert isinstance(refusal(driver.ask(15, "a", 10)), errors.StaleEpoch)
    driver.at(16, joins)
    assert granted(driver.ask(17, "a", 10)) == ["a"]


@pytest.mark.spec("A18", "A15")
def test_lease_whose_holder_counted_as_dead_is_granted_once_it_has_joined_again() -> None:
    driver = CoreDriver(settings=replace(PLAIN, lease_tenant_fraction=1.0))
    assert isinstance(refusal(driver.lease(0, "job", 10, joined=True)), errors.StaleEpoch)
    assert granted(driver.lease(1, "job", 10)) == ["job"]


@pytest.mark.spec("C6")
def test_queue_is_served_in_order_of_arrival() -> None:
    driver = CoreDriver(device=80)
    driver.ask(0, "a", 80)
    for t, name in enumerate(["c", "b", "d"], start=1):
        driver.ask(t, name, 40)
    driver.at(5, ev.LoadBroke(TicketId("a"), "x", False))
    assert granted(driver.gone(6, "a")) == ["c", "b"]


def test_a_ticket_waiting_on_one_node_does_not_block_another_node() -> None:
    driver = CoreDriver(device=80)
    driver.see_node(0, 80, 0, node="m")
    driver.read(0, node="m")
    driver.join(0, "hm", node="m")
    driver.ask(0, "a", 80)
    assert driver.ask(1, "b", 80) == []
    assert is_granted(driver.ask(2, "c", 80, holder="hm"), "c")


def test_best_fit_leaves_the_smallest_hole() -> None:
    driver = CoreDriver(device=80)
    gpus = tuple(
        types.DeviceSpec(f"n/gpu:{number}", types.DeviceKind.GPU, gib(size))
        for number, size in enumerate([80, 30, 50])
    )
    driver.at(0, ev.NodeSeen(NodeId("g"), gpus))
    readings = tuple(ev.DeviceReading(g.device, gib(80), gib(0)) for g in gpus)
    driver.at(0, ev.Measured(NodeId("g"), readings, ()))
    driver.join(0, "hg", node="g")
    [grant] = driver.ask(0, "a", 25, holder="hg")
    assert grant.devices == (types.DeviceBytes("n/gpu:1", gib(25)),)
    [grant] = driver.ask(0, "b", 25, holder="hg")
    assert grant.devices == (types.DeviceBytes("n/gpu:2", gib(25)),)
    [grant] = driver.ask(0, "c", 60, holder="hg")
    assert grant.devices == (types.DeviceBytes("n/gpu:0", gib(60)),)


@pytest.mark.spec("B3", "A17")
def test_estimate_has_the_context_of_a_gpu_where_the_node_has_one_and_no_size_is_given() -> None:
    driver = CoreDriver(device=80)
    gpu = types.DeviceSpec(DeviceId("g/gpu:0"), types.DeviceKind.GPU, gib(80))
    driver.at(0, ev.NodeSeen(NodeId("g"), (gpu,)))
    driver.at(0, ev.Measured(NodeId("g"), (ev.DeviceReading(gpu.device, gib(80), gib(0)),), ()))
    driver.join(0, "hg", node="g")
    need = types.Need(gib(10), context_bytes=gib(1), gpu_context_bytes=gib(3))

    def granted_bytes(name: str, holder: str, *, explicit: bool) -> int:
        asked = ev.Requested(
            TicketId(name), HolderId(holder), "text", name, need, need_is_explicit=explicit
        )
        [grant] = driver.at(1, asked)
        assert isinstance(grant, Grant)
        return grant.devices[0].size_bytes

    assert granted_bytes("a", "hg", explicit=False) == gib(13)
    assert granted_bytes("b", "hg", explicit=True) == gib(11)
    assert granted_bytes("c", "h", explicit=False) == gib(11)


@pytest.mark.spec("A8")
def test_a_caller_that_gave_up_leaves_the_queue_and_nothing_is_loaded_for_it() -> None:
    driver = CoreDriver(device=80)
    driver.ask(0, "a", 80)
    driver.ask(1, "b", 80)
    driver.at(2, ev.Withdrawn(TicketId("b")))
    assert driver.state_of("b") == "closed"
    driver.at(3, ev.Released(TicketId("a"), "manual"))
    assert granted(driver.gone(4, "a")) == []


def test_withdrawal_that_arrives_before_its_request_is_honoured() -> None:
    driver = CoreDriver()
    driver.at(0, ev.Withdrawn(TicketId("a")))
    assert refusal(driver.ask(1, "a", 1)) == errors.TicketClosed(TicketId("a"))


@pytest.mark.spec("A8")
def test_a_load_whose_caller_left_is_stopped_unless_a_fifth_of_it_remains() -> None:
    driver = CoreDriver()
    driver.ask(0, "a", 10)
    driver.at(10, ev.Loaded(TicketId("a"), seconds(10)))
    driver.ask(20, "a1", 10)
    assert killed(driver.at(27.9, ev.Withdrawn(TicketId("a1")))) == ["a1"]
    assert driver.state_of("a1") == "reclaiming"
    driver.gone(28, "a1")
    driver.ask(30, "a2", 10)
    assert driver.at(38, ev.Withdrawn(TicketId("a2"))) == []
    assert driver.state_of("a2") == "loading"


def test_a_load_of_unknown_length_is_stopped_when_its_caller_leaves() -> None:
    driver = CoreDriver()
    driver.ask(0, "a", 10)
    decisions = driver.at(1, ev.Withdrawn(TicketId("a")))
    assert killed(decisions) == ["a"]
    assert revoked(decisions) == [("a", "withdrawn", "gone")]


@pytest.mark.spec("A21")
def test_a_request_not_granted_by_its_deadline_is_refused_and_may_come_back() -> None:
    driver = CoreDriver(device=80)
    driver.ask(0, "a", 80)
    driver.ask(1, "b", 80, deadline_s=5)
    driver.sleep_until(6)
    assert driver.timers == [s(6)] and "b" in driver.queue()
    error = refusal(driver.fire_timer(6))
    assert error == errors.DeadlineUnmet(TicketId("b"), 5.0, 1.0)
    assert driver.state_of("b") == "closed"


@pytest.mark.spec("C7")
def test_queue_is_bounded_per_model_and_in_total() -> None:
    driver = CoreDriver(settings=replace(PLAIN, queue_per_model_count=2, queue_total_count=3))
    driver.ask(0, "a", 80)
    for name in ("b1", "b2"):
        assert driver.ask(1, name, 80) == []
    assert refusal(driver.ask(1, "b3", 80)) == errors.QueueFull("b", 2, 2, 1.0)
    assert driver.ask(1, "c1", 80) == []
    assert refusal(driver.ask(1, "d1", 80)) == errors.QueueFull("the arbiter", 3, 3, 1.0)
    assert is_granted(driver.at(2, ev.Loaded(TicketId("a"), seconds(1))), "a") is False
    driver.at(3, ev.Withdrawn(TicketId("b1")))
    assert driver.ask(4, "b4", 80) == []  # room again


def test_queued_ticket_that_no_longer_fits_a_shrunk_device_is_refused() -> None:
    driver = CoreDriver(device=80)
    driver.ask(0, "a", 80)
    driver.ask(1, "b", 60)
    specs = (types.DeviceSpec(CPU, types.DeviceKind.CPU, gib(50)),)
    assert isinstance(refusal(driver.at(2, ev.NodeSeen(NodeId("n"), specs))), errors.NeverFits)


def test_silent_holder_is_granted_nothing_and_keeps_its_place() -> None:
    terms = replace(PATIENT, silent=seconds(10))
    driver = CoreDriver(device=80, settings=replace(PLAIN, timeouts=terms), holders=("h", "mute"))
    driver.resident(0, "a", 80)
    driver.ask(1, "b", 80, holder="mute")
    driver.beat(12, "a")
    driver.at(12, ev.Released(TicketId("a"), "manual"))
    assert granted(driver.gone(12.1, "a")) == []
    assert granted(driver.at(13, ev.Renewed(HolderId("mute"), ()))) == ["b"]


def test_queue_position_and_waiting_time_are_reported() -> None:
    driver = CoreDriver(device=80)
    driver.ask(0, "a", 80)
    driver.ask(1, "b", 80)
    assert driver.last("ticket_queued").data["position"] == 1
    driver.at(2, ev.LoadBroke(TicketId("a"), "x", False))
    driver.gone(4, "a")
    assert in_seconds(driver.last("ticket_granted").took) == 3
