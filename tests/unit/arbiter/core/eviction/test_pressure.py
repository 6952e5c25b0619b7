"""Pressure: what is physically free decides, text is spared, and what is in use stays."""

from dataclasses import replace

import pytest

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Decision, DropDrafter, Grant, PurgeCaches
from arbiter.errors import UnderPressure
from arbiter.units import GIB, Bytes, DeviceId, HolderId, NodeId, TicketId, in_seconds, seconds
from tests.support.core_driver import (
    CPU,
    HOST,
    NODE,
    PLAIN,
    CoreDriver,
    capability,
    gib,
    granted,
    is_granted,
    refusal,
    revoked,
)

pytestmark = pytest.mark.spec("C5")


def driver(device: float = 80, host: float = 0) -> CoreDriver:
    """With three embedding models and a text model resident, from the lowest up."""
    made = CoreDriver(device, host)
    names = ("e1", "e2", "e3")
    made.at(0, ev.CapabilitiesSet((made.table[0], capability("embedding", "embedding", names))))
    for t, name in enumerate(names):
        made.ask(t, f"{name}x", 10, capability="embedding", model=name)
        made.at(t, ev.Loaded(TicketId(f"{name}x"), seconds(0)))
        made.beat(t)
    made.resident(3, "a", 10)
    for name in (*(f"{n}x" for n in names), "a"):
        made.beat(3, name)
    return made


def short(
    made: CoreDriver, t: float, free: float, device: DeviceId = CPU
) -> list[tuple[str, str, str]]:
    made.physical[device] = free
    return revoked(made.read(t))


def push(
    made: CoreDriver, t: float, how: types.Level, where: str = CPU, term_s: float = 60
) -> list[tuple[str, str, str]]:
    return revoked(made.at(t, ev.PressurePushed(where, how, Bytes(GIB), seconds(term_s))))


def test_low_pressure_evicts_one_idle_model_with_each_tick_lowest_first() -> None:
    d = driver()
    assert short(d, 10, free=10) == [("e1x", "pressure", "gone")]
    assert revoked(d.read(12)) == []
    assert revoked(d.fire_timer(15)) == [("e2x", "pressure", "gone")]
    assert short(d, 16, free=70) == [] and revoked(d.fire_timer(30)) == []
    told = [(t.data["level"], t.data["source"]) for t in d.logged if t.kind == "memory_pressure"]
    assert told == [("low", "measured"), ("nominal", "measured")]


def drafter_bytes(d: CoreDriver) -> int:
    [ticket] = [e for e in d.tickets_of("h") if e.id == "d"]
    return ticket.drafter_bytes


@pytest.mark.spec("F9")
def test_drafter_goes_before_any_model_its_text_goes_on_and_it_is_asked_again_in_time() -> None:
    d = driver()
    need = types.Need(weights_bytes=gib(5), drafter_bytes=gib(5))
    d.sizes["d"], d.host_sizes["d"] = 10, 0
    d.at(4, ev.Requested(TicketId("d"), HolderId("h"), "text", "b", need, "", True))
    d.at(4, ev.Loaded(TicketId("d"), seconds(0)))
    d.beat(4, "d", inflight=1)  # in use, and text: no victim of pressure
    d.physical[CPU] = 10
    dropped = DropDrafter(HolderId("h"), "b")
    decisions = d.read(10)
    assert [x for x in decisions if isinstance(x, DropDrafter)] == [dropped]
    assert revoked(decisions) == []
    assert drafter_bytes(d) == gib(5)
    decisions = d.fire_timer(15)
    assert dropped not in decisions and revoked(decisions) == [("e1x", "pressure", "gone")]
    d.at(16, ev.GaveBack(TicketId("d"), (types.DeviceBytes(CPU, gib(5)),)))
    assert drafter_bytes(d) == 0
    later = 16 + in_seconds(PLAIN.timeouts.load)
    d.physical[CPU] = 10
    assert dropped not in d.read(later)


def test_critical_pressure_evicts_all_idle_models_but_text_and_refuses_loads() -> None:
    d = driver()
    d.beat(4, "e2x", inflight=1)
    assert sorted(short(d, 10, free=2)) == [
        ("e1x", "pressure", "gone"),
        ("e3x", "pressure", "gone"),
    ]
    error = refusal(d.ask(11, "e1y", 1, capability="embedding", model="e1"))
    assert isinstance(error, UnderPressure) and error.retry_after_s
    assert is_granted(d.ask(12, "b", 1), "b")
    d.beat(13, "e2x")
    assert revoked(d.fire_timer(15)) == [("e2x", "pressure", "gone")]
    assert d.state_of("a") == "resident"


@pytest.mark.spec("H8")
def test_critical_pressure_empties_the_caches_of_what_stays_with_each_tick() -> None:
    d = driver()
    d.beat(4, "e2x", inflight=1)
    assert purged(d.at(5, pushed(types.Level.LOW))) == []
    assert purged(d.at(10, pushed(types.Level.CRITICAL))) == [("a", "h"), ("e2x", "h")]
    assert purged(d.fire_timer(15)) == [("a", "h"), ("e2x", "h")]
    assert purged(d.at(16, pushed(types.Level.NOMINAL))) == purged(d.fire_timer(30)) == []


def pushed(level: types.Level) -> ev.PressurePushed:
    return ev.PressurePushed(CPU, level, Bytes(GIB), seconds(60))


def purged(decisions: list[Decision]) -> list[tuple[str, str]]:
    return [(d.ticket, d.holder) for d in decisions if isinstance(d, PurgeCaches)]


def test_queued_ticket_waits_until_pressure_clears() -> None:
    d = CoreDriver()
    d.ask(0, "a", 80)
    d.ask(1, "e1", 10, capability="embedding", model="e1")
    push(d, 2, types.Level.CRITICAL)
    d.at(3, ev.Released(TicketId("a"), "x"))
    assert granted(d.gone(4, "a")) == []
    assert granted(d.fire_timer(62)) == ["e1"]


def test_busy_victim_of_pressure_is_skipped_for_the_next() -> None:
    d = driver()
    assert short(d, 10, free=10) == [("e1x", "pressure", "gone")]
    assert revoked(d.at(10.5, ev.Busy(TicketId("e1x"), 1))) == [("e2x", "pressure", "gone")]
    assert d.state_of("e1x") == "resident"


def test_busy_victim_at_a_critical_level_has_no_caches_emptied_again() -> None:
    d = driver()
    decided = d.at(10, pushed(types.Level.CRITICAL))
    names = [name for name, *_ in revoked(decided)]
    assert len(names) > 1
    for name in names:
        assert purged(d.at(10.5, ev.Busy(TicketId(name), 1))) == []
    assert {ticket for ticket, _ in purged(d.fire_timer(15))} >= set(names), "at its tick"


def test_pressure_without_victims_left_is_reported_once() -> None:
    d = CoreDriver()
    d.resident(0, "a", 10)
    short(d, 10, free=2)
    d.fire_timer(15)
    d.fire_timer(20)
    assert d.kinds().count("pressure_nothing_left") == 1 and d.state_of("a") == "resident"


def test_pushed_levels_last_for_their_term_and_hold_where_they_were_pushed() -> None:
    d = driver()
    d.see_node(4, 80, 0, node="m")
    assert push(d, 10, types.Level.LOW, where="m/cpu:0") == []
    assert push(d, 11, types.Level.LOW, where=NODE, term_s=8) == [("e1x", "pressure", "gone")]
    assert revoked(d.fire_timer(16)) == [("e2x", "pressure", "gone")]
    assert revoked(d.fire_timer(19)) == [] and revoked(d.fire_timer(21)) == []
    assert d.last("memory_pressure").data["level"] == "nominal"
    stale = d.arbiter.stale_count
    push(d, 22, types.Level.LOW, where="nowhere")
    assert d.arbiter.stale_count == stale + 1


def test_pressure_follows_free_memory_and_not_the_books() -> None:
    d = CoreDriver(settings=replace(PLAIN, arena_fraction=0.5))
    assert is_granted(
        d.ask(0, "e1", 40, capability="embedding", model="e1"), "e1"
    )  # all that can be lent
    assert short(d, 1, free=40) == [] and "memory_pressure" not in d.kinds()


def test_two_budgets_of_one_ram_lose_one_model_a_tick() -> None:
    d = driver(host=80)
    d.physical = {CPU: 10, HOST: 10}
    assert revoked(d.read(10)) == [("e1x", "pressure", "gone")]
    assert len(revoked(d.fire_timer(15))) == 1


@pytest.mark.spec("A15")
def test_a_preemptible_lease_goes_before_any_model() -> None:
    d = driver()
    d.lease(4, "job", 10, preemptible=True)
    assert short(d, 10, free=10) == [("job", "pressure", "gone")]


def test_snapshot_shows_the_pressure_level() -> None:
    d = driver()
    short(d, 10, free=10)
    [cpu, host] = d.arbiter.snapshot(seconds(10)).devices  # type: ignore[arg-type]
    assert (cpu.pressure, host.pressure) == ("low", "nominal")
    assert cpu.physical_free_bytes == gib(10)


def test_pressure_that_falls_to_low_evicts_nothing_at_once() -> None:
    d = driver()
    d.beat(4, "e1x", "e2x", "e3x", inflight=1)
    assert short(d, 10, free=2) == []
    d.beat(11, "e1x", "e2x", "e3x")
    assert short(d, 12, free=10) == []  # from critical to low
    assert revoked(d.fire_timer(15)) == [("e1x", "pressure", "gone")]


def gpus(stalls: float, *free: float) -> CoreDriver:
    """A node of GPUs of 80 with so much free, for an embedding replica `k`."""
    d = CoreDriver(
        settings=replace(PLAIN, arena_fraction=0.9)
    )  # what is left is not ours to plan with
    names = [DeviceId(f"g/gpu:{number}") for number in range(len(free))]
    specs = tuple(types.DeviceSpec(name, types.DeviceKind.GPU, gib(80)) for name in names)
    d.at(0, ev.NodeSeen(NodeId("g"), specs))
    d.at(0, ev.Joined(HolderId("k"), NodeId("g"), "embedding", ()))
    readings = tuple(
        ev.DeviceReading(name, gib(left), gib(0)) for name, left in zip(names, free, strict=True)
    )
    d.at(1, ev.Measured(NodeId("g"), readings, (), stalls))
    return d


def embed(d: CoreDriver, t: float) -> list[Decision]:
    return d.ask(t, "e1", 5, capability="embedding", model="e1", holder="k")


def test_one_critical_device_leaves_its_neighbour_open() -> None:
    d = gpus(0, 0, 80)
    [grant] = embed(d, 2)
    assert isinstance(grant, Grant) and grant.devices[0].device == "g/gpu:1"
    assert isinstance(refusal(embed(gpus(0, 0, 0), 2)), UnderPressure)


def test_stalls_for_want_of_ram_shut_no_gpu() -> None:
    assert is_granted(embed(gpus(0.9, 80), 2), "e1")
