"""Which adapters a turn brings, and which keep their slots (F3)."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.engines.vllm.adapters.adapter_tiers import (
    HOT_USES,
    MOST_STAGED,
    WINDOW_S,
    RecentUses,
    View,
    kept,
    moves,
)


def view(hot: str = "", warm: str = "", fixed: str = "", slots: int = 3, **uses: int) -> View:
    """Adapters are letters."""
    counts = dict(sorted(uses.items(), key=lambda item: item[1]))
    return View(slots, frozenset(hot), frozenset(warm), frozenset(fixed), counts)


@pytest.mark.spec("F3")
def test_ten_uses_in_a_minute_make_hot_and_one_makes_warm() -> None:
    found = moves(view(a=10, b=9, c=1))
    assert (found.promote, found.stage) == (["a"], ["b", "c"])
    uses = RecentUses()
    for adapter, now_s in (("before", 0.0), ("within", 1.0), ("within", 60.0)):
        uses.note(adapter, now_s)
    assert uses.counts(60.0) == {"within": 2}


@pytest.mark.spec("F3")
def test_uses_count_for_a_minute() -> None:
    uses = RecentUses()
    for now_s in range(HOT_USES):
        uses.note("a", now_s)
    uses.note("b", 5.0)
    assert uses.counts(HOT_USES) == {"b": 1, "a": HOT_USES}
    assert uses.counts(4.0 + WINDOW_S) == {"b": 1, "a": HOT_USES - 5}
    assert uses.counts(HOT_USES + WINDOW_S) == {}


def test_what_has_its_place_is_not_brought() -> None:
    found = moves(view(hot="a", warm="bc", a=50, b=9, c=12))
    assert (found.promote, found.stage) == (["c"], [])


@pytest.mark.spec("F3")
def test_slot_of_a_busy_or_running_adapter_is_not_taken_for_another() -> None:
    assert moves(view(hot="abc", fixed="c", a=11, b=2, d=90, e=95)).promote == ["e"]
    assert moves(view(hot="abc", a=11, b=12, c=13, d=90)).promote == []
    assert moves(view(hot="a", fixed="xyz", a=1, d=90)).promote == []


def test_turn_stages_the_most_used_first_and_not_all_at_once() -> None:
    uses = {f"a{n}": 1 + n % 9 for n in range(3 * MOST_STAGED)}
    staged = moves(view(**uses)).stage
    assert len(staged) == MOST_STAGED
    assert [uses[adapter] for adapter in staged] == sorted(uses.values())[: -MOST_STAGED - 1 : -1]


@pytest.mark.spec("F3")
def test_idle_ones_lose_their_slots_first_then_busy_ones_and_running_ones_last() -> None:
    assert kept(frozenset("r"), {"i": 3, "b": 12, "a": 40, "r": 1}) == ["b", "a", "r"]


LETTERS = st.frozensets(st.sampled_from("abcdefgh"))


@given(st.integers(1, 6), LETTERS, LETTERS, LETTERS, st.lists(st.sampled_from("abcdefgh")))
def test_turn_never_needs_more_slots_than_are_free_or_idle(
    slots: int, hot: frozenset[str], warm: frozenset[str], fixed: frozenset[str], used: list[str]
) -> None:
    hot, fixed = frozenset(sorted(hot)[:slots]), frozenset(sorted(fixed)[:slots])
    counts = {a: 5 * n for a, n in sorted(Counter(used).items(), key=lambda item: item[1])}
    found = moves(View(slots, hot, warm, fixed, counts))
    busy = {adapter for adapter, n in counts.items() if n >= HOT_USES}
    stays = fixed | (hot & busy)
    assert not found.promote or len(stays | set(found.promote)) <= slots
    assert set(found.promote) <= busy - hot
    assert not set(found.stage) & (hot | warm | set(found.promote))
