"""Joining, beating, being lost; epochs (A18, A19). Times in seconds, sizes in GiB."""

from dataclasses import replace

import pytest

from arbiter import errors
from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import KillEngine, Revoke, Tier
from arbiter.core.records.estimates import ModelKey
from arbiter.units import HolderId, NodeId, Span, TicketId, seconds
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
    refusal,
    revoked,
    s,
)

IMPATIENT = replace(PLAIN, timeouts=replace(PATIENT, lost=seconds(60)))  # the real time


@pytest.mark.spec("A18")
def test_grants_wait_for_known_holders_or_five_seconds() -> None:
    driver = CoreDriver(known=("old",))
    assert driver.ask(1, "a", 10) == []
    assert driver.fire_timer(4.9) == []
    assert granted(driver.fire_timer(5)) == ["a"]


@pytest.mark.spec("A18")
def test_grants_begin_at_once_when_all_known_holders_are_back() -> None:
    driver = CoreDriver(known=("old", "older"))
    assert driver.ask(1, "a", 10) == []
    assert granted(driver.join(2, "old")) == []
    assert granted(driver.at(3, ev.HolderLost(HolderId("older")))) == ["a"]


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
    driver = CoreDriver(device=80, host=80, known=("h",), holders=())
    driver.host_sizes["a"] = 20
    driver.join(1, "h", driver.held("a", phase, size=30))
    assert driver.state_of("a") == state
    assert (driver.charged(CPU), driver.charged(HOST)) == (on_cpu, on_host)


@pytest.mark.spec("A18")
def test_rejoined_bytes_are_charged_even_where_they_do_not_fit() -> None:
    driver = CoreDriver(device=80, known=("h", "g"), holders=())
    driver.join(1, "h", driver.held("a", types.Phase.RESIDENT, size=60, inflight=1))
    driver.join(2, "g", driver.held("b", types.Phase.RESIDENT, size=60, inflight=1))
    assert driver.free() == -40


@pytest.mark.spec("A18")
def test_a_holder_that_rejoins_before_its_node_is_charged_when_the_node_comes() -> None:
    driver = CoreDriver(known=("h",), holders=())
    held = ev.HeldTicket(
        TicketId("z"), "a", types.Phase.RESIDENT, 0, seconds(0),
        (types.DeviceBytes("m/cpu:0", 7),), types.Need(7),
    )  # fmt: skip
    driver.at(1, ev.Joined(HolderId("h"), NodeId("m"), "text", (held,)))
    driver.see_node(2, 80, 0, node="m")
    assert driver.account("m/cpu:0").charged_bytes == 7
    driver.audit()


@pytest.mark.spec("A18", "A16")
def test_unclaimed_engine_is_foreign_and_is_killed_after_the_rejoin_time() -> None:
    driver = CoreDriver(device=80, known=("h",), holders=(), read=False)
    driver.engines["z"] = {CPU: 30}
    assert driver.read(0) == []
    assert driver.free() == 50
    driver.join(4, "g")
    driver.at(4, ev.HolderLost(HolderId("h")))
    assert killed(driver.read(4.9)) == []
    assert driver.read(5.1) == [KillEngine(NODE, TicketId("z"))]
    assert driver.ask(5.2, "a", 10, holder="g") == []  # it may still be growing
    assert driver.last("unclaimed_engine").data["unclaimed"] == "z"
    assert granted(driver.gone(5.3, "z")) == ["a"]
    assert driver.free() == 70


@pytest.mark.spec("A18", "A20")
def test_a_living_holder_that_is_slow_to_come_back_finds_its_engines() -> None:
    driver = CoreDriver(device=80, known=("h",), holders=("g",), read=False, settings=IMPATIENT)
    driver.engines["a"] = {CPU: 30}
    assert killed(driver.read(5.1)) == []  # others are granted what is free meanwhile
    assert killed(driver.read(40)) == []
    driver.join(41, "h", driver.held("a", size=30))
    assert driver.state_of("a") == "resident"
    assert killed(driver.read(61)) == []


@pytest.mark.spec("A18")
def test_holder_that_does_not_rejoin_within_the_lost_time_loses_its_engines() -> None:
    driver = CoreDriver(device=80, known=("h",), holders=("g",), read=False, settings=IMPATIENT)
    driver.engines["z"] = {CPU: 30}
    driver.read(1)
    assert killed(driver.read(59.9)) == []
    assert killed(driver.read(60)) == ["z"]
    assert killed(driver.read(61)) == ["z"]
    assert len([t for t in driver.logged if t.kind == "unclaimed_engine"]) == 1


@pytest.mark.spec("A18")
def test_living_engine_is_claimed_after_a_restart_whose_state_file_names_no_holder() -> None:
    driver = CoreDriver(device=80, holders=(), read=False)
    driver.engines |= {"a": {CPU: 30}, "z": {CPU: 10}}
    assert killed(driver.read(0.05)) == []
    driver.join(1, "h", driver.held("a", size=30))
    assert driver.state_of("a") == "resident"
    assert killed(driver.read(5)) == []
    assert killed(driver.read(5.05)) == ["z"], "no holder has come for it"


@pytest.mark.spec("A18")
def test_grants_go_on_beside_an_engine_that_cannot_be_killed() -> None:
    driver = CoreDriver(device=80, known=("x",), read=False)
    driver.engines["z"] = {CPU: 30}
    driver.read(6)
    assert driver.ask(7, "a", 50) == []
    assert granted(driver.fire_timer(10.9)) == []
    assert granted(driver.fire_timer(11)) == ["a"]


@pytest.mark.spec("A18")
def test_a_claimed_engine_is_no_longer_foreign() -> None:
    driver = CoreDriver(device=80, known=("h",), holders=(), read=False)
    driver.engines["a"] = {CPU: 30}
    driver.read(1)
    driver.join(2, "h", driver.held("a", types.Phase.RESIDENT, size=25))
    assert driver.account().foreign_bytes == 0
    assert driver.charged() == 30


@pytest.mark.spec("A18")
def test_load_that_had_not_begun_ends_where_its_bytes_are_lent_when_its_holder_rejoins() -> None:
    driver = CoreDriver(device=80, known=("late",))
    driver.ask(1, "b", 60)
    assert granted(driver.fire_timer(5)) == ["b"]
    decisions = driver.join(6, "late", driver.held("a", types.Phase.LOADING, size=30))
    assert (killed(decisions), revoked(decisions)) == (["a"], [("a", "lost", "gone")])
    assert (driver.state_of("b"), driver.free()) == ("loading", 20)
    assert driver.arbiter.check_grant(TicketId("a"), NODE) is types.GrantCheck.ENDED
    driver.gone(7, "a")
    assert driver.arbiter.check_grant(TicketId("a"), NODE) is types.GrantCheck.ENDED


@pytest.mark.spec("A18")
def test_load_that_had_not_begun_goes_on_where_its_bytes_are_free() -> None:
    driver = CoreDriver(device=80, known=("late",))
    driver.ask(1, "b", 60)
    assert granted(driver.fire_timer(5)) == ["b"]
    assert killed(driver.join(6, "late", driver.held("a", types.Phase.LOADING, size=20))) == []
    assert driver.state_of("a") == "loading"
    assert driver.arbiter.check_grant(TicketId("a"), NODE) is types.GrantCheck.GRANTED


@pytest.mark.spec("A18")
def test_load_whose_engine_was_seen_goes_on_whatever_was_lent_beside_it() -> None:
    driver = CoreDriver(device=80, known=("late",), settings=IMPATIENT)
    driver.engines["a"] = {CPU: 10}
    driver.read(1)
    driver.ask(2, "b", 60)
    assert granted(driver.fire_timer(11)) == ["b"]
    assert killed(driver.join(12, "late", driver.held("a", types.Phase.LOADING, size=30))) == []
    assert driver.state_of("a") == "loading"


@pytest.mark.spec("A17", "A18")
@pytest.mark.parametrize("is_explicit", [False, True])
def test_nothing_is_learned_again_of_a_load_that_an_earlier_epoch_saw(is_explicit: bool) -> None:
    driver = CoreDriver(device=80, known=("h",), holders=())
    held = replace(driver.held("a", size=20), need_is_explicit=is_explicit)
    driver.join(1, "h", held)
    driver.engines["a"] = {CPU: 12}
    for t in range(2, 6):
        driver.read(t)
    of_b = ModelKey("text", "b", "")
    assert driver.estimates.size(of_b, types.Need(gib(15), gib(15)), False).device_bytes == gib(30)
    assert "estimate_error" not in driver.kinds()


@pytest.mark.spec("A17", "A18")
@pytest.mark.parametrize(("is_explicit", "of_b"), [(False, 22), (True, 30)])
def test_load_that_ends_in_a_new_epoch_teaches_what_its_capability_needs_unless_explicit(
    is_explicit: bool, of_b: float
) -> None:
    driver = CoreDriver(device=80, known=("h",), holders=())
    held = replace(
        driver.held("a", types.Phase.LOADING, size=20, inflight=1), need_is_explicit=is_explicit
    )
    driver.join(1, "h", held)
    driver.at(2, ev.Loaded(TicketId("a"), seconds(1)))
    driver.engines["a"] = {CPU: 12}
    driver.read(3), driver.read(4)
    estimate = driver.estimates.size(ModelKey("text", "b", ""), types.Need(gib(15), gib(15)), False)
    assert estimate.device_bytes == gib(of_b)
    assert "estimate_error" in driver.kinds()


@pytest.mark.spec("A17", "A18", "D1")
@pytest.mark.parametrize("phase", [types.Phase.LOADING, types.Phase.ASLEEP])
def test_wake_in_a_new_epoch_does_not_count_as_a_load(phase: types.Phase) -> None:
    driver = CoreDriver(device=80, host=80, known=("h",), holders=())
    driver.host_sizes["a"] = 20
    held = replace(driver.held("a", phase, size=30), has_slept=True)
    driver.join(1, "h", held)
    driver.read(2)
    if phase is types.Phase.ASLEEP:
        assert is_granted(driver.ask(3, "a", 30, host=20), "a")
    driver.at(5, ev.Loaded(TicketId("a"), seconds(2)))
    key = ModelKey("text", "a", "")
    assert driver.last("model_wake").took == driver.estimates.wake_time(key) == seconds(2)
    assert driver.estimates.load_time(key) == 0


@pytest.mark.spec("A18")
def test_a_late_joiner_does_not_bring_a_closed_ticket_back() -> None:
    driver = CoreDriver()
    driver.resident(0, "a", 30)
    held = driver.held("a", types.Phase.RESIDENT)
    driver.gone(1, "a")
    assert revoked(driver.join(2, "h", held)) == [("a", "lost", "gone")]
    assert driver.charged() == 0


@pytest.mark.spec("A18")
def test_lost_loaded_heals_by_heartbeat() -> None:
    driver = CoreDriver()
    driver.ask(0, "a", 10)
    driver.at(3, ev.Renewed(HolderId("h"), (driver.held("a", types.Phase.RESIDENT, inflight=2),)))
    assert driver.state_of("a") == "resident"
    assert driver.ticket("a").inflight == 2


@pytest.mark.spec("A18", "A19")
def test_ticket_missing_from_heartbeats_is_reclaimed() -> None:
    driver = CoreDriver()
    driver.resident(0, "a", 10)
    assert killed(driver.at(6, ev.Renewed(HolderId("h"), ()))) == ["a"]
    assert driver.charged() == 10  # until seen back


@pytest.mark.spec("A18")
def test_a_heartbeat_under_way_while_the_grant_was_made_does_not_deny_it() -> None:
    driver = CoreDriver()
    driver.ask(0, "a", 10)
    assert killed(driver.at(4.9, ev.Renewed(HolderId("h"), ()))) == []
    assert driver.state_of("a") == "loading"
    assert killed(driver.at(5, ev.Renewed(HolderId("h"), ()))) == ["a"]


def test_holder_that_reports_a_closed_ticket_is_revoked_again() -> None:
    driver = CoreDriver()
    driver.resident(0, "a", 10)
    held = driver.held("a", types.Phase.RESIDENT)
    driver.gone(1, "a")
    [revoke] = driver.at(2, ev.Renewed(HolderId("h"), (held,)))
    assert isinstance(revoke, Revoke)
    assert (revoke.ticket, revoke.to) == ("a", Tier.GONE)


def test_a_heartbeat_cannot_touch_another_holders_ticket() -> None:
    driver = CoreDriver(holders=("h", "g"))
    driver.resident(0, "a", 10)
    driver.at(6, ev.Renewed(HolderId("g"), (driver.held("a", types.Phase.RESIDENT, inflight=5),)))
    assert driver.ticket("a").inflight == 0


@pytest.mark.spec("A5")
def test_a_model_just_granted_counts_as_in_use_until_its_holder_says_otherwise() -> None:
    driver = CoreDriver(device=80, keep_warm_s=0)
    driver.ask(0, "a", 80)
    assert driver.at(1, ev.Loaded(TicketId("a"), seconds(1))) == []
    driver.engines["a"] = {CPU: 81}  # overcommitted: it would go if it counted as idle
    assert driver.read(2) == []
    driver.engines["a"] = {CPU: 80}
    driver.read(2.5)
    assert revoked(driver.beat(3, "a")) == [("a", "idle", "gone")]


@pytest.mark.spec("J1", "J2")
def test_time_that_a_client_keeps_a_model_warm_is_in_the_state_and_outlives_a_restart() -> None:
    driver = CoreDriver(holders=("h",), known=("old",))
    driver.resident(6, "a", 10)
    kept = replace(driver.held("a", idle_s=0), uses_count=2, stay_warm=seconds(30))
    driver.at(10, ev.Renewed(HolderId("h"), (kept,)))
    driver.join(12, "old", replace(driver.held("b", size=10), stay_warm=seconds(60)))

    def shown(t: float) -> dict[str, float]:
        return {row.ticket: row.stay_warm / 10**9 for row in driver.arbiter.snapshot(s(t)).tickets}

    assert shown(20) == {"a": 20, "b": 52}
    assert shown(100) == {"a": 0, "b": 0}
    driver.at(101, ev.Renewed(HolderId("h"), (replace(kept, uses_count=3, stay_warm=Span(0)),)))
    assert shown(101)["a"] == 0


@pytest.mark.spec("A19")
def test_tickets_of_a_dead_holder_are_killed_and_its_queued_ones_closed() -> None:
    driver = CoreDriver(device=80, holders=("h", "g"))
    driver.resident(0, "a", 30)
    driver.ask(1, "b", 30)
    driver.ask(1, "c", 80)
    driver.ask(1, "d", 60, holder="g")
    decisions = driver.at(2, ev.HolderLost(HolderId("h")))
    assert sorted(killed(decisions)) == ["a", "b"]
    assert [driver.state_of(t) for t in "abc"] == ["reclaiming", "reclaiming", "closed"]
    assert driver.charged() == 60
    driver.gone(3, "a")
    assert granted(driver.gone(3, "b")) == ["d"]
    assert driver.charged() == 60


@pytest.mark.spec("A19")
def test_holder_silent_beyond_the_lost_time_counts_as_dead() -> None:
    driver = CoreDriver(settings=IMPATIENT)
    driver.resident(0, "a", 30)
    driver.beat(30, "a")
    assert driver.fire_timer(89.9) == []
    assert killed(driver.fire_timer(90)) == ["a"]
    assert driver.holders() == set()


def test_a_lost_holder_may_join_again() -> None:
    driver = CoreDriver()
    driver.at(1, ev.HolderLost(HolderId("h")))
    assert isinstance(refusal(driver.ask(2, "a", 1)), errors.StaleEpoch)
    driver.join(3, "h")
    assert is_granted(driver.ask(4, "b", 1), "b")


@pytest.mark.spec("A18")
def test_holder_known_to_be_dead_is_no_longer_awaited() -> None:
    driver = CoreDriver(known=("old",), holders=("h",))
    assert (driver.awaited(), driver.is_settled()) == ({"old"}, False)
    driver.at(1, ev.HolderLost(HolderId("old")))
    assert (driver.awaited(), driver.is_settled()) == (set(), True)


def test_heartbeats_before_joining_count_for_nothing() -> None:
    driver = CoreDriver(holders=())
    assert driver.at(1, ev.Renewed(HolderId("h"), (driver.held("a", size=10),))) == []
    assert driver.charged() == 0


def test_model_asleep_without_a_revoke_is_killed() -> None:
    driver = CoreDriver(device=80, host=80)
    driver.resident(0, "a", 10, host=5)
    held = driver.held("a", types.Phase.ASLEEP)
    assert killed(driver.at(4.9, ev.Renewed(HolderId("h"), (held,)))) == []  # may be an old one
    assert killed(driver.at(5, ev.Renewed(HolderId("h"), (held,)))) == ["a"]


def test_an_old_heartbeat_does_not_finish_a_wake() -> None:
    driver = CoreDriver(device=80, host=80)
    driver.resident(0, "a", 80, host=40)
    driver.ask(20, "b", 80)
    driver.at(21, ev.Slept(TicketId("a")))
    driver.engines["a"] = {HOST: 40}
    driver.read(22)
    driver.at(23, ev.LoadBroke(TicketId("b"), "x", False))
    driver.ask(23, "a", 80, host=40)
    assert granted(driver.gone(24, "b")) == ["a"]
    held = driver.held("a", types.Phase.RESIDENT)
    driver.at(25, ev.Renewed(HolderId("h"), (held,)))
    assert driver.state_of("a") == "loading"
    driver.at(29, ev.Renewed(HolderId("h"), (held,)))
    assert driver.state_of("a") == "resident"
