"""Joining, beating, being lost; epochs (SPEC A18, A19). Times in seconds, sizes in GiB."""

from dataclasses import replace

import pytest

from arbiter import errors
from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import KillEngine, Revoke, Tier
from arbiter.core.records.ledger import audit as audit_books
from arbiter.units import HolderId, NodeId, TicketId, seconds
from tests.unit.desk import (
    CPU,
    HOST,
    NODE,
    PATIENT,
    PLAIN,
    Desk,
    granted,
    is_granted,
    reaped,
    refusal,
    revoked,
    s,
)

IMPATIENT = replace(PLAIN, timeouts=replace(PATIENT, lost=seconds(60)))  # the real time


@pytest.mark.spec("A18")
def test_nothing_is_granted_before_known_holders_are_back_or_five_seconds_passed() -> None:
    desk = Desk(known=("old",))
    assert desk.ask(1, "a", 10) == []
    assert desk.woke(4.9) == []
    assert granted(desk.woke(5)) == ["a"]


@pytest.mark.spec("A18")
def test_grants_begin_at_once_when_everybody_is_back() -> None:
    desk = Desk(known=("old", "older"))
    assert desk.ask(1, "a", 10) == []
    assert granted(desk.join(2, "old")) == []
    assert granted(desk.at(3, ev.HolderLost(HolderId("older")))) == ["a"]


@pytest.mark.spec("A18")
@pytest.mark.parametrize(
    ("phase", "state", "on_cpu", "on_host"),
    [
        (types.Phase.LOADING, "loading", 30, 0),
        (types.Phase.RESIDENT, "resident", 30, 0),
        (types.Phase.DRAINING, "draining", 30, 20),
        (types.Phase.UNLOADING, "draining", 30, 20),
        (types.Phase.ASLEEP, "asleep", 0, 20),
    ],
)
def test_a_rejoining_holder_gets_its_tickets_back_in_their_phase(
    phase: types.Phase, state: str, on_cpu: float, on_host: float
) -> None:
    desk = Desk(device=80, host=80, known=("h",), holders=())
    desk.host_sizes["a"] = 20
    desk.join(1, "h", desk.held("a", phase, size=30))
    assert desk.state_of("a") == state
    assert (desk.charged(CPU), desk.charged(HOST)) == (on_cpu, on_host)


@pytest.mark.spec("A18")
def test_rejoined_bytes_are_charged_even_where_they_do_not_fit() -> None:
    desk = Desk(device=80, known=("h", "g"), holders=())
    desk.join(1, "h", desk.held("a", types.Phase.RESIDENT, size=60, inflight=1))
    desk.join(2, "g", desk.held("b", types.Phase.RESIDENT, size=60, inflight=1))
    assert desk.free() == -40


@pytest.mark.spec("A18")
def test_a_holder_that_rejoins_before_its_node_is_charged_when_the_node_comes() -> None:
    desk = Desk(known=("h",), holders=())
    held = ev.HeldTicket(
        TicketId("z"), "a", types.Phase.RESIDENT, 0, seconds(0),
        (types.DeviceBytes("m/cpu:0", 7),), types.Need(7),
    )  # fmt: skip
    desk.at(1, ev.Joined(HolderId("h"), NodeId("m"), "text", (held,)))
    desk.see_node(2, 80, 0, node="m")
    assert desk.state.ledger.books["m/cpu:0"].charged_bytes == 7
    audit_books(desk.state.ledger)


@pytest.mark.spec("A18", "A16")
def test_an_engine_nobody_claims_is_foreign_and_ended_once_holders_had_their_time() -> None:
    desk = Desk(device=80, known=("h",), holders=(), read=False)
    desk.engines["z"] = {CPU: 30}
    assert desk.read(1) == []
    assert desk.free() == 50
    desk.join(4, "g")
    desk.at(4, ev.HolderLost(HolderId("h")))
    assert reaped(desk.read(4.9)) == []
    assert desk.read(5.1) == [KillEngine(NODE, TicketId("z"))]
    assert desk.ask(5.2, "a", 10, holder="g") == []  # it may still be growing
    assert desk.last("unclaimed_engine").data["unclaimed"] == "z"
    assert granted(desk.gone(5.3, "z")) == ["a"]
    assert desk.free() == 70


@pytest.mark.spec("A18", "A20")
def test_a_living_holder_that_is_slow_to_come_back_finds_its_engines() -> None:
    desk = Desk(device=80, known=("h",), holders=("g",), read=False, settings=IMPATIENT)
    desk.engines["a"] = {CPU: 30}
    assert reaped(desk.read(5.1)) == []  # others are granted what is free meanwhile
    assert reaped(desk.read(40)) == []
    desk.join(41, "h", desk.held("a", size=30))
    assert desk.state_of("a") == "resident"
    assert reaped(desk.read(61)) == []


@pytest.mark.spec("A18")
def test_a_holder_that_does_not_come_back_within_the_time_of_a_silent_one_loses_them() -> None:
    desk = Desk(device=80, known=("h",), holders=("g",), read=False, settings=IMPATIENT)
    desk.engines["z"] = {CPU: 30}
    assert reaped(desk.read(59.9)) == []
    assert reaped(desk.read(60)) == ["z"]
    assert reaped(desk.read(61)) == ["z"]
    assert len([t for t in desk.told if t.kind == "unclaimed_engine"]) == 1


@pytest.mark.spec("A18")
def test_beside_an_engine_that_cannot_be_ended_grants_go_on_in_what_is_left() -> None:
    desk = Desk(device=80, known=("x",), read=False)
    desk.engines["z"] = {CPU: 30}
    desk.read(6)
    assert desk.ask(7, "a", 50) == []
    assert granted(desk.woke(10.9)) == []
    assert granted(desk.woke(11)) == ["a"]


@pytest.mark.spec("A18")
def test_a_claimed_engine_is_no_longer_foreign() -> None:
    desk = Desk(device=80, known=("h",), holders=(), read=False)
    desk.engines["a"] = {CPU: 30}
    desk.read(1)
    desk.join(2, "h", desk.held("a", types.Phase.RESIDENT, size=25))
    assert desk.state.ledger.books[CPU].foreign_bytes == 0
    assert desk.charged() == 30


@pytest.mark.spec("A18")
def test_a_late_joiner_does_not_bring_a_closed_ticket_back() -> None:
    desk = Desk()
    desk.resident(0, "a", 30)
    held = desk.held("a", types.Phase.RESIDENT)
    desk.gone(1, "a")
    assert revoked(desk.join(2, "h", held)) == [("a", "lost", "gone")]
    assert desk.charged() == 0


@pytest.mark.spec("A18")
def test_lost_loaded_heals_by_heartbeat() -> None:
    desk = Desk()
    desk.ask(0, "a", 10)
    desk.at(3, ev.Renewed(HolderId("h"), (desk.held("a", types.Phase.RESIDENT, inflight=2),)))
    assert desk.state_of("a") == "resident"
    assert desk.state.ledger.find(TicketId("a")).inflight == 2


@pytest.mark.spec("A18", "A19")
def test_what_a_holder_no_longer_mentions_it_has_let_go_of() -> None:
    desk = Desk()
    desk.resident(0, "a", 10)
    assert reaped(desk.at(6, ev.Renewed(HolderId("h"), ()))) == ["a"]
    assert desk.charged() == 10  # until seen back


@pytest.mark.spec("A18")
def test_a_heartbeat_under_way_while_the_grant_was_made_does_not_deny_it() -> None:
    desk = Desk()
    desk.ask(0, "a", 10)
    assert reaped(desk.at(4.9, ev.Renewed(HolderId("h"), ()))) == []
    assert desk.state_of("a") == "loading"
    assert reaped(desk.at(5, ev.Renewed(HolderId("h"), ()))) == ["a"]


def test_a_holder_that_missed_the_news_is_told_again() -> None:
    desk = Desk()
    desk.resident(0, "a", 10)
    held = desk.held("a", types.Phase.RESIDENT)
    desk.gone(1, "a")
    [revoke] = desk.at(2, ev.Renewed(HolderId("h"), (held,)))
    assert isinstance(revoke, Revoke)
    assert (revoke.ticket, revoke.to) == ("a", Tier.GONE)


def test_a_heartbeat_cannot_touch_another_holders_ticket() -> None:
    desk = Desk(holders=("h", "g"))
    desk.resident(0, "a", 10)
    desk.at(6, ev.Renewed(HolderId("g"), (desk.held("a", types.Phase.RESIDENT, inflight=5),)))
    assert desk.state.ledger.find(TicketId("a")).inflight == 0


@pytest.mark.spec("A5")
def test_a_model_just_granted_counts_as_in_use_until_its_holder_says_otherwise() -> None:
    desk = Desk(device=80, keep_warm_s=0)
    desk.ask(0, "a", 80)
    assert desk.at(1, ev.Loaded(TicketId("a"), seconds(1))) == []
    desk.engines["a"] = {CPU: 81}  # overcommitted: it would go if it counted as idle
    assert desk.read(2) == []
    desk.engines["a"] = {CPU: 80}
    desk.read(2.5)
    assert revoked(desk.beat(3, "a")) == [("a", "idle", "gone")]


@pytest.mark.spec("A19")
def test_a_dead_holders_tickets_are_reclaiming_and_reaped_and_its_waiters_closed() -> None:
    desk = Desk(device=80, holders=("h", "g"))
    desk.resident(0, "a", 30)
    desk.ask(1, "b", 30)
    desk.ask(1, "c", 80)
    desk.ask(1, "d", 60, holder="g")
    decisions = desk.at(2, ev.HolderLost(HolderId("h")))
    assert sorted(reaped(decisions)) == ["a", "b"]
    assert [desk.state_of(t) for t in "abc"] == ["reclaiming", "reclaiming", "closed"]
    assert desk.charged() == 60
    desk.gone(3, "a")
    assert granted(desk.gone(3, "b")) == ["d"]
    assert desk.charged() == 60


@pytest.mark.spec("A19")
def test_silence_for_long_enough_counts_as_death() -> None:
    desk = Desk(settings=IMPATIENT)
    desk.resident(0, "a", 30)
    desk.beat(30, "a")
    assert desk.woke(89.9) == []
    assert reaped(desk.woke(90)) == ["a"]
    assert desk.state.holders == {}


def test_a_lost_holder_may_join_again() -> None:
    desk = Desk()
    desk.at(1, ev.HolderLost(HolderId("h")))
    assert isinstance(refusal(desk.ask(2, "a", 1)), errors.StaleEpoch)
    desk.join(3, "h")
    assert is_granted(desk.ask(4, "b", 1), "b")


@pytest.mark.spec("A18")
def test_a_holder_known_to_be_dead_is_no_longer_waited_for() -> None:
    desk = Desk(known=("old",), holders=("h",))
    assert (desk.state.awaited, desk.state.is_settled) == ({"old"}, False)
    desk.at(1, ev.HolderLost(HolderId("old")))
    assert (desk.state.awaited, desk.state.is_settled) == (set(), True)


def test_heartbeats_before_joining_count_for_nothing() -> None:
    desk = Desk(holders=())
    assert desk.at(1, ev.Renewed(HolderId("h"), (desk.held("a", size=10),))) == []
    assert desk.charged() == 0


def test_a_model_asleep_unasked_is_ended() -> None:
    desk = Desk(device=80, host=80)
    desk.resident(0, "a", 10, host=5)
    held = desk.held("a", types.Phase.ASLEEP)
    assert reaped(desk.at(4.9, ev.Renewed(HolderId("h"), (held,)))) == []  # may be an old one
    assert reaped(desk.at(5, ev.Renewed(HolderId("h"), (held,)))) == ["a"]


def test_an_old_heartbeat_does_not_finish_a_wake() -> None:
    desk = Desk(device=80, host=80)
    desk.resident(0, "a", 80, host=40)
    desk.ask(20, "b", 80)
    desk.at(21, ev.Slept(TicketId("a")))
    desk.engines["a"] = {HOST: 40}
    desk.read(22)
    desk.at(23, ev.LoadBroke(TicketId("b"), "x", False))
    desk.ask(23, "a", 80, host=40)
    assert granted(desk.gone(24, "b")) == ["a"]
    held = desk.held("a", types.Phase.RESIDENT)
    desk.at(25, ev.Renewed(HolderId("h"), (held,)))
    assert desk.state_of("a") == "loading"
    desk.at(29, ev.Renewed(HolderId("h"), (held,)))
    assert desk.state_of("a") == "resident"
    assert s(29) > s(25)
