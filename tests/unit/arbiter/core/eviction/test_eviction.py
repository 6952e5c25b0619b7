"""Victims, barriers, overcommit (A6, A9, C1, C4, B1). Times in seconds, sizes in GiB."""

from dataclasses import replace

import pytest

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Reason, Revoke, Tier
from arbiter.core.records.estimates import ModelKey
from arbiter.core.view import NamedRole, Role
from arbiter.errors import NeverFits
from arbiter.units import HolderId, NodeId, TicketId, seconds
from tests.support.core_driver import (
    CPU,
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


@pytest.mark.spec("A9", "C3")
def test_eviction_takes_the_least_recently_used_and_only_as_many_as_needed() -> None:
    driver = CoreDriver(device=80)
    for t, name in enumerate(["a", "b", "c"]):
        driver.resident(t, name, 25)
    assert driver.ask(20, "d", 30) == [
        Revoke(TicketId("a"), HolderId("h"), Reason.SWAP, Tier.GONE, s(30))
    ]


WIKI = Role(1, "pages of the wiki are missing", keep_warm_s=300, evict_cost_s=0)


@pytest.mark.spec("C1")
def test_a_role_of_the_configuration_ranks_and_its_act_is_told() -> None:
    named = NamedRole("embedding", replace(WIKI, rank=200))
    driver = CoreDriver(device=80, settings=replace(PLAIN, roles=(named,)))
    driver.resident(0, "e1", 40, capability="embedding", model="e1")
    driver.resident(10, "a", 40)
    assert revoked(driver.ask(20, "b", 30)) == [("a", "swap", "gone")]
    driver.beat(21, "a", inflight=0)
    assert revoked(driver.at(22, ev.UnloadAsked(TicketId("e1")))) == [("e1", "manual", "gone")]
    assert driver.last("eviction").data["act"] == "pages of the wiki are missing"


@pytest.mark.spec("C1", "C3")
@pytest.mark.parametrize("evict", ["cost_aware", "time_of_day", "learned"])
@pytest.mark.parametrize(("cost_s", "victims"), [(0, {"e1", "e2"}), (1_000, {"a"})])
def test_what_evicting_a_role_costs_counts_in_the_choice_of_victims(
    cost_s: float, victims: set[str], evict: str
) -> None:
    """Two small models of `embedding` or a large one of `text`, both of one rank."""
    roles = (
        NamedRole("embedding", replace(WIKI, evict_cost_s=cost_s)),
        NamedRole("text", replace(WIKI, evict_cost_s=900)),
    )
    driver = CoreDriver(device=80, settings=replace(PLAIN, roles=roles, evict=evict))
    driver.resident(0, "e1", 20, capability="embedding", model="e1")
    driver.resident(0, "e2", 20, capability="embedding", model="e2")
    driver.resident(0, "a", 40)
    assert {gone for gone, _, _ in revoked(driver.ask(20, "b", 40))} == victims


@pytest.mark.spec("C1")
def test_the_role_worth_least_goes_first_however_lately_used() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 40)
    driver.resident(10, "e1", 40, capability="embedding", model="e1")
    assert revoked(driver.ask(20, "b", 30)) == [("e1", "swap", "gone")]


@pytest.mark.spec("C3")
def test_a_victim_that_turns_out_not_to_be_needed_is_spared() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 10)
    driver.resident(1, "b", 70)
    assert revoked(driver.ask(20, "c", 60)) == [("b", "swap", "gone")]


def test_bytes_already_coming_back_are_not_evicted_twice() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 40)
    driver.resident(1, "b", 40)
    assert revoked(driver.ask(20, "c", 30)) == [("a", "swap", "gone")]
    assert driver.beat(21, "b") == []  # still waiting: `b` is left alone
    assert killed(driver.at(22, ev.Released(TicketId("a"), "swap"))) == ["a"]
    assert driver.beat(22.1, "b") == []
    assert granted(driver.gone(23, "a")) == ["c"]


@pytest.mark.spec("C3")
def test_request_that_would_still_not_fit_evicts_nothing() -> None:
    driver = CoreDriver(device=80)
    driver.ask(0, "vad", 30)  # loading, so not to be had
    driver.resident(0, "a", 30)
    assert driver.ask(15, "b", 60) == []


@pytest.mark.spec("A6")
def test_pinned_ticket_is_never_a_victim() -> None:
    driver = CoreDriver(device=80, pinned="vad")
    driver.resident(0, "vad", 40)
    driver.resident(1, "a", 40)
    assert revoked(driver.ask(100, "b", 40)) == [("a", "swap", "gone")]


@pytest.mark.spec("B2", "B6")
def test_request_that_pinned_models_leave_no_room_for_is_refused_with_the_numbers() -> None:
    driver = CoreDriver(device=80, pinned="vad")
    driver.resident(0, "vad", 40)
    assert refusal(driver.ask(1, "b", 41)) == NeverFits(TicketId("b"), gib(41), gib(40))
    assert is_granted(driver.ask(1, "c", 40), "c")


@pytest.mark.spec("A6")
def test_loading_ticket_is_never_a_candidate() -> None:
    driver = CoreDriver(device=80)
    driver.ask(0, "a", 80)
    assert driver.ask(100, "b", 60) == []


@pytest.mark.spec("A9")
def test_swap_evicts_idle_tickets_first_and_busy_ones_only_behind_a_barrier() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 40)
    driver.resident(1, "b", 40)
    driver.beat(2, "a", inflight=1)
    assert revoked(driver.ask(20, "c", 30)) == [("b", "swap", "gone")]
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 80)
    driver.beat(2, "a", inflight=1)
    [revoke] = driver.ask(20, "c", 30)
    assert isinstance(revoke, Revoke)
    assert revoke.barrier_until == s(30)
    assert driver.charged() == 80


@pytest.mark.spec("A9")
@pytest.mark.parametrize("answer", [ev.BarrierDropped, ev.Busy])
def test_refusing_victim_stays_and_the_next_is_tried_for_the_same_queued_ticket(
    answer: type,
) -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 40)
    driver.resident(1, "b", 40)
    driver.ask(20, "c", 30)
    assert revoked(driver.at(30, answer(TicketId("a"), 2))) == [("b", "swap", "gone")]
    assert driver.state_of("a") == "resident"
    assert driver.ticket("a").inflight == 2
    told = driver.last("barrier_dropped" if answer is ev.BarrierDropped else "victim_busy")
    assert told.data["holder"] == "h"
    driver.at(31, ev.Released(TicketId("b"), "swap"))
    assert granted(driver.gone(32, "b")) == ["c"]


@pytest.mark.spec("A9")
def test_a_victim_that_just_refused_is_not_asked_again_at_once_but_later() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 80)
    driver.ask(20, "c", 30)
    assert driver.at(30, ev.BarrierDropped(TicketId("a"), 1)) == []
    assert driver.fire_timer(39.9) == []
    assert s(40) in driver.timers
    assert revoked(driver.fire_timer(40)) == [("a", "swap", "gone")]


@pytest.mark.spec("C4")
def test_minimum_residency_follows_the_load_time_holds_the_revoke_and_sets_a_timer() -> None:
    driver = CoreDriver(device=80)
    driver.ask(0, "a", 80)
    driver.at(5, ev.Loaded(TicketId("a"), seconds(5)))
    assert driver.ask(6, "b", 80) == []
    assert driver.timers == [s(10)]
    assert driver.fire_timer(9.9) == []
    assert revoked(driver.fire_timer(10)) == [("a", "swap", "gone")]


def test_minimum_residency_of_a_slow_loader_is_bounded() -> None:
    driver = CoreDriver(device=80)
    driver.ask(0, "a", 80)
    driver.at(500, ev.Loaded(TicketId("a"), seconds(500)))
    assert driver.ask(559, "b", 80) == []
    assert revoked(driver.fire_timer(560)) == [("a", "swap", "gone")]


@pytest.mark.spec("A9")
def test_engine_of_a_silent_holder_is_killed_after_an_unanswered_revoke() -> None:
    terms = replace(PATIENT, silent=seconds(10))
    driver = CoreDriver(device=80, settings=replace(PLAIN, timeouts=terms), holders=("h", "g"))
    driver.resident(0, "a", 80)
    driver.join(20, "g")
    assert revoked(driver.ask(20, "b", 80, holder="g")) == [("a", "swap", "gone")]
    assert driver.fire_timer(31.9) == []
    assert killed(driver.fire_timer(32)) == ["a"]
    assert driver.state_of("a") == "reclaiming"


@pytest.mark.spec("A9", "A6")
def test_engine_of_a_beating_holder_is_not_killed_however_long_its_barrier() -> None:
    terms = replace(PATIENT, silent=seconds(10))
    driver = CoreDriver(device=80, settings=replace(PLAIN, timeouts=terms))
    driver.resident(0, "a", 80)
    driver.beat(19, "a", inflight=1)
    driver.ask(20, "b", 80)
    for t in range(21, 32):
        held = driver.held("a", types.Phase.DRAINING, inflight=1)
        assert driver.at(t, ev.Renewed(HolderId("h"), (held,))) == []
    held = driver.held("a", types.Phase.RESIDENT, inflight=1)
    driver.at(32, ev.Renewed(HolderId("h"), (held,)))
    assert driver.state_of("a") == "resident"  # its BarrierDropped was lost; the heartbeat heals
    assert driver.last("barrier_dropped").data["inflight"] == 1


@pytest.mark.spec("A10")
def test_idle_engine_that_holds_bytes_past_its_unload_time_is_killed() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 80)
    driver.ask(20, "b", 80)
    held = driver.held("a", types.Phase.UNLOADING)
    driver.at(21, ev.Renewed(HolderId("h"), (held,)))
    for t in range(22, 51):
        assert driver.at(t, ev.Renewed(HolderId("h"), (held,))) == []
    assert killed(driver.fire_timer(51)) == ["a"]
    assert "unload_overdue" in driver.kinds()


@pytest.mark.spec("B1")
def test_a_child_that_takes_more_than_it_was_granted_is_charged_what_it_takes() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 10)
    driver.engines["a"] = {CPU: 35}
    driver.read(1)
    assert (driver.charged(), driver.free()) == (35, 45)
    driver.engines["a"] = {CPU: 5}
    driver.read(2)
    assert (driver.charged(), driver.free()) == (10, 70)


@pytest.mark.spec("B1", "A6")
def test_overcommitted_device_evicts_idle_models_the_overrunning_one_first() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 40)
    driver.resident(1, "b", 40)
    driver.engines = {"a": {CPU: 40}, "b": {CPU: 45}}
    assert revoked(driver.read(2)) == [("b", "fit", "gone")]
    assert driver.free() == -5
    assert driver.read(3) == []  # on its way already
    driver.at(4, ev.Released(TicketId("b"), "fit"))
    driver.gone(5, "b")
    assert driver.free() == 40


@pytest.mark.spec("A6")
def test_overcommit_never_takes_a_model_in_use_and_asks_again_when_it_falls_idle() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 70)
    driver.beat(1, "a", inflight=3)
    driver.engines["a"] = {CPU: 90}
    assert driver.read(2) == []
    assert driver.free() == -10
    assert revoked(driver.beat(3, "a", inflight=0)) == [("a", "fit", "gone")]


@pytest.mark.spec("A16")
def test_foreign_memory_is_charged_and_evicts_idle_models() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 60)
    driver.foreign[CPU] = 15
    assert driver.read(1) == []
    assert driver.free() == 5
    driver.foreign[CPU] = 30
    assert revoked(driver.read(2)) == [("a", "fit", "gone")]


@pytest.mark.spec("K1", "C1")
def test_eviction_event_names_victim_reason_bytes_asker_act_and_cost() -> None:
    act = "drops its KV cache; every conversation waits"
    text = NamedRole("text", Role(100, act, keep_warm_s=300, evict_cost_s=0.25))
    driver = CoreDriver(device=80, settings=replace(PLAIN, roles=(text,)))
    driver.ask(0, "a", 80)
    driver.at(3, ev.Loaded(TicketId("a"), seconds(3)))
    driver.beat(3, "a")
    driver.ask(20, "b", 30)
    told = driver.last("eviction")
    assert (told.ticket, told.size_bytes) == ("a", gib(80))
    assert told.data == {
        "holder": "h", "capability": "text", "model": "a", "reason": "swap", "waiting": "b",
        "act": act, "cost_s": 3.25,
    }  # fmt: skip


def test_unload_by_hand_evicts_an_idle_model_and_not_one_in_use() -> None:
    driver = CoreDriver()
    driver.resident(0, "a", 10)
    driver.beat(1, "a", inflight=1)
    assert driver.at(2, ev.UnloadAsked(TicketId("a"))) == []
    assert revoked(driver.beat(2, "a", inflight=1)) == []
    assert "unload_refused" not in driver.kinds(), "it may have been under way"
    assert revoked(driver.beat(3, "a", inflight=1)) == []
    assert driver.last("unload_refused").data["inflight"] == 1
    assert revoked(driver.beat(4, "a", inflight=0)) == []
    assert revoked(driver.at(5, ev.UnloadAsked(TicketId("a")))) == [("a", "manual", "gone")]


def test_model_whose_last_request_ended_since_its_heartbeat_is_unloaded_by_the_next() -> None:
    driver = CoreDriver()
    driver.resident(0, "a", 10)
    driver.beat(1, "a", inflight=1)
    assert driver.at(1.5, ev.UnloadAsked(TicketId("a"))) == []
    assert revoked(driver.beat(2, "a", inflight=0)) == [("a", "manual", "gone")]
    assert "unload_refused" not in driver.kinds()


def test_unload_by_hand_outlasts_a_swap_that_its_holder_declined() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 80)
    driver.beat(1, "a", inflight=1)
    driver.ask(20, "b", 80)
    driver.at(21, ev.Busy(TicketId("a"), 1))
    driver.at(30, ev.UnloadAsked(TicketId("a")))
    driver.fire_timer(31.5)
    assert driver.state_of("a") == "draining"
    driver.at(32, ev.Busy(TicketId("a"), 1))
    assert revoked(driver.beat(33, "a", inflight=0)) == [("a", "manual", "gone")]


def test_load_by_hand_takes_an_unload_back_that_waits_for_a_heartbeat() -> None:
    driver = CoreDriver()
    driver.resident(0, "a", 10)
    driver.beat(1, "a", inflight=1)
    driver.at(1.5, ev.UnloadAsked(TicketId("a")))
    driver.at(1.6, ev.LoadAsked("text", "a"))
    assert revoked(driver.beat(2, "a", inflight=0)) == []


@pytest.mark.spec("A9")
def test_a_revoke_lost_with_the_holders_connection_is_sent_again_when_it_joins() -> None:
    driver = CoreDriver(device=80)
    driver.resident(0, "a", 80)
    driver.ask(20, "b", 80)
    held = driver.held("a", types.Phase.RESIDENT)
    assert revoked(driver.join(21, "h", held)) == [("a", "swap", "gone")]


def test_eviction_considers_each_device_alone() -> None:
    driver = CoreDriver(device=80)
    driver.see_node(0, 80, 0, node="m")
    driver.read(0, node="m")
    driver.join(0, "hm", node="m")
    driver.resident(0, "a", 80, holder="h")
    driver.ask(0, "b", 50, holder="hm")
    driver.at(1, ev.Loaded(TicketId("b"), seconds(1)))
    assert revoked(driver.ask(20, "c", 60, holder="hm")) == [("b", "swap", "gone")]
    assert driver.account("m/cpu:0").node == NodeId("m")


def chat_beside_an_embedding(reload_s: float, stays_s: float) -> CoreDriver:
    """Of 80: a text model that takes so long to load, and an embedding of the same size that was
    loaded half a second ago, at 20, and has so long a minimum residency."""
    driver = CoreDriver(device=80, settings=replace(PLAIN, min_residency=seconds(1)))
    for t, name, took_s in ((0, "a", reload_s), (20, "e1", stays_s)):
        kind = "embedding" if name == "e1" else "text"
        assert is_granted(driver.ask(t, name, 40, capability=kind, model=name), name)
        driver.at(t, ev.Loaded(TicketId(name), seconds(took_s)))
        driver.beat(t, name)
    return driver


@pytest.mark.spec("C3", "C4")
def test_an_asker_waits_for_a_cheaper_role_that_may_leave_before_the_dearer_could_be_back() -> None:
    driver = chat_beside_an_embedding(reload_s=3, stays_s=2)
    assert revoked(driver.ask(20.5, "b", 30)) == []
    assert driver.timers[0] == s(22)
    assert revoked(driver.fire_timer(22)) == [("e1", "swap", "gone")]


@pytest.mark.spec("A21", "C4")
@pytest.mark.parametrize(("reload_s", "wait_s"), [(3, 1.5), (1, 0)], ids=["waits", "does not"])
def test_an_asker_that_waits_for_a_cheaper_role_is_told_so(reload_s: float, wait_s: float) -> None:
    driver = chat_beside_an_embedding(reload_s, stays_s=2)
    driver.ask(20.5, "b", 30)
    asker = driver.find("b")
    load = driver.estimates.load_time(ModelKey("text", "b", ""), asker.need.weights_bytes)
    turnover = driver.estimates.turnover("text")
    assert driver.last("ticket_waits").took == seconds(wait_s) + turnover + load


@pytest.mark.spec("C4")
@pytest.mark.parametrize(
    ("reload_s", "stays_s", "how"),
    [(1, 2, {}), (3, 5, {}), (3, 2, {"deadline_s": 3})],
    ids=["reload is shorter", "stays longer", "deadline is sooner"],
)
def test_where_waiting_is_no_gain_the_dearer_leaves_at_once(
    reload_s: float, stays_s: float, how: dict[str, float]
) -> None:
    driver = chat_beside_an_embedding(reload_s, stays_s)
    asked = driver.ask(20.5, "b", 30, **how)  # type: ignore[arg-type]
    assert revoked(asked) == [("a", "swap", "gone")]


@pytest.mark.spec("C4")
def test_more_urgent_asker_does_not_wait_for_a_minimum_residency() -> None:
    driver = chat_beside_an_embedding(reload_s=3, stays_s=2)
    urgent = types.Priority.URGENT
    assert revoked(driver.ask(20.5, "b", 30, priority=urgent)) == [("e1", "swap", "gone")]
