"""Since when an engine has kept the KV of its requests, so that the router knows what it lost (G3).

vLLM's prefix cache evicts the least recently used block first, so one time says what it holds: the
arrival of the latest request whose blocks are lost. Of what came before it nothing counts as held,
and of what came after it all does. A slab keeps what the device evicts; then what counts is the
earlier of the two times. What left a slab for its tenant's cap says nothing of other rows as old,
so each such tenant has a time of its own; what leaves by its term is told by no time, because the
router knows the terms.
"""

import math
import mmap
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from arbiter.pool.layout import TENANT_BYTES
from deployments.routing.pieces import KeptKv
from deployments.routing.rank import HELD_SHARE

_DEVICE, _SLAB, _TENANTS = 0, 1, 2
# Tenants at their caps that can be reported. Rows that further tenants lose by their caps still
# count as held.
TENANTS_TOLD = 64


class KeptSince:
    """Times in memory that a frontend shares with the core it forks, which may be in a step when it
    is asked. In wall-clock seconds, because processes of other nodes compare them."""

    def __init__(self) -> None:
        end = (_TENANTS + TENANTS_TOLD) * 8
        memory = memoryview(mmap.mmap(-1, end + TENANTS_TOLD * TENANT_BYTES))
        self._times, self._names = memory[:end].cast("d"), memory[end:]
        self._places: dict[bytes, int] = {}  # of tenants, in the core
        self.lost_on_device(time.time())
        self.lost_in_slab(math.inf)

    def lost_on_device(self, arrived_s: float) -> None:
        """The device has lost the blocks of requests up to this time; inf: it keeps none."""
        self._times[_DEVICE] = arrived_s

    def lost_in_slab(self, used_s: float) -> None:
        """A slab has lost the rows that were used up to this time; inf: there is no slab."""
        self._times[_SLAB] = used_s

    def lost_by_cap(self, tenant: bytes, used_s: float) -> None:
        """A slab has lost the rows of a tenant, by its digest, that were used up to this time."""
        place = self._places.setdefault(tenant, len(self._places))
        if place < TENANTS_TOLD:
            self._names[place * TENANT_BYTES : (place + 1) * TENANT_BYTES] = tenant
            # The time is written after the name, because a name without a time is not reported.
            self._times[_TENANTS + place] = used_s

    def facts(self) -> KeptKv:
        device_s, slab_s = self._times[_DEVICE], self._times[_SLAB]
        names = (
            bytes(self._names[at : at + TENANT_BYTES]).hex()
            for at in range(0, len(self._names), TENANT_BYTES)
        )
        capped_s = {name: s for name, s in zip(names, self._times[_TENANTS:], strict=True) if s}
        return KeptKv(min(device_s, slab_s), device_s, capped_s)


class KeptBlocks:
    """Takes the place of the metrics collector of vLLM's block pool, because the pool calls it for
    each block, and passes every call on to the collector that was there.

    A block belongs to the request that used it last, by the arrival of that. A request counts as
    lost once less than HELD_SHARE of its blocks are left, because the router asks for no more.
    The pool does not say for which request it gives a block, but each step says what its requests
    were given."""

    def __init__(self, since: KeptSince, beside: KVCacheMetricsCollector | None = None) -> None:
        self._since, self._beside = since, beside
        self._owners: dict[int, float] = {}  # by block, the arrival of its request
        self._counts: dict[float, list[int]] = {}  # by arrival, the blocks held and those lost
        self._lost_s = 0.0

    def note(self, step: SchedulerOutput, requests: Mapping[str, Request]) -> None:
        """Notes what requests were given since the last step."""
        for new in step.scheduled_new_reqs:
            self._use(new.block_ids, requests[new.req_id].arrival_time)
        cached = step.scheduled_cached_reqs
        for req_id, groups in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if groups:
                self._use(groups, requests[req_id].arrival_time)

    def on_block_allocated(self, block: KVCacheBlock) -> None:
        if self._beside is not None:
            self._beside.on_block_allocated(block)

    def on_block_accessed(self, block: KVCacheBlock) -> None:
        if self._beside is not None:
            self._beside.on_block_accessed(block)

    def on_block_evicted(self, block: KVCacheBlock) -> None:
        """vLLM calls this for each block that it takes into use, also where that held nothing."""
        arrived_s = self._leave(block.block_id)
        if arrived_s is not None and block.block_hash is not None:
            self._lose(arrived_s)
        if self._beside is not None:
            self._beside.on_block_evicted(block)

    def reset(self) -> None:
        """All blocks have lost what they held, as in a sleep."""
        self._owners.clear()
        self._counts.clear()
        self._lost_s = time.time()
        self._since.lost_on_device(self._lost_s)
        if self._beside is not None:
            self._beside.reset()

    def _use(self, groups: Iterable[Iterable[int]], arrived_s: float) -> None:
        owners = self._owners
        for block in chain.from_iterable(groups):
            if not block or owners.get(block) == arrived_s:
                continue  # 0 is vLLM's block of nothing, which is in no use
            self._leave(block)
            owners[block] = arrived_s
            self._counts.setdefault(arrived_s, [0, 0])[0] += 1

    def _leave(self, block: int) -> float | None:
        """The block belongs to no request now. Returns the arrival of its request."""
        arrived_s = self._owners.pop(block, None)
        if arrived_s is not None:
            self._counts[arrived_s][0] -= 1
            if not self._counts[arrived_s][0]:
                del self._counts[arrived_s]
        return arrived_s

    def _lose(self, arrived_s: float) -> None:
        counts = self._counts.get(arrived_s, [0, 0])  # absent: the request has no block left
        counts[1] += 1
        held, lost = counts
        if held < HELD_SHARE * (held + lost) and arrived_s > self._lost_s:
            self._lost_s = arrived_s
            self._since.lost_on_device(arrived_s)


def watch_blocks(scheduler: Any, since: KeptSince) -> None:
    """Has the scheduler's prefix cache, where it has one, tell of what it loses."""
    manager = scheduler.kv_cache_manager
    if not manager.enable_caching:
        return since.lost_on_device(math.inf)
    pool = manager.block_pool
    pool.metrics_collector = kept = KeptBlocks(since, pool.metrics_collector)
    schedule: Callable[..., SchedulerOutput] = scheduler.schedule

    def noted(*args: Any, **kwargs: Any) -> SchedulerOutput:
        step = schedule(*args, **kwargs)
        kept.note(step, scheduler.requests)
        return step

    scheduler.schedule = noted
