"""Batch admission against rules too simple to be wrong, for any load."""

from collections import Counter
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arbiter.core.types import Priority
from deployments.engines.vllm.batching.batch_admission import (
    BASE,
    BYPASSES,
    View,
    WaitingRequest,
    plan,
)
from deployments.engines.vllm.batching.token_counters import FairShare
from tests.support.examples import examples

NAMES = st.sampled_from([BASE, *"abcdefgh"])


PRIORITIES = list(Priority)


@st.composite
def asked(draw: st.DrawFn, key: int, since_s: float) -> WaitingRequest:
    tenant, priority = draw(st.sampled_from(["", "x", "y"])), draw(st.sampled_from(PRIORITIES))
    expires_s = draw(st.sampled_from([inf, inf, 9.0, 10.0, 11.0]))
    tokens = draw(st.integers(1, 40))
    return WaitingRequest(key, draw(NAMES), since_s, tenant, priority, tokens, expires_s)


@st.composite
def views(draw: st.DrawFn) -> View:
    slots = draw(st.integers(1, 5))
    names = draw(st.lists(st.sampled_from("abcdefgh"), max_size=slots, unique=True))
    running = {name: draw(st.integers(1, 4)) for name in (*names, BASE)}
    if draw(st.booleans()):
        del running[BASE]
    arrivals = sorted(draw(st.lists(st.floats(0, 10), max_size=30)))
    waiting = [draw(asked(n, since)) for n, since in enumerate(arrivals)]
    window = sum(running.values()) + draw(st.integers(0, 12))
    free = slots - len(running.keys() - {BASE})
    pinned = draw(st.lists(st.sampled_from("abcdefgh"), max_size=max(0, free - 1), unique=True))
    ageing_s = draw(st.sampled_from([0.5, 3.0, 100.0]))
    since = st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0, 10), max_size=4)
    return View(
        slots,
        window,
        running,
        waiting,
        10.0,
        ageing_s,
        frozenset(pinned),
        draw(shares(waiting)),
        draw(st.dictionaries(st.sampled_from(PRIORITIES), st.integers(0, BYPASSES))),
        draw(since),
    )


@st.composite
def shares(draw: st.DrawFn, waiting: list[WaitingRequest]) -> FairShare:
    """Any services so far, of those that wait."""
    made = FairShare()
    for one in waiting:
        made.begin_wait(one.tenant, one.adapter)
        made.charge(one.tenant, one.adapter, draw(st.integers(0, 50)))
    return made


def slotted(view: View, running: Counter[str]) -> set[str]:
    return (set(running) | view.pinned) - {BASE}


def after(view: View, entered: list[int]) -> Counter[str]:
    by_key = {one.key: one.adapter for one in view.waiting}
    return Counter(view.running) + Counter(by_key[key] for key in entered)


def slots_and_window_are_kept_and_no_request_enters_twice(view: View) -> None:
    entered = plan(view).entering
    assert len(set(entered)) == len(entered)
    running = after(view, entered)
    assert len(slotted(view, running)) <= view.slots
    assert running.total() <= view.window


def expired_request_never_enters_and_any_other_may(view: View) -> None:
    entered = set(plan(view).entering)
    assert not entered & {one.key for one in view.waiting if one.expires_s <= view.now_s}
    alive = [one for one in view.waiting if one.expires_s > view.now_s]
    assert plan(replace(view, waiting=alive)).entering == plan(view).entering


def where_all_adapters_fit_urgency_decides_and_then_who_was_served_least(view: View) -> None:
    adapters = {one.adapter for one in view.waiting} | set(view.running) | view.pinned
    view = replace(view, slots=max(view.slots, len(adapters)), bypassed={})
    left = [one for one in view.waiting if one.expires_s > view.now_s]
    counters = view.shares.copy({one.tenant for one in left})
    for key in plan(view).entering[:BYPASSES]:  # so far none was bypassed often enough
        best = min(left, key=lambda w: (w.priority, *counters.of(w.tenant, w.adapter), w.since_s))
        assert best.key == key
        counters.charge(best.tenant, best.adapter, best.tokens)
        left.remove(best)


def requests_of_one_queue_enter_in_order_of_arrival(view: View) -> None:
    entered = plan(view).entering
    alive = [one for one in view.waiting if one.expires_s > view.now_s]
    queues = {(one.priority, one.tenant, one.adapter) for one in alive}
    for queue in queues:
        mine = [w.key for w in alive if (w.priority, w.tenant, w.adapter) == queue]
        taken = [key for key in entered if key in mine]
        assert taken == mine[: len(taken)]


def view_stays_as_it_is(view: View) -> None:
    before = view.shares.copy(view.shares.adapters), dict(view.running), dict(view.bypassed)
    plan(view)
    assert (view.shares, dict(view.running), dict(view.bypassed)) == before


def no_slot_stays_empty_while_a_request_waits_for_one(view: View) -> None:
    running = after(view, plan(view).entering)
    alive = [one for one in view.waiting if one.expires_s > view.now_s]
    left = len(alive) - (running.total() - sum(view.running.values()))
    if left and running.total() < view.window:
        assert len(slotted(view, running)) == view.slots
        assert not {one.adapter for one in alive} & {BASE} or running[BASE]


# Checked of the same views, because to draw one takes longer than to check it.
RULES = (
    slots_and_window_are_kept_and_no_request_enters_twice,
    expired_request_never_enters_and_any_other_may,
    where_all_adapters_fit_urgency_decides_and_then_who_was_served_least,
    requests_of_one_queue_enter_in_order_of_arrival,
    view_stays_as_it_is,
    no_slot_stays_empty_while_a_request_waits_for_one,
)


@pytest.mark.spec("F6", "F8")
@settings(max_examples=examples(600), derandomize=True)
@given(views())
def test_any_plan_keeps_every_rule(view: View) -> None:
    for rule in RULES:
        rule(view)


@pytest.mark.spec("F2")
def test_a_pinned_adapter_enters_at_once_and_never_drains_for_another() -> None:
    waiting = [
        WaitingRequest(0, "cold", 0.0),
        WaitingRequest(1, "pin", 5.0),
        WaitingRequest(2, "b", 5.0),
    ]
    pin = frozenset({"pin"})
    assert plan(View(2, 8, {"b": 2}, waiting, 6.0, ageing_s=2.0, pinned=pin)).entering == [1], (
        "b drains"
    )
    assert plan(View(2, 8, {"pin": 1}, waiting, 6.0, ageing_s=2.0, pinned=pin)).entering == [0, 1]


@pytest.mark.spec("F4", "F8")
@settings(max_examples=examples(200), derandomize=True)
@given(st.integers(1, 4), st.integers(1, 3), st.lists(st.integers(1, 5), min_size=60, max_size=60))
def test_a_cold_adapter_enters_under_any_flood_on_hot_ones(
    slots: int, per_slot: int, lengths: list[int]
) -> None:
    """A closed loop keeps every hot adapter's queue full; each request runs 1 to 5 ticks."""
    window, ageing = slots * per_slot, 3.0
    hot = [chr(ord("a") + n) for n in range(slots)]
    waiting = [WaitingRequest(n, hot[n % slots], 0.0) for n in range(window * 2)]
    waiting.insert(slots, WaitingRequest(10_000, "cold", 0.0))
    running: dict[int, tuple[str, int]] = {}
    for tick, key in zip(range(60), range(20_000, 30_000), strict=False):
        running = {k: (a, end) for k, (a, end) in running.items() if end > tick}
        counts = Counter(a for a, _ in running.values())
        entered = plan(View(slots, window, counts, waiting, float(tick), ageing)).entering
        if 10_000 in entered:
            return
        for one in [w for w in waiting if w.key in entered]:
            waiting.remove(one)
            running[one.key] = one.adapter, tick + lengths[(one.key + tick) % 60]
            waiting.append(WaitingRequest(key * 100 + one.key % 100, one.adapter, float(tick)))
    raise AssertionError("the cold adapter never entered")


def test_running_adapters_then_the_longest_queue_go_first_beyond_the_slots() -> None:
    names = ["c", "a", "d", "d", "a", "c", "d"]
    waiting = [WaitingRequest(n, name, float(n)) for n, name in enumerate(names)]
    view = View(2, 8, {"a": 1}, waiting, 7.0, ageing_s=100.0)
    assert plan(view).entering == [1, 4, 2, 3, 6]


def test_an_aged_request_takes_the_slot_that_comes_free() -> None:
    waiting = [
        WaitingRequest(0, "cold", 0.0),
        WaitingRequest(1, "a", 5.0),
        WaitingRequest(2, "b", 5.0),
    ]
    full = View(2, 8, {"a": 1, "b": 2}, waiting, 6.0, ageing_s=2.0)
    assert plan(full).entering == [2], "a drains, b goes on"
    freed = View(2, 8, {"b": 2}, waiting, 6.0, ageing_s=2.0)
    assert plan(freed).entering == [0, 2]


@pytest.mark.spec("F6")
def test_an_adapter_keeps_its_slot_for_a_turn_before_it_gives_it_away() -> None:
    waiting = [WaitingRequest(0, "cold", 0.0), WaitingRequest(1, "hot", 0.0)]
    view = View(1, 8, {"hot": 1}, waiting, 10.0, turn_s=1.0, slotted_s={"hot": 9.5})
    assert plan(view).entering == [1], "its turn goes on"
    assert plan(replace(view, slotted_s={"hot": 9.0})).entering == []
