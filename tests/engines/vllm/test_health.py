"""When a vLLM engine says that it cannot serve, with a core that a test holds."""

import asyncio
import threading
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.engines.one_thread import OneThread
from deployments.engines.vllm.adapters.adapter_service import AdapterService
from deployments.engines.vllm.batching.batch_gate import BatchGate
from deployments.engines.vllm.engine import VllmEngine
from deployments.engines.vllm.engine_core.core_watch import CoreWatch
from deployments.engines.vllm.pictures import picture_identity
from deployments.engines.vllm.pictures.picture_identity import Pictures


class Llm:
    """A frontend that lives, before a core that answers nothing."""

    def __init__(self) -> None:
        self.engine_core = self.output_processor = self
        self.requests_count = 0
        self.asked: list[str] = []

    async def check_health(self) -> None: ...

    def has_unfinished_requests(self) -> bool:
        return self.requests_count > 0

    async def call_utility_async(self, method: str) -> None:
        self.asked.append(method)
        await asyncio.Event().wait()


def made() -> VllmEngine:
    core = SimpleNamespace()
    engine = VllmEngine(Namespace(), core, core, BatchGate(0, 4), can_sleep=False)  # type: ignore[arg-type]
    engine.llm = Llm()  # type: ignore[assignment]
    return engine


@pytest.mark.spec("H9", "H3")
async def test_engine_whose_thread_hangs_over_a_sound_is_unhealthy() -> None:
    engine, began, ends = made(), threading.Event(), threading.Event()
    worker = OneThread("hear", most_s=0.0)
    engine.hearing = SimpleNamespace(worker=worker)  # type: ignore[assignment]
    await engine.health()

    def hang() -> None:
        began.set()
        ends.wait(60)

    step = asyncio.create_task(worker.run(hang))
    try:
        assert await asyncio.to_thread(began.wait, 60)
        with pytest.raises(RuntimeError, match="one step of the model has run for more than 0 s"):
            await engine.health()
    finally:
        ends.set()
        await step
    await engine.health()


@pytest.mark.spec("H9")
async def test_engine_whose_core_has_hung_over_a_request_is_unhealthy() -> None:
    now_s = 0.0
    engine = made()
    engine.llm = llm = Llm()  # type: ignore[assignment]
    engine.watch = CoreWatch(engine._ask_core, 300.0, lambda: now_s)
    await engine.health()
    await asyncio.sleep(0)
    assert llm.asked == [], "an idle core is let alone"
    llm.requests_count = 1
    await engine.health()
    await asyncio.sleep(0)
    assert llm.asked == ["hold_trace"]
    now_s = 301.0
    with pytest.raises(RuntimeError, match="has not gone on for 301 s"):
        await engine.health()


class FailingLlm(Llm):
    """A frontend that lives, before a core that answers every call with an error."""

    async def call_utility_async(self, method: str, *args: Any) -> None:
        raise ValueError(f"{method} failed")


def without_core(adapters: AdapterService | None = None) -> VllmEngine:
    core, gate = SimpleNamespace(), BatchGate(0, 4)
    engine = VllmEngine(Namespace(), core, core, gate, can_sleep=False, adapters=adapters)  # type: ignore[arg-type]
    engine.llm = FailingLlm()  # type: ignore[assignment]
    return engine


@pytest.mark.spec("H9", "H8")
@pytest.mark.parametrize("has_cache", [True, False])
async def test_engine_whose_pictures_expire_no_more_is_unhealthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_cache: bool
) -> None:
    monkeypatch.setattr(picture_identity, "TICK_S", 0.0)
    engine = without_core()
    engine.llm.model_config = SimpleNamespace(model=str(tmp_path))  # type: ignore[union-attr, assignment]
    pictures = Pictures(engine.llm, "m", has_cache=has_cache)  # type: ignore[arg-type]
    engine.expiring = asyncio.ensure_future(pictures.expire())
    await engine.health()
    await asyncio.wait({engine.expiring})
    if not has_cache:
        return await engine.health()  # there is nothing that would expire
    with pytest.raises(RuntimeError, match=r"task of the frontend failed.*expire_pictures failed"):
        await engine.health()


@pytest.mark.spec("H9", "F3")
async def test_engine_whose_adapters_change_their_tiers_no_more_is_unhealthy(
    tmp_path: Path,
) -> None:
    section = {"folder": str(tmp_path / "none"), "store": str(tmp_path), "max_rank": 8}
    given = {"model": "tiny", "adapters": section | {"rebalance_s": 0}}
    service = AdapterService(given, BatchGate(4, 32))
    engine = without_core(service)
    await engine.health()
    models = SimpleNamespace(lora_requests={}, model_name=lambda lora=None: "")
    service.adopt(engine.llm, SimpleNamespace(openai_serving_models=models))  # type: ignore[arg-type]
    await engine.health()
    assert service.rebalancing is not None
    await asyncio.wait({service.rebalancing})
    with pytest.raises(RuntimeError, match=r"task of the frontend failed.*keep_adapters failed"):
        await engine.health()
