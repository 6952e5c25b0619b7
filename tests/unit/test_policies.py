"""Contracts that every registered policy keeps, then the choice each one is known for."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbiter.settings import DEFAULTS
from arbiter.units import GIB, Bytes, DeviceId, HolderId, Instant, Span, TicketId, seconds
from arbiter.view import Candidate, Idler, Site, Waiter
from policies import ADMIT, EVICT, KEEP_WARM, PLACE, ROLES, bundle

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
    ),
    max_size=8,
    unique_by=lambda c: c.ticket,
)
ONE = Candidate(TicketId("a"), HolderId("h"), 25, Bytes(GIB), 0, Instant(5), Span(0))


@pytest.mark.parametrize("name", EVICT)
@given(candidates=CANDIDATES)
def test_eviction_orders_any_candidates_alike_in_whatever_order_they_come(
    name: str, candidates: list[Candidate]
) -> None:
    key = EVICT[name]
    assert sorted(candidates, key=key) == sorted(reversed(candidates), key=key)
    assert len({key(c) for c in candidates}) == len(candidates)  # no ties left to chance


@pytest.mark.parametrize("name", EVICT)
def test_every_eviction_policy_spares_what_is_in_use_longest(name: str) -> None:
    busy = replace(ONE, ticket=TicketId("b"), inflight=1, role_rank=10, last_used=Instant(0))
    assert EVICT[name](ONE) < EVICT[name](busy)


@pytest.mark.spec("C1")
def test_priority_lru_prefers_idle_then_the_least_role_then_the_oldest() -> None:
    key = EVICT["priority_lru"]
    text_old = replace(ONE, ticket=TicketId("b"), role_rank=100, last_used=Instant(1))
    text_new = replace(text_old, ticket=TicketId("c"), last_used=Instant(9))
    vision_new = replace(ONE, ticket=TicketId("d"), role_rank=20, last_used=Instant(9))
    order = sorted([text_new, text_old, ONE, vision_new], key=key)
    assert [c.ticket for c in order] == ["d", "a", "b", "c"]


@pytest.mark.spec("C1")
def test_roles_are_ranked_as_specified_and_name_their_eviction_act() -> None:
    ranks = {name: role.rank for name, role in ROLES.items()}
    assert ranks == {
        "drafter": 10, "emotion": 15, "speaker-id": 18, "vision": 20, "image": 20,
        "embedding": 25, "turn-detector": 28, "wake-word": 30, "vad": 35, "asr": 40, "tts": 50,
        "text": 100,
    }  # fmt: skip
    assert all(role.act for role in ROLES.values())


@pytest.mark.spec("C8")
def test_roles_keep_warm_as_specified() -> None:
    warm = {name: role.keep_warm_s for name, role in ROLES.items()}
    assert (warm.pop("image"), warm.pop("vision")) == (900, 60)
    assert set(warm.values()) == {300}


@pytest.mark.parametrize("name", ADMIT)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=9))
def test_admission_leaves_no_ties(name: str, times: list[int]) -> None:
    waiters = [Waiter(TicketId(str(n)), Instant(t), n) for n, t in enumerate(times)]
    assert len({ADMIT[name](w) for w in waiters}) == len(waiters)


@pytest.mark.spec("C6")
def test_fifo_serves_by_arrival() -> None:
    first, second = Waiter(TicketId("z"), Instant(1), 1), Waiter(TicketId("a"), Instant(2), 2)
    same_time = Waiter(TicketId("a"), Instant(1), 2)
    assert ADMIT["fifo"](first) < ADMIT["fifo"](second)
    assert ADMIT["fifo"](first) < ADMIT["fifo"](same_time)


@pytest.mark.parametrize("name", PLACE)
@given(st.lists(st.integers(-5, 20), min_size=1, max_size=6), st.integers(1, 10))
def test_placement_never_prefers_a_device_that_lacks_room(
    name: str, free: list[int], need: int
) -> None:
    sites = [Site(DeviceId(f"d{n}"), Bytes(need), Bytes(f)) for n, f in enumerate(free)]
    best = min(sites, key=PLACE[name])
    assert best.free_bytes >= need or all(s.free_bytes < need for s in sites)


def test_best_fit_takes_the_smallest_hole_and_else_the_least_lack() -> None:
    key = PLACE["best_fit"]
    sites = [Site(DeviceId(f"d{n}"), Bytes(10), Bytes(f)) for n, f in enumerate([30, 12, 9, -4])]
    assert [s.device for s in sorted(sites, key=key)] == ["d1", "d0", "d2", "d3"]


@pytest.mark.spec("C8")
@pytest.mark.parametrize("name", KEEP_WARM)
def test_pinned_and_for_ever_never_go_by_themselves(name: str) -> None:
    goes_at = KEEP_WARM[name]
    assert goes_at(Idler(Instant(5), seconds(60), pinned=True)) is None
    assert goes_at(Idler(Instant(5), Span(-1), pinned=False)) is None


@pytest.mark.spec("C8")
def test_keep_warm_counts_from_the_last_use() -> None:
    goes_at = KEEP_WARM["since_last_use"]
    assert goes_at(Idler(Instant(5), Span(60), pinned=False)) == 65
    assert goes_at(Idler(Instant(5), Span(0), pinned=False)) == 5


def test_a_bundle_holds_what_the_settings_name() -> None:
    assert bundle(DEFAULTS).evict is EVICT["priority_lru"]
    with pytest.raises(KeyError):
        bundle(replace(DEFAULTS, evict="no such policy"))
