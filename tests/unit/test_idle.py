"""Keep-warm, replica counts, shutdown (SPEC A20, C8, H0). Times in seconds, sizes in GiB."""

import pytest

from arbiter import errors
from arbiter.core import events as ev
from arbiter.core import types
from arbiter.units import HolderId, TicketId, seconds
from tests.unit.desk import Desk, capability, gib, reaped, refusal, revoked, s


@pytest.mark.spec("C8")
def test_an_idle_model_goes_after_keep_warm_since_its_last_use() -> None:
    desk = Desk(keep_warm_s=60, host=80)
    desk.resident(0, "a", 10, host=5)
    desk.beat(30, "a", inflight=1)
    desk.beat(40, "a", inflight=0)
    assert desk.woke(99.9) == []
    assert desk.wakes == [s(100)]
    assert revoked(desk.woke(100)) == [("a", "idle", "gone")]


@pytest.mark.spec("C8")
@pytest.mark.parametrize(("keep_warm_s", "pinned"), [(-1, ""), (60, "a")])
def test_for_ever_and_pinned_stay(keep_warm_s: float, pinned: str) -> None:
    desk = Desk(keep_warm_s=keep_warm_s, pinned=pinned)
    desk.resident(0, "a", 10)
    assert desk.woke(7_000) == []
    assert desk.state_of("a") == "resident"


@pytest.mark.spec("C8")
def test_keep_warm_zero_goes_at_once_when_idle() -> None:
    desk = Desk(keep_warm_s=0)
    desk.ask(0, "a", 10)
    desk.at(1, ev.Loaded(TicketId("a"), seconds(1)))
    assert desk.beat(2, "a", inflight=1) == []
    assert revoked(desk.beat(3, "a", inflight=0)) == [("a", "idle", "gone")]


@pytest.mark.spec("A6", "C8")
def test_a_model_in_use_outlives_its_keep_warm_and_one_found_busy_stays() -> None:
    desk = Desk(keep_warm_s=60)
    desk.resident(0, "a", 10)
    desk.beat(30, "a", inflight=1)
    assert desk.woke(500) == []
    desk.beat(501, "a", inflight=0)
    assert revoked(desk.woke(561)) == [("a", "idle", "gone")]
    assert desk.at(562, ev.Busy(TicketId("a"), 1)) == []
    assert desk.state_of("a") == "resident"
    assert desk.woke(700) == []


def test_the_configuration_may_change_keep_warm_while_it_is_idle() -> None:
    desk = Desk(keep_warm_s=1000)
    desk.resident(0, "a", 10)
    assert desk.woke(100) == []
    text = capability("text", "text", ("a",), keep_warm_s=50)
    assert revoked(desk.at(101, ev.CapabilitiesSet((text,)))) == [("a", "idle", "gone")]


@pytest.mark.spec("H0")
def test_a_replica_is_wanted_while_a_ticket_is_open_and_for_a_while_after() -> None:
    desk = Desk(holders=())
    assert desk.arbiter.replica_targets(s(0)) == {"text": 0, "embedding": 0}
    desk.join(0, "h")
    desk.ask(10, "a", 10)
    assert desk.arbiter.replica_targets(s(9_000)) == {"text": 1, "embedding": 0}
    desk.at(20, ev.Released(TicketId("a"), "idle"))
    desk.gone(33, "a")
    assert desk.arbiter.replica_targets(s(332))["text"] == 1
    assert desk.arbiter.replica_targets(s(333))["text"] == 0
    desk.sleep_until(333)
    assert desk.wakes == [s(333)]


@pytest.mark.spec("H0")
def test_the_shell_is_woken_when_a_replica_is_no_longer_wanted() -> None:
    desk = Desk(holders=())
    desk.join(0, "h")
    rung = [t for t in range(1, 400) if desk.woke(t) == [] and s(300) in desk.wakes]
    assert max(rung) >= 290


@pytest.mark.spec("C8")
def test_a_pinned_model_wants_a_replica_from_the_start() -> None:
    assert Desk(pinned="vad", holders=()).arbiter.replica_targets(s(0))["text"] == 1


@pytest.mark.spec("A20")
def test_shutdown_refuses_the_line_unloads_the_idle_and_the_rest_as_it_falls_idle() -> None:
    desk = Desk(device=80, pinned="a")
    for name in "abc":
        desk.resident(0, name, 20)
    desk.beat(1, "b", inflight=1)
    desk.ask(1, "d", 60, deadline_s=1000)
    decisions = desk.at(2, ev.ClosingDown())
    assert refusal(decisions) == errors.ArbiterClosing()
    assert ("a", "shutdown", "gone") in revoked(decisions)
    assert desk.state_of("b") in ("resident", "draining")
    assert refusal(desk.ask(3, "e", 1)) == errors.ArbiterClosing()
    assert set(desk.arbiter.replica_targets(s(3)).values()) == {0}


@pytest.mark.spec("A20")
def test_a_model_in_use_at_shutdown_leaves_when_idle_and_at_the_latest_at_the_bound() -> None:
    desk = Desk(device=80)
    desk.resident(0, "a", 20)
    desk.resident(0, "b", 20)
    desk.beat(1, "a", "b", inflight=1)
    assert desk.at(2, ev.ClosingDown()) == []
    held = [desk.held(n, inflight=i) for n, i in (("a", 0), ("b", 1))]
    decisions = desk.at(3, ev.Renewed(HolderId("h"), tuple(held)))
    assert revoked(decisions) == [("a", "shutdown", "gone")]
    assert desk.woke(31.9) == []
    assert set(reaped(desk.woke(32))) == {"a", "b"}
    desk.gone(33, "a")
    desk.gone(33, "b")
    assert desk.arbiter.snapshot(s(33)).tickets == ()
    assert desk.charged() == 0
    assert gib(80) == desk.state.ledger.books["n/cpu:0"].free_bytes


def test_a_sleeper_is_ended_at_shutdown() -> None:
    desk = Desk(device=80, host=80, known=("h",), holders=())
    desk.host_sizes["a"] = 20
    desk.join(0, "h", desk.held("a", types.Phase.ASLEEP, size=30))
    assert reaped(desk.at(1, ev.ClosingDown())) == ["a"]


@pytest.mark.spec("C8")
def test_an_alarm_that_was_missed_is_set_again_by_the_audit() -> None:
    desk = Desk(keep_warm_s=60, host=80)
    desk.resident(0, "a", 10, host=5)
    desk.state.timers.due(s(1000))  # all of them, lost
    desk.state.timers.set(("audit", ""), s(60))
    desk.woke(60)
    assert revoked(desk.woke(61)) == [("a", "idle", "gone")]
