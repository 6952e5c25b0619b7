"""What the frontend asks of its core for adapters, and how it counts requests by tier (F3, F4)."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from deployments.engines.vllm.adapters.adapter_images import COLD, HOT, WARM
from deployments.engines.vllm.adapters.adapter_mover import AdapterMover
from deployments.engines.vllm.adapters.adapter_tiers import HOT_USES
from deployments.engines.vllm.batching.batch_gate import BatchGate

NAMES = {letter: letter * 32 for letter in "abcdef"}


def lora(letter: str) -> LoRARequest:
    name = NAMES[letter]
    return LoRARequest(name, ord(letter), f"/store/{name}")


class Core:
    """The calls that a mover makes, and what a core with two slots answers. It stands in vLLM's
    place, and in that of its client."""

    def __init__(self) -> None:
        self.engine_core = self
        self.begun: list[str] = []
        self.calls: list[tuple[str, str]] = []
        self.kept: list[list[int]] = []
        self.slots: list[str] = []
        self.warm: set[str] = set()
        self.bad: set[str] = set()
        self.forgotten: set[str] = set()
        self.owners: dict[str, str] = {}  # as each was told last

    async def call_utility_async(self, method: str, *given: Any) -> Any:
        self.begun.append(method)
        await asyncio.sleep(0)
        if method == "adapter_tiers":
            warm, forgotten = ([NAMES[c] for c in of] for of in (self.warm, self.forgotten))
            return {"hot": [ord(c) for c in self.slots], "warm": warm, "forgotten": forgotten}
        if method == "keep_adapters":
            return self.kept.append(given[0])
        letter = given[0].lora_name[0]
        self.owners[letter] = given[1]
        self.calls.append((method, letter))
        if letter in self.bad:
            raise RuntimeError("a bad adapter")
        tier = HOT if letter in self.slots else WARM if letter in self.warm else COLD
        self.warm.add(letter)
        if method == "bring_adapter" and letter not in self.slots:
            self.slots = [*self.slots[-1:], letter]
        return tier

    @property
    def staged(self) -> list[str]:
        return [letter for method, letter in self.calls if method == "stage_adapter"]


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def of_mover(test: Callable[[AdapterMover, Core, BatchGate], Awaitable[None]]) -> Core:
    async def run() -> Core:
        gate, core = BatchGate(2, 32, 30.0), Core()
        mover = AdapterMover(gate, Clock())
        mover.llm = core  # type: ignore[assignment]
        await test(mover, core, gate)
        return core

    return asyncio.run(run())


async def use(mover: AdapterMover, letter: str, times: int = 1) -> None:
    mover.used(lora(letter), await mover.bring(lora(letter)))
    for _ in range(times - 1):
        mover.used(lora(letter), HOT)


async def settled(mover: AdapterMover) -> None:
    assert mover._stager is not None
    await mover._stager


@pytest.mark.spec("F4")
def test_request_that_waits_has_its_image_made_meanwhile_and_still_counts_as_cold() -> None:
    async def test(mover: AdapterMover, core: Core, gate: BatchGate) -> None:
        mover.ahead(lora("a"))
        await settled(mover)
        assert core.staged == ["a"]
        mover.ahead(lora("a"))
        await use(mover, "a")
        assert (mover.requests_by_tier, mover.staged) == ({COLD: 1}, 1)
        await use(mover, "b")
        await use(mover, "c")
        await use(mover, "a")
        assert mover.requests_by_tier == {COLD: 3, WARM: 1}
        assert core.staged == ["a"], "it has its image"

    of_mover(test)


def test_request_that_enters_while_its_image_is_made_counts_as_cold() -> None:
    async def test(mover: AdapterMover, core: Core, gate: BatchGate) -> None:
        mover.ahead(lora("a"))
        while not core.begun:
            await asyncio.sleep(0)
        assert core.staged == []
        await use(mover, "a")
        assert (core.staged, mover.requests_by_tier) == (["a"], {COLD: 1})

    of_mover(test)


def test_request_that_enters_at_once_has_nothing_made_ahead() -> None:
    async def test(mover: AdapterMover, core: Core, gate: BatchGate) -> None:
        mover.ahead(lora("a"))
        gate.running[NAMES["a"]] = 1  # as `enter` does before it gives up its turn
        await settled(mover)
        assert core.calls == []

    of_mover(test)


def test_bad_adapter_that_waits_stops_none_of_the_others() -> None:
    async def test(mover: AdapterMover, core: Core, gate: BatchGate) -> None:
        core.bad = {"a"}
        mover.ahead(lora("a"))
        mover.ahead(lora("b"))
        await settled(mover)
        assert core.staged == ["a", "b"]
        with pytest.raises(RuntimeError, match="bad"):
            await mover.bring(lora("a"))

    of_mover(test)


@pytest.mark.spec("E6")
def test_core_is_told_whose_adapter_it_brings_and_a_removed_tenants_are_not_brought_back() -> None:
    async def test(mover: AdapterMover, core: Core, gate: BatchGate) -> None:
        mover.owners[NAMES["a"]] = "acme"
        mover.ahead(lora("a"))
        await settled(mover)
        assert core.owners == {"a": "acme"}
        await use(mover, "a", HOT_USES + 1)
        await use(mover, "b")
        assert core.owners == {"a": "acme", "b": ""}
        core.warm, core.slots, core.calls, core.forgotten = set(), [], [], {"a"}
        await mover.rebalance()
        assert core.calls == [("stage_adapter", "b")]

    of_mover(test)


@pytest.mark.spec("E6", "F8")
def test_removed_tenants_adapter_keeps_its_slot_while_a_request_runs_with_it() -> None:
    async def test(mover: AdapterMover, core: Core, gate: BatchGate) -> None:
        mover.owners[NAMES["a"]] = "acme"
        gate.running[NAMES["a"]] = 1
        await use(mover, "a")
        await use(mover, "b", HOT_USES)
        assert mover.forget_tenant("acme") == {NAMES["a"]}
        await mover.rebalance()
        assert core.kept[-1] == [ord("b"), ord("a")]
        del gate.running[NAMES["a"]]
        mover.forget_adapter(NAMES["a"])
        await mover.rebalance()
        assert core.kept[-1] == [ord("b")]

    of_mover(test)


@pytest.mark.spec("F3")
def test_turn_gives_busy_adapters_their_slots_back_and_keeps_their_images() -> None:
    async def test(mover: AdapterMover, core: Core, gate: BatchGate) -> None:
        for letter, times in {"a": HOT_USES + 1, "b": HOT_USES, "c": 2, "d": 1}.items():
            await use(mover, letter, times)
        core.warm -= {"c"}
        core.slots, core.calls = ["d"], []
        mover._clock.now_s = 2.0  # type: ignore[attr-defined]
        await mover.rebalance()
        assert core.calls == [
            ("bring_adapter", "a"),
            ("bring_adapter", "b"),
            ("stage_adapter", "c"),
        ]
        assert core.kept == [[ord("b"), ord("a")]]
        assert mover.tier(NAMES["a"]) == HOT
        mover.forget()
        core.calls.clear()
        await mover.rebalance()
        assert core.calls == [], "asleep, it brings nothing"

    of_mover(test)


@pytest.mark.spec("E7", "F3")
def test_facts_say_how_many_requests_needed_no_file_and_which_adapters_are_used_most() -> None:
    async def test(mover: AdapterMover, core: Core, gate: BatchGate) -> None:
        assert mover.facts({}, [])["hit_rate"] is None
        for letter, times in {"a": 5, "b": 2, "c": 1}.items():
            await use(mover, letter, times)
        await mover.look()
        facts = mover.facts({NAMES["a"]: "tiny:law"}, [f"tiny:{n}" for n in range(9)])
        assert facts["adapters"] == {HOT: 2, WARM: 1, COLD: 6}
        assert facts["requests"] == {HOT: 5, WARM: 0, COLD: 3}
        assert facts["hit_rate"] == 5 / 8
        assert facts["top"][0] == {"adapter": "tiny:law", "tier": WARM, "uses": 5}

    of_mover(test)
