"""The cache of projected pictures over a clock of the test: bound, order, term and counts."""

from types import SimpleNamespace
from typing import Any

import pytest

from deployments.engines.vllm.picture_cache import ENTRIES, TERM_S, PictureCache

EMBEDDINGS = 16  # of each picture


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cache(clock: Clock) -> PictureCache:
    made = PictureCache(cache_size=1_000)
    made.clock = clock
    return made


def request(name: str, *pictures: str) -> Any:
    features = [SimpleNamespace(identifier=picture) for picture in pictures]
    return SimpleNamespace(
        request_id=name, mm_features=features, get_num_encoder_embeds=lambda number: EMBEDDINGS
    )


def begin(cache: PictureCache, asked: Any) -> None:
    """As vLLM's scheduler does for each picture of a request."""
    for number in range(len(asked.mm_features)):
        if not cache.check_and_update_cache(asked, number):
            assert cache.can_allocate(asked, number, 10_000, 0)
            cache.allocate(asked, number)


def run(cache: PictureCache, name: str, *pictures: str) -> None:
    asked = request(name, *pictures)
    begin(cache, asked)
    cache.free(asked)


def counts(cache: PictureCache) -> tuple[int, int, int]:
    return cache.hits, cache.misses, cache.dropped


@pytest.mark.spec("H8")
def test_thirty_third_picture_drops_the_one_unused_for_longest(cache: PictureCache) -> None:
    for number in range(ENTRIES):
        run(cache, f"r{number}", f"p{number}")
    run(cache, "again", "p0")
    assert counts(cache) == (1, ENTRIES, 0)
    run(cache, "one more", "new")
    assert len(cache.cached) == ENTRIES == 32
    assert "p1" not in cache.cached and "p0" in cache.cached
    assert cache.get_freed_mm_hashes() == ["p1"]
    assert counts(cache) == (1, ENTRIES + 1, 1)


@pytest.mark.spec("H8")
def test_entries_in_use_stay_and_the_bound_holds_once_they_are_free(cache: PictureCache) -> None:
    cache.entries = 2
    running = [request(f"r{number}", f"p{number}") for number in range(4)]
    for asked in running:
        begin(cache, asked)
    assert len(cache.cached) == 4  # all of them are read just now
    for asked in running:
        cache.free(asked)
    assert sorted(cache.cached) == ["p2", "p3"]


@pytest.mark.spec("H8")
def test_entry_leaves_when_unused_for_the_term(cache: PictureCache, clock: Clock) -> None:
    run(cache, "r0", "old")
    clock.now_s = TERM_S - 1
    run(cache, "r1", "new")
    run(cache, "r2", "old")  # used again: its term begins anew
    clock.now_s = TERM_S * 2 - 2
    cache.expire()
    assert sorted(cache.cached) == ["new", "old"]
    busy = request("r3", "new")
    begin(cache, busy)
    clock.now_s = TERM_S * 4
    cache.expire()
    assert list(cache.cached) == ["new"]  # in use
    cache.free(busy)
    cache.expire()
    assert cache.facts()["entries"] == 0 and cache.num_free_slots == cache.cache_size


@pytest.mark.spec("H8")
def test_request_counts_once_for_a_picture_however_often_it_is_asked(cache: PictureCache) -> None:
    run(cache, "r0", "a")
    asked = request("r1", "a", "b")
    for _ in range(3):  # a step for each piece of a long prompt
        begin(cache, asked)
    assert counts(cache) == (1, 2, 0)


@pytest.mark.spec("H8")
def test_purge_and_reset_leave_nothing_unused(cache: PictureCache) -> None:
    run(cache, "r0", "a")
    busy = request("r1", "b")
    begin(cache, busy)
    cache.purge()
    assert list(cache.cached) == ["b"]
    cache.free(busy)
    cache.purge()
    assert not cache.cached and not cache.used_s
    assert cache.num_free_slots == cache.num_freeable_slots == cache.cache_size
    run(cache, "r2", "c")
    cache.reset()
    assert cache.facts()["entries"] == 0 and cache.dropped == 3


@pytest.mark.spec("H8")
def test_too_many_embeddings_drop_entries_and_their_times(cache: PictureCache) -> None:
    cache.cache_size = cache.num_free_slots = cache.num_freeable_slots = 2 * EMBEDDINGS
    for name in ("a", "b", "c"):
        run(cache, name, name)
    assert sorted(cache.cached) == sorted(cache.used_s) == ["b", "c"]
    assert cache.dropped == 1
