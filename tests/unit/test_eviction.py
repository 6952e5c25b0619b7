"""Victims, barriers, overcommit (SPEC A6, A9, C1, C4, B1). Times in seconds, sizes in GiB."""

from dataclasses import replace

import pytest

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Reason, Revoke, Tier
from arbiter.errors import NeverFits
from arbiter.units import DeviceId, HolderId, NodeId, TicketId, seconds
from tests.unit.desk import (
    CPU,
    PATIENT,
    PLAIN,
    Desk,
    gib,
    granted,
    is_granted,
    reaped,
    refusal,
    revoked,
    s,
)


@pytest.mark.spec("A9", "C3")
def test_evicts_the_least_recently_used_and_only_as_many_as_needed() -> None:
    desk = Desk(device=80)
    for t, name in enumerate(["a", "b", "c"]):
        desk.resident(t, name, 25)
    assert desk.ask(20, "d", 30) == [
        Revoke(TicketId("a"), HolderId("h"), Reason.SWAP, Tier.GONE, s(30))
    ]


@pytest.mark.spec("C1")
def test_the_role_worth_least_goes_first_however_lately_used() -> None:
    desk = Desk(device=80)
    desk.resident(0, "a", 40)
    desk.resident(10, "e1", 40, capability="embedding", model="e1")
    assert revoked(desk.ask(20, "b", 30)) == [("e1", "swap", "gone")]


@pytest.mark.spec("C3")
def test_a_victim_that_turns_out_not_to_be_needed_is_spared() -> None:
    desk = Desk(device=80)
    desk.resident(0, "a", 10)
    desk.resident(1, "b", 70)
    assert revoked(desk.ask(20, "c", 60)) == [("b", "swap", "gone")]


def test_bytes_already_coming_back_are_not_evicted_twice() -> None:
    desk = Desk(device=80)
    desk.resident(0, "a", 40)
    desk.resident(1, "b", 40)
    assert revoked(desk.ask(20, "c", 30)) == [("a", "swap", "gone")]
    assert desk.beat(21, "b") == []  # still waiting: `b` is left alone
    assert reaped(desk.at(22, ev.Released(TicketId("a"), "swap"))) == ["a"]
    assert desk.beat(22.1, "b") == []
    assert granted(desk.gone(23, "a")) == ["c"]


@pytest.mark.spec("C3")
def test_nothing_is_evicted_for_a_request_that_still_would_not_fit() -> None:
    desk = Desk(device=80)
    desk.ask(0, "vad", 30)  # loading, so not to be had
    desk.resident(0, "a", 30)
    assert desk.ask(15, "b", 60) == []


@pytest.mark.spec("A6")
def test_pinned_is_never_a_victim() -> None:
    desk = Desk(device=80, pinned="vad")
    desk.resident(0, "vad", 40)
    desk.resident(1, "a", 40)
    assert revoked(desk.ask(100, "b", 40)) == [("a", "swap", "gone")]


@pytest.mark.spec("B2", "B6")
def test_what_pinned_models_never_make_room_for_is_refused_with_the_numbers() -> None:
    desk = Desk(device=80, pinned="vad")
    desk.resident(0, "vad", 40)
    assert refusal(desk.ask(1, "b", 41)) == NeverFits(TicketId("b"), gib(41), gib(40))
    assert is_granted(desk.ask(1, "c", 40), "c")


@pytest.mark.spec("A6")
def test_loading_is_never_a_candidate() -> None:
    desk = Desk(device=80)
    desk.ask(0, "a", 80)
    assert desk.ask(100, "b", 60) == []


@pytest.mark.spec("A9")
def test_for_a_swap_idle_ones_go_first_and_one_in_use_only_behind_a_barrier() -> None:
    desk = Desk(device=80)
    desk.resident(0, "a", 40)
    desk.resident(1, "b", 40)
    desk.beat(2, "a", inflight=1)
    assert revoked(desk.ask(20, "c", 30)) == [("b", "swap", "gone")]
    desk = Desk(device=80)
    desk.resident(0, "a", 80)
    desk.beat(2, "a", inflight=1)
    [revoke] = desk.ask(20, "c", 30)
    assert isinstance(revoke, Revoke)
    assert revoke.barrier_until == s(30)
    assert desk.charged() == 80


@pytest.mark.spec("A9")
@pytest.mark.parametrize("answer", [ev.BarrierDropped, ev.Busy])
def test_a_victim_that_refuses_goes_on_and_the_next_is_tried_while_the_waiter_keeps_its_place(
    answer: type,
) -> None:
    desk = Desk(device=80)
    desk.resident(0, "a", 40)
    desk.resident(1, "b", 40)
    desk.ask(20, "c", 30)
    assert revoked(desk.at(30, answer(TicketId("a"), 2))) == [("b", "swap", "gone")]
    assert desk.state_of("a") == "resident"
    assert desk.state.ledger.find(TicketId("a")).inflight == 2
    told = desk.last("barrier_dropped" if answer is ev.BarrierDropped else "victim_busy")
    assert told.data["holder"] == "h"
    desk.at(31, ev.Released(TicketId("b"), "swap"))
    assert granted(desk.gone(32, "b")) == ["c"]


@pytest.mark.spec("A9")
def test_a_victim_that_just_refused_is_not_asked_again_at_once_but_later() -> None:
    desk = Desk(device=80)
    desk.resident(0, "a", 80)
    desk.ask(20, "c", 30)
    assert desk.at(30, ev.BarrierDropped(TicketId("a"), 1)) == []
    assert desk.woke(39.9) == []
    assert s(40) in desk.wakes
    assert revoked(desk.woke(40)) == [("a", "swap", "gone")]


@pytest.mark.spec("C4")
def test_minimum_residency_follows_the_load_time_holds_the_revoke_and_sets_a_timer() -> None:
    desk = Desk(device=80)
    desk.ask(0, "a", 80)
    desk.at(5, ev.Loaded(TicketId("a"), seconds(5)))
    assert desk.ask(6, "b", 80) == []
    assert desk.wakes == [s(10)]
    assert desk.woke(9.9) == []
    assert revoked(desk.woke(10)) == [("a", "swap", "gone")]


def test_minimum_residency_of_a_slow_loader_is_bounded() -> None:
    desk = Desk(device=80)
    desk.ask(0, "a", 80)
    desk.at(500, ev.Loaded(TicketId("a"), seconds(500)))
    assert desk.ask(559, "b", 80) == []
    assert revoked(desk.woke(560)) == [("a", "swap", "gone")]


@pytest.mark.spec("A9")
def test_a_holder_that_neither_answers_nor_beats_is_reaped() -> None:
    terms = replace(PATIENT, silent=seconds(10))
    desk = Desk(device=80, settings=replace(PLAIN, timeouts=terms), holders=("h", "g"))
    desk.resident(0, "a", 80)
    desk.join(20, "g")
    assert revoked(desk.ask(20, "b", 80, holder="g")) == [("a", "swap", "gone")]
    assert desk.woke(31.9) == []
    assert reaped(desk.woke(32)) == ["a"]
    assert desk.state_of("a") == "reclaiming"


@pytest.mark.spec("A9", "A6")
def test_a_holder_that_beats_is_not_reaped_however_long_its_barrier() -> None:
    terms = replace(PATIENT, silent=seconds(10))
    desk = Desk(device=80, settings=replace(PLAIN, timeouts=terms))
    desk.resident(0, "a", 80)
    desk.beat(19, "a", inflight=1)
    desk.ask(20, "b", 80)
    for t in range(21, 32):
        held = desk.held("a", types.Phase.DRAINING, inflight=1)
        assert desk.at(t, ev.Renewed(HolderId("h"), (held,))) == []
    held = desk.held("a", types.Phase.RESIDENT, inflight=1)
    desk.at(32, ev.Renewed(HolderId("h"), (held,)))
    assert desk.state_of("a") == "resident"  # its BarrierDropped was lost; the heartbeat heals
    assert desk.last("barrier_dropped").data["inflight"] == 1


@pytest.mark.spec("A10")
def test_an_engine_that_holds_bytes_with_nothing_in_flight_past_its_unload_time_is_reaped() -> None:
    desk = Desk(device=80)
    desk.resident(0, "a", 80)
    desk.ask(20, "b", 80)
    held = desk.held("a", types.Phase.UNLOADING)
    desk.at(21, ev.Renewed(HolderId("h"), (held,)))
    for t in range(22, 51):
        assert desk.at(t, ev.Renewed(HolderId("h"), (held,))) == []
    assert reaped(desk.woke(51)) == ["a"]
    assert "unload_overdue" in desk.kinds()


@pytest.mark.spec("B1")
def test_a_child_that_takes_more_than_it_was_granted_is_charged_what_it_takes() -> None:
    desk = Desk(device=80)
    desk.resident(0, "a", 10)
    desk.engines["a"] = {CPU: 35}
    desk.read(1)
    assert (desk.charged(), desk.free()) == (35, 45)
    desk.engines["a"] = {CPU: 5}
    desk.read(2)
    assert (desk.charged(), desk.free()) == (10, 70)


@pytest.mark.spec("B1", "A6")
def test_an_overcommitted_device_sends_idle_models_away_the_taker_first_until_it_fits() -> None:
    desk = Desk(device=80)
    desk.resident(0, "a", 40)
    desk.resident(1, "b", 40)
    desk.engines = {"a": {CPU: 40}, "b": {CPU: 45}}
    assert revoked(desk.read(2)) == [("b", "fit", "gone")]
    assert desk.free() == -5
    assert desk.read(3) == []  # on its way already
    desk.at(4, ev.Released(TicketId("b"), "fit"))
    desk.gone(5, "b")
    assert desk.free() == 40


@pytest.mark.spec("A6")
def test_overcommit_never_takes_a_model_in_use_and_asks_again_when_it_falls_idle() -> None:
    desk = Desk(device=80)
    desk.resident(0, "a", 70)
    desk.beat(1, "a", inflight=3)
    desk.engines["a"] = {CPU: 90}
    assert desk.read(2) == []
    assert desk.free() == -10
    assert revoked(desk.beat(3, "a", inflight=0)) == [("a", "fit", "gone")]


@pytest.mark.spec("A16")
def test_foreign_memory_is_charged_and_makes_room_among_the_idle() -> None:
    desk = Desk(device=80)
    desk.resident(0, "a", 60)
    desk.foreign[CPU] = 15
    assert desk.read(1) == []
    assert desk.free() == 5
    desk.foreign[CPU] = 30
    assert revoked(desk.read(2)) == [("a", "fit", "gone")]


@pytest.mark.spec("K1")
def test_an_eviction_says_who_why_how_much_and_for_whom() -> None:
    desk = Desk(device=80)
    desk.resident(0, "a", 80)
    desk.ask(20, "b", 30)
    told = desk.last("eviction")
    assert (told.ticket, told.size_bytes) == ("a", gib(80))
    assert told.data == {
        "holder": "h", "capability": "text", "model": "a", "reason": "swap", "waiting": "b",
    }  # fmt: skip


def test_by_hand_an_idle_model_goes_and_one_in_use_stays() -> None:
    desk = Desk()
    desk.resident(0, "a", 10)
    desk.beat(1, "a", inflight=1)
    assert desk.at(2, ev.UnloadAsked(TicketId("a"))) == []
    assert desk.last("unload_refused").data["inflight"] == 1
    desk.beat(3, "a", inflight=0)
    assert revoked(desk.at(4, ev.UnloadAsked(TicketId("a")))) == [("a", "manual", "gone")]


@pytest.mark.spec("A9")
def test_a_revoke_lost_with_the_holders_connection_is_sent_again_when_it_joins() -> None:
    desk = Desk(device=80)
    desk.resident(0, "a", 80)
    desk.ask(20, "b", 80)
    held = desk.held("a", types.Phase.RESIDENT)
    assert revoked(desk.join(21, "h", held)) == [("a", "swap", "gone")]


def test_each_device_is_looked_at_alone() -> None:
    desk = Desk(device=80)
    desk.see_node(0, 80, 0, node="m")
    desk.read(0, node="m")
    desk.join(0, "hm", node="m")
    desk.resident(0, "a", 80, holder="h")
    desk.ask(0, "b", 50, holder="hm")
    desk.at(1, ev.Loaded(TicketId("b"), seconds(1)))
    assert revoked(desk.ask(20, "c", 60, holder="hm")) == [("b", "swap", "gone")]
    assert desk.state.ledger.books[DeviceId("m/cpu:0")].node == NodeId("m")
