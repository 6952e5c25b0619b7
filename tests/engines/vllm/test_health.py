"""When a vLLM engine says that it cannot serve, with a core that a test holds."""

import asyncio
from argparse import Namespace
from types import SimpleNamespace

import pytest

from deployments.engines.vllm.batching.batch_gate import BatchGate
from deployments.engines.vllm.engine import VllmEngine
from deployments.engines.vllm.engine_core.core_watch import CoreWatch


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


@pytest.mark.spec("H9")
async def test_engine_whose_core_has_hung_over_a_request_is_unhealthy() -> None:
    now_s = 0.0
    core = SimpleNamespace()
    engine = VllmEngine(Namespace(), core, core, BatchGate(0, 4), can_sleep=False)  # type: ignore[arg-type]
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
