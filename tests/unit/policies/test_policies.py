"""Contracts that every registered policy keeps, then the choice each one is known for."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbiter.core.eviction.ranking import effective_priority
from arbiter.core.records.priced_victim import PricedVictim
from arbiter.core.records.reuse import Reuse
from arbiter.core.settings import DEFAULTS
from arbiter.core.types import Priority
from arbiter.core.view import Candidate, IdleModel, Key, PlacementOption, QueuedRequest
from arbiter.units import GIB, SECOND, Bytes, DeviceId, HolderId, Instant, Span, TicketId, seconds
from policies import ADMIT, EVICT, KEEP_WARM, PLACE, ROLES, bundle
from tests.support.core_driver import CPU, PLAIN, CoreDriver, revoked

CANDIDATES = st.lists(
    st.builds(
        Candidate,
        ticket=st.text("abcdef", min_size=1, max_size=4).map(TicketId),
        holder=st.just(HolderId("h")),
        role_rank=st.sampled_from([r.rank for r in ROLES.values()]),
        freed_bytes=st.integers(1, 80 * GIB).map(Bytes),
        inflight=st.integers(0, 9),
        last_used=st.integers(0, 10**12).map(Instant),
        reload=st.integers(0, 10**11).map(Span),
        priority=st.sampled_from(Priority),
        now=st.just(Instant(10**12)),
        budget_bytes=st.just(Bytes(80 * GIB)),
        recent_count=st.floats(0, 1e6),
        lasting_count=st.floats(0, 1e6),
        usual_count=st.floats(0, 1e6),
        reuse=st.floats(0, 1).map(Reuse),
        next_use=st.none() | st.integers(10**12, 10**13).map(Instant),
        evict_cost_s=st.floats(0, 1e6),
    ),
    max_size=8,
    unique_by=lambda c: c.ticket,
)
ONE = Candidate(TicketId("a"), HolderId("h"), 25, Bytes(GIB), 0, Instant(5), Span(0))


def place(name: str, c: Candidate) -> Key:
    price = EVICT[name](c)
    return PricedVictim(c.ticket, c.freed_bytes, price.rank, price.cost_s).place


@pytest.mark.spec("C3")
@pytest.mark.parametrize("name", EVICT)
@given(candidates=CANDIDATES)
def test_eviction_orders_any_candidates_alike_in_whatever_order_they_come(
    name: str, candidates: list[Candidate]
) -> None:
    """Total, deterministic on ties, and pure: the same question gets the same answer."""
    places = [place(name, c) for c in candidates]
    assert places == [place(name, c) for c in candidates]
    assert len(set(places)) == len(candidates)  # no ties left to chance
    assert sorted(places) == sorted(reversed(places))
    assert all(EVICT[name](c).cost_s >= 0 for c in candidates)


@pytest.mark.spec("C2", "C3")
@pytest.mark.parametrize("name", EVICT)
@given(data=st.data())
def test_every_policy_evicts_only_lawful_victims_and_an_irreducible_set(
    name: str, data: st.DataObject
) -> None:
    """Whatever it would like: not the pinned, the more urgent, those within their minimum
    residency; not the busy before the idle."""
    driver = CoreDriver(device=80, settings=replace(PLAIN, evict=name), pinned="vad")
    sizes = data.draw(st.lists(st.integers(1, 15), min_size=2, max_size=5))
    for number, (model, size) in enumerate(zip(["vad", "a", "b", "c", "d"], sizes, strict=False)):
        priority = data.draw(st.sampled_from(Priority))
        driver.resident(number, model, size, priority=priority)
        driver.beat(number, model, inflight=data.draw(st.integers(0, 1)))
    now = data.draw(st.sampled_from([5, 30]))
    before = {e.id: e for e in driver.tickets()}
    urgent = {t: effective_priority(driver.state, e) for t, e in before.items()}
    asker, need = data.draw(st.sampled_from(Priority)), data.draw(st.integers(5, 60))
    free = driver.free()
    victims = [
        before[TicketId(t)] for t, _, _ in revoked(driver.ask(now, "e", need, priority=asker))
    ]
    freed = [e.charge(CPU) / GIB for e in victims]
    assert not victims or free < need <= free + sum(freed)
    assert all(sum(freed) - one + free < need for one in freed)
    for entry in victims:
        assert not entry.pinned
        assert urgent[entry.id] >= asker
    if any(e.inflight for e in victims):
        idle = [e for e in before.values() if not e.inflight and not e.pinned]
        left = [e for e in idle if e not in victims and urgent[e.id] >= asker]
        assert sum(e.charge(CPU) / GIB for e in left) < max(freed)


@pytest.mark.spec("C1")
def test_priority_lru_prefers_the_least_role_then_the_oldest() -> None:
    text_old = ONE._replace(ticket=TicketId("b"), role_rank=100, last_used=Instant(1))
    text_new = text_old._replace(ticket=TicketId("c"), last_used=Instant(9))
    vision_new = ONE._replace(ticket=TicketId("d"), role_rank=20, last_used=Instant(9))
    candidates = [text_new, text_old, ONE, vision_new]
    order = sorted(candidates, key=lambda c: place("priority_lru", c))
    assert [c.ticket for c in order] == ["d", "a", "b", "c"]


AGED = ONE._replace(now=Instant(600 * SECOND), last_used=Instant(500 * SECOND))
AGED = AGED._replace(budget_bytes=Bytes(10 * GIB), role_rank=40)


@pytest.mark.spec("C3")
@pytest.mark.parametrize(
    "other",
    [
        AGED._replace(last_used=Instant(0)),
        AGED._replace(freed_bytes=Bytes(9 * GIB)),
        AGED._replace(role_rank=10),
        # each of the three can outweigh the other two together, when it differs by enough
        AGED._replace(last_used=Instant(0), freed_bytes=Bytes(GIB // 9), role_rank=50),
        AGED._replace(last_used=Instant(520 * SECOND), freed_bytes=Bytes(9 * GIB), role_rank=45),
        AGED._replace(last_used=Instant(520 * SECOND), freed_bytes=Bytes(GIB // 9), role_rank=10),
    ],
)
def test_size_aware_lru_weighs_recency_size_and_role(other: Candidate) -> None:
    other = other._replace(ticket=TicketId("z"))
    assert place("size_aware_lru", other) < place("size_aware_lru", AGED)


@pytest.mark.spec("C3")
def test_cost_aware_spares_what_is_dear_to_bring_back_likely_wanted_and_small() -> None:
    one = ONE._replace(reload=seconds(10), recent_count=1.0)
    slower = one._replace(ticket=TicketId("s"), reload=seconds(30))
    wanted = one._replace(ticket=TicketId("w"), recent_count=5.0)
    large = one._replace(ticket=TicketId("l"), freed_bytes=Bytes(2 * GIB))
    order = sorted([slower, wanted, large, one], key=lambda c: place("cost_aware", c))
    assert [c.ticket for c in order] == ["l", "a", "w", "s"]


@pytest.mark.spec("C3")
def test_belady_evicts_models_never_used_again_then_the_one_used_last() -> None:
    soon = ONE._replace(ticket=TicketId("s"), next_use=Instant(5))
    late = ONE._replace(ticket=TicketId("l"), next_use=Instant(50))
    order = sorted([soon, late, ONE], key=lambda c: place("belady", c))
    assert [c.ticket for c in order] == ["a", "l", "s"]


@pytest.mark.spec("C3", "N4")
def test_learned_prices_a_reload_by_the_chance_that_it_is_wanted_soon() -> None:
    price = EVICT["learned"]
    one = ONE._replace(reload=seconds(40), reuse=Reuse(0.25))
    assert price(one).cost_s == pytest.approx(10)
    assert price(one._replace(evict_cost_s=3.0)).cost_s == pytest.approx(13)
    assert price(one._replace(reload=Span(0))).cost_s == pytest.approx(2.5)  # 10 s where unknown
    assert str(price(one).why).startswith("wanted soon with 0.25: ")


@pytest.mark.spec("C3")
def test_time_of_day_spares_what_is_used_now_and_usually_at_this_hour() -> None:
    """Of equals in size and load: asked for of late, by habit, and both."""
    price = EVICT["time_of_day"]
    new = ONE._replace(recent_count=9.0, usual_count=0.0)
    habit = ONE._replace(recent_count=0.0, usual_count=4.0)
    both = ONE._replace(recent_count=9.0, usual_count=4.0)
    assert price(habit).cost_s < price(new).cost_s < price(both).cost_s
    slow = both._replace(reload=seconds(40))
    assert price(slow).cost_s == pytest.approx(4 * price(both).cost_s)  # 10 s where unknown


@pytest.mark.spec("C1")
def test_roles_are_ranked_as_specified_and_name_their_eviction_act() -> None:
    ranks = {name: role.rank for name, role in ROLES.items()}
    assert ranks == {
        "drafter": 10, "emotion": 15, "speaker-id": 18, "vision": 20, "image": 20,
        "embedding": 25, "turn-detector": 28, "wake-word": 30, "vad": 35, "asr": 40, "tts": 50,
        "text": 100, "lease": 5,
    }  # fmt: skip
    assert all(role.act for role in ROLES.values())


@pytest.mark.spec("C8")
def test_roles_keep_warm_as_specified() -> None:
    warm = {name: role.keep_warm_s for name, role in ROLES.items()}
    assert (warm.pop("image"), warm.pop("vision")) == (900, 60)
    assert set(warm.values()) == {300}


@pytest.mark.parametrize("name", ADMIT)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=9))
def test_grant_order_leaves_no_ties(name: str, times: list[int]) -> None:
    waiters = [QueuedRequest(TicketId(str(n)), Instant(t), n) for n, t in enumerate(times)]
    assert len({ADMIT[name](w) for w in waiters}) == len(waiters)


@pytest.mark.spec("C6")
def test_fifo_serves_by_arrival() -> None:
    first, second = (
        QueuedRequest(TicketId("z"), Instant(1), 1),
        QueuedRequest(TicketId("a"), Instant(2), 2),
    )
    same_time = QueuedRequest(TicketId("a"), Instant(1), 2)
    assert ADMIT["fifo"](first) < ADMIT["fifo"](second)
    assert ADMIT["fifo"](first) < ADMIT["fifo"](same_time)


@pytest.mark.parametrize("name", PLACE)
@given(st.lists(st.integers(-5, 20), min_size=1, max_size=6), st.integers(1, 10))
def test_placement_never_prefers_a_device_that_lacks_room(
    name: str, free: list[int], need: int
) -> None:
    sites = [PlacementOption(DeviceId(f"d{n}"), Bytes(need), Bytes(f)) for n, f in enumerate(free)]
    best = min(sites, key=PLACE[name])
    assert best.free_bytes >= need or all(s.free_bytes < need for s in sites)


def test_best_fit_takes_the_smallest_hole_and_else_the_least_lack() -> None:
    key = PLACE["best_fit"]
    sites = [
        PlacementOption(DeviceId(f"d{n}"), Bytes(10), Bytes(f))
        for n, f in enumerate([30, 12, 9, -4])
    ]
    assert [s.device for s in sorted(sites, key=key)] == ["d1", "d0", "d2", "d3"]


@pytest.mark.spec("C8")
@pytest.mark.parametrize("name", KEEP_WARM)
def test_pinned_and_unlimited_models_never_expire(name: str) -> None:
    goes_at = KEEP_WARM[name]
    assert goes_at(IdleModel(Instant(5), seconds(60), pinned=True)) is None
    assert goes_at(IdleModel(Instant(5), Span(-1), pinned=False)) is None


@pytest.mark.spec("C8")
def test_keep_warm_counts_from_the_last_use() -> None:
    goes_at = KEEP_WARM["since_last_use"]
    assert goes_at(IdleModel(Instant(5), Span(60), pinned=False)) == 65
    assert goes_at(IdleModel(Instant(5), Span(0), pinned=False)) == 5


def test_a_bundle_holds_what_the_settings_name() -> None:
    assert bundle(DEFAULTS).evict is EVICT[DEFAULTS.evict]
    with pytest.raises(KeyError):
        bundle(replace(DEFAULTS, evict="no such policy"))
