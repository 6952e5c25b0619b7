"""Brings adapters to where they are needed: asks the engine's core for what `adapter_tiers` says.

A request that must wait for a slot has the image of its adapter made meanwhile, and once a minute
busy adapters get slots and used ones images. Counts in which tier each request found its adapter.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from math import inf
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from deployments.engines.vllm.adapters.adapter_images import COLD, HOT, WARM
from deployments.engines.vllm.adapters.adapter_tiers import RecentUses, View, kept, moves
from deployments.engines.vllm.batching.batch_admission import BASE
from deployments.engines.vllm.batching.batch_gate import BatchGate

COUNTS_S = REPORT_S = 1.0
# Adapters of waiting requests whose images are to be made. An image takes at least 3 ms of the
# engine's time, so images beyond this number would not be made before their requests enter.
MOST_AHEAD = 256
MOST_SHOWN = 20  # of the most used adapters, in the facts

_Move = Callable[[LoRARequest], Coroutine[Any, Any, str | None]]


class AdapterMover:
    """The adapters of one engine by tier. `clock`: monotonic seconds."""

    def __init__(self, gate: BatchGate, clock: Callable[[], float] = time.monotonic) -> None:
        self._gate, self._clock = gate, clock
        self.llm: AsyncLLM | None = None
        self._uses = RecentUses()
        self._counted: dict[str, int] = {}
        self._counted_s = -inf
        self._adapters: dict[str, LoRARequest] = {}  # of requests so far, by digest
        self.owners: dict[str, str] = {}  # of adapters of one tenant, by digest
        # Digests of the adapters in slots, and of those with an image, by the core's last report.
        self._hot: frozenset[str] = frozenset()
        self._warm: set[str] = set()
        self._wanted: dict[str, LoRARequest] = {}  # by digest: their images are to be made
        self._stager: asyncio.Task[None] | None = None
        self._read_ahead: set[str] = set()  # digests whose files were read for a waiting request
        self.requests_by_tier: Counter[str] = Counter()  # by the tier of their adapter
        self._reported: Counter[str] = Counter()  # of `requests_by_tier`
        self._report: asyncio.Task[None] | None = None
        self._moving = asyncio.Lock()
        self._sleeps = 0  # a pass of `rebalance` ends when this count has changed since its begin
        # Requests whose adapter was cold when they came, and had its image when they entered.
        self.staged = 0

    # -- by request ------------------------------------------------------------------------------

    def ahead(self, lora: LoRARequest) -> None:
        """Begins to make the image of an adapter while its request waits. Does nothing for an
        adapter that runs or has an image, because its request needs no file."""
        name = lora.lora_name
        is_there = name in self._gate.running or name in self._warm
        if is_there or len(self._wanted) >= MOST_AHEAD:
            return
        self._wanted[name] = lora
        if self._stager is None or self._stager.done():
            self._stager = asyncio.ensure_future(self._stage_wanted())

    async def _stage_wanted(self) -> None:
        """Makes the images of `_wanted`, one after the other. Runs as a task, so that the request
        which asked has had its chance to enter first."""
        while self._wanted:
            name = next(iter(self._wanted))
            lora = self._wanted.pop(name)
            if name not in self._gate.running:
                async with self._moving:
                    await self._attempt(self._stage, lora)

    async def bring(self, lora: LoRARequest) -> str:
        """Returns with the adapter in a slot, and says in which tier its request found it. Raises
        what vLLM raises for a bad adapter."""
        name = lora.lora_name
        self._wanted.pop(name, None)
        self._adapters[name] = lora
        tier = await self._bring(lora)
        if name in self._read_ahead:
            self._read_ahead.discard(name)
            self.staged += 1
            return COLD
        return tier

    async def _bring(self, lora: LoRARequest) -> str:
        tier: str = await self._call("bring_adapter", lora, self._owner(lora), self._kept())
        self._warm.add(lora.lora_name)
        return tier

    async def _stage(self, lora: LoRARequest) -> str | None:
        """Makes the image of an adapter. Returns the tier in which it was; None where the engine
        keeps no images."""
        tier: str | None = await self._call("stage_adapter", lora, self._owner(lora))
        if tier is not None:
            self._warm.add(lora.lora_name)
        if tier == COLD:
            self._read_ahead.add(lora.lora_name)
        return tier

    def _owner(self, lora: LoRARequest) -> str:
        """Returns the tenant of an adapter; empty for an adapter of all tenants."""
        return self.owners.get(lora.lora_name, "")

    async def _attempt(self, move: _Move, lora: LoRARequest) -> None:
        """Moves an adapter. An error is dropped: where the adapter is bad or gone by now, its next
        request gets the error itself."""
        task = asyncio.ensure_future(move(lora))
        await asyncio.wait({task})
        task.exception()  # asyncio logs an exception that is never read

    async def _call(self, method: str, *args: Any) -> Any:
        assert self.llm is not None
        return await self.llm.engine_core.call_utility_async(method, *args)

    def _kept(self) -> list[int]:
        names = kept(self._fixed(), self._counts())
        return [self._adapters[name].lora_int_id for name in names if name in self._adapters]

    def used(self, lora: LoRARequest, tier: str) -> None:
        """Counts a request."""
        self.requests_by_tier[tier] += 1
        self._uses.note(lora.lora_name, self._clock())
        if self._report is None or self._report.done():
            self._report = asyncio.ensure_future(self._report_soon())

    async def _report_soon(self) -> None:
        """Has the counts noted in the slab, where the arbiter sees them; not for each request."""
        await asyncio.sleep(REPORT_S)
        await self.report()

    async def report(self) -> None:
        counts = [self.requests_by_tier[tier] - self._reported[tier] for tier in (HOT, WARM, COLD)]
        self._reported = self.requests_by_tier.copy()
        await self._call("count_adapters", *counts)

    # -- rebalancing -----------------------------------------------------------------------------

    async def run(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            await self.rebalance()

    async def rebalance(self) -> None:
        """Notes which adapters should keep their tiers, and brings what is used."""
        sleeps = self._sleeps
        await self._call("keep_adapters", self._kept())
        await self.look()
        tier_moves = moves(self._view())
        for move, names in ((self._bring, tier_moves.promote), (self._stage, tier_moves.stage)):
            for name in names:
                has_room = move != self._bring or len(self._fixed() | {name}) <= self._gate.slots
                if name not in self._adapters or not has_room:
                    continue  # requests that entered meanwhile have the slots
                async with self._moving:
                    if self._sleeps != sleeps:
                        return
                    await self._attempt(move, self._adapters[name])
                self._read_ahead.discard(name)  # no request waited for this one
        await self.look()

    async def look(self) -> None:
        """Asks the core what is where."""
        tiers = await self._call("adapter_tiers")
        names = {lora.lora_int_id: name for name, lora in self._adapters.items()}
        self._hot = frozenset(names[number] for number in tiers["hot"] if number in names)
        self._warm = set(tiers["warm"])
        for name in tiers["forgotten"]:
            self._uses.forget(name)
            self._counted_s = -inf

    def _view(self) -> View:
        places = self._hot, frozenset(self._warm), self._fixed()
        return View(self._gate.slots, *places, self._counts())

    def _fixed(self) -> frozenset[str]:
        """Adapters that run or are pinned."""
        return (frozenset(self._gate.running) | self._gate.pinned) - {BASE}

    def _counts(self) -> dict[str, int]:
        """Counts the uses of the last minute, at most COUNTS_S old: counting takes 0.3 ms with
        1,000 adapters."""
        now_s = self._clock()
        if now_s - self._counted_s >= COUNTS_S:
            self._counted, self._counted_s = self._uses.counts(now_s), now_s
        return self._counted

    async def forget(self) -> None:
        """Called before a sleep: returns once no adapter is on its way to a slot. None is brought
        until a request asks for it."""
        self._sleeps += 1
        async with self._moving:
            self._wanted.clear()
        self._uses.clear()
        self._counted_s = -inf
        self._hot = frozenset()

    def forget_tenant(self, tenant: str) -> set[str]:
        """Brings none of its own adapters again without a request. Returns their digests, each of
        which `forget_adapter` takes once no request runs with it."""
        own = {name for name, owner in self.owners.items() if owner == tenant}
        for name in own:
            del self.owners[name]
            self._wanted.pop(name, None)
            self._uses.forget(name)
        self._counted_s = -inf
        return own

    def forget_adapter(self, digest: str) -> None:
        """Lets the core take its slot for another. Until then the core is to keep it: vLLM would
        read the files of an adapter that runs without a slot in the midst of a step, and they are
        gone with their tenant, which ends the engine for all."""
        self._adapters.pop(digest, None)

    # -- what is shown ---------------------------------------------------------------------------

    def facts(self, names: dict[str, str], catalogue: Iterable[str]) -> dict[str, Any]:
        """Adapters by tier, as of the last look, and the share of requests that needed no file.
        `names`: by digest; `catalogue`: all that could be asked for."""
        warm = self._warm - self._hot
        cold = max(0, len(set(catalogue)) - len(self._hot | warm))
        total = self.requests_by_tier.total()
        hits = (self.requests_by_tier[HOT] + self.requests_by_tier[WARM]) / total if total else None
        most = list(self._uses.counts(self._clock()).items())[: -MOST_SHOWN - 1 : -1]
        return {
            "adapters": {HOT: len(self._hot), WARM: len(warm), COLD: cold},
            "requests": {tier: self.requests_by_tier[tier] for tier in (HOT, WARM, COLD)},
            "staged_ahead": self.staged,
            "hit_rate": hits,
            "top": [{"adapter": names.get(d, d), "tier": self.tier(d), "uses": n} for d, n in most],
        }

    @property
    def hot(self) -> frozenset[str]:
        """The digests of the adapters in slots, as of the last look."""
        return self._hot

    def tier(self, digest: str) -> str:
        """The tier of an adapter, as of the last look."""
        return HOT if digest in self._hot else WARM if digest in self._warm else COLD
