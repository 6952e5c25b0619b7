"""Which requests an engine's prefix cache has lost, by what vLLM's own block pool tells."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from deployments.engines.vllm.kv import kept_blocks
from deployments.engines.vllm.kv.kept_blocks import TENANTS_TOLD, KeptSince, watch_blocks

pytestmark = pytest.mark.spec("G3")
BEGAN_S = 1_000.0
ROOM = 20  # blocks


class Cache:
    """A block pool, and requests that use it as vLLM's scheduler has them do, each with a step of
    its own."""

    def __init__(self, beside: KVCacheMetricsCollector | None = None) -> None:
        self.since = KeptSince()
        self.block_pool = BlockPool(ROOM + 1, True, 16, metrics_collector=beside)
        self.enable_caching = True
        self.kv_cache_manager, self.requests = self, dict[str, Any]()
        self.new: list[Any] = []
        self.running: dict[str, Any] = {"idle": None}
        watch_blocks(self, self.since)
        self.numbers = iter(range(1_000_000))

    def schedule(self) -> Any:
        cached = SimpleNamespace(
            req_ids=list(self.running), new_block_ids=list(self.running.values())
        )
        return SimpleNamespace(scheduled_new_reqs=self.new, scheduled_cached_reqs=cached)

    def given(self, count: int, use: list[KVCacheBlock]) -> list[KVCacheBlock]:
        self.block_pool.touch(use)
        made = self.block_pool.get_new_blocks(count)
        for block in made:  # as `cache_full_blocks` does
            block.set_block_hash(next(self.numbers).to_bytes(32), num_tokens=16)
            self.block_pool.cached_block_hash_to_block.insert(block.block_hash, block)
        return [*use, *made]

    def begin(
        self, arrived_s: float, count: int, use: list[KVCacheBlock] | None = None
    ) -> list[KVCacheBlock]:
        name, found = str(next(self.numbers)), self.given(count, use or [])
        self.requests[name] = SimpleNamespace(arrival_time=arrived_s)
        self.new = [SimpleNamespace(req_id=name, block_ids=ids_of(found))]
        self.schedule()
        self.new = []
        return found

    def go_on(self, arrived_s: float, count: int) -> list[KVCacheBlock]:
        """More blocks for a request that runs."""
        name, found = str(next(self.numbers)), self.given(count, [])
        self.requests[name] = SimpleNamespace(arrival_time=arrived_s)
        self.running[name] = ids_of(found)
        self.schedule()
        del self.running[name]
        return found

    def end(self, blocks: list[KVCacheBlock]) -> None:
        self.block_pool.free_blocks(reversed(blocks))

    def run(
        self, arrived_s: float, count: int, use: list[KVCacheBlock] | None = None
    ) -> list[KVCacheBlock]:
        blocks = self.begin(arrived_s, count, use)
        self.end(blocks)
        return blocks


def ids_of(blocks: list[KVCacheBlock]) -> tuple[list[int], ...]:
    """As a step tells them, by group; 0 stands for what a window has left behind."""
    return [0, *(block.block_id for block in blocks[::2])], [b.block_id for b in blocks[1::2]]


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setattr(kept_blocks, "time", SimpleNamespace(time=lambda: BEGAN_S))
    return Cache()


def test_request_is_lost_once_less_than_the_share_that_the_router_asks_for_is_left(
    cache: Cache,
) -> None:
    cache.run(1_001, 10)
    cache.run(1_002, 10)
    assert cache.since.facts().since_s == BEGAN_S, "nothing was lost yet"
    cache.run(1_003, 3)
    assert cache.since.facts().since_s == BEGAN_S, "7 of 10 are left"
    cache.run(1_004, 1)
    assert cache.since.facts().since_s == 1_001
    cache.run(1_005, 6)
    assert cache.since.facts().since_s == 1_001
    cache.run(1_006, 4)
    assert cache.since.facts().since_s == 1_002


def test_blocks_belong_to_the_request_that_used_them_last(cache: Cache) -> None:
    manual = cache.run(1_001, 8)[:6]
    cache.run(1_002, 10)
    cache.run(1_003, 1, manual)
    cache.run(1_004, 3)
    assert cache.since.facts().since_s == 1_001, "what no other request has used of it"
    cache.run(1_005, 10)
    assert cache.since.facts().since_s == 1_002
    cache.run(1_006, 5)
    assert cache.since.facts().since_s == 1_003


def test_blocks_in_use_are_not_lost_however_old_their_request(cache: Cache) -> None:
    old = cache.begin(1_001, 10)
    for second in range(2, 9):
        cache.run(1_000 + second, 5)
    assert cache.since.facts().since_s == 1_006
    cache.end(old)
    cache.run(1_009, 10)
    assert cache.since.facts().since_s == 1_008, "a time is never taken back"


def test_blocks_that_a_running_request_is_given_are_its_own(cache: Cache) -> None:
    cache.run(1_001, 8)
    blocks = cache.begin(1_002, 2)
    cache.end([*blocks, *cache.go_on(1_002, 8)])
    cache.run(1_003, 2)
    cache.run(1_004, 8)
    assert cache.since.facts().since_s == 1_001
    cache.run(1_005, 3)
    assert cache.since.facts().since_s == 1_001, "7 of 10 are left"
    cache.run(1_006, 1)
    assert cache.since.facts().since_s == 1_002


def test_memory_of_the_record_is_bounded_by_the_blocks(cache: Cache) -> None:
    shared = cache.run(1_001, 4)
    for second in range(2, 500):
        shared = cache.run(1_000 + second, 1 + second % 3, shared[:4])
    kept: Any = cache.block_pool.metrics_collector
    assert len(kept._owners) <= ROOM
    assert sum(held for held, _ in kept._counts.values()) == len(kept._owners)
    assert all(held for held, _ in kept._counts.values())


def test_reset_cache_and_a_cache_that_is_off_hold_nothing(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.run(1_001, 10)
    monkeypatch.setattr(kept_blocks, "time", SimpleNamespace(time=lambda: BEGAN_S + 50))
    assert cache.block_pool.reset_prefix_cache()
    assert cache.since.facts().since_s == BEGAN_S + 50
    since = KeptSince()
    off = SimpleNamespace(kv_cache_manager=SimpleNamespace(enable_caching=False))
    watch_blocks(off, since)
    assert since.facts().since_s == math.inf


def test_slab_keeps_what_the_device_has_lost(cache: Cache) -> None:
    cache.since.lost_in_slab(0.0)
    for second in range(1, 6):
        cache.run(1_000 + second, 10)
    assert cache.since.facts().since_s == 0.0
    cache.since.lost_in_slab(1_001.5)
    assert cache.since.facts().since_s == 1_001.5
    cache.since.lost_in_slab(math.inf)
    assert cache.since.facts().since_s == 1_003


def test_tenants_at_their_caps_have_times_of_their_own_as_many_as_are_told() -> None:
    since = KeptSince()
    since.lost_in_slab(5.0)
    assert since.facts().capped_since_s == {}
    names = [number.to_bytes(16) for number in range(TENANTS_TOLD + 1)]
    for number, name in enumerate(names, start=1):
        since.lost_by_cap(name, float(number))
    since.lost_by_cap(names[0], 99.0)
    told = since.facts()
    assert told.since_s == 5.0 < told.device_since_s
    assert told.capped_since_s[names[0].hex()] == 99.0, "the default tenant, whose digest is zeros"
    assert list(told.capped_since_s) == [name.hex() for name in names[:-1]]


def test_metrics_that_a_person_has_configured_go_on() -> None:
    beside = KVCacheMetricsCollector(sample_rate=1.0)
    cache = Cache(beside)
    for second in range(1, 4):
        cache.run(1_000 + second, 10)
    cache.run(1_009, 1, cache.run(1_008, 2))
    assert len(beside.block_metrics) == ROOM
    assert len(beside.drain_events()) == 13
