"""When a request leaves its place in the batch, with vLLM's own collector of an answer's parts."""

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector

from deployments.engines.vllm.adapters.adapter_service import AdmittingLLM
from deployments.engines.vllm.batching.batch_gate import BatchGate

DELTA = SamplingParams(output_kind=RequestOutputKind.DELTA)
PROMPT = {"prompt_token_ids": [1, 2]}


def output(text: str, reason: str | None = None) -> RequestOutput:
    choice = CompletionOutput(0, text, [1], None, None, finish_reason=reason)
    return RequestOutput("r", "p", [1, 2], None, [choice], finished=reason is not None)


@pytest.fixture
def collectors(monkeypatch: pytest.MonkeyPatch) -> list[RequestOutputCollector]:
    """Those of the requests so far; there is no core, and the tests put what it would."""
    made: list[RequestOutputCollector] = []

    async def add_request(*_: Any, **__: Any) -> RequestOutputCollector:
        made.append(RequestOutputCollector(RequestOutputKind.DELTA, "r"))
        made[-1].put(output("a"))
        return made[-1]

    async def abort(*_: Any, **__: Any) -> None: ...

    monkeypatch.setattr(AsyncLLM, "add_request", add_request)
    monkeypatch.setattr(AsyncLLM, "abort", abort)
    return made


def admitting() -> Any:
    llm: Any = object.__new__(AdmittingLLM)
    llm.gate, llm.served_name, llm.log_requests = BatchGate(0, 1), "m", False
    return llm


@pytest.mark.spec("F4")
async def test_place_is_left_once_the_core_has_ended_although_nothing_more_is_read(
    collectors: list[RequestOutputCollector],
) -> None:
    llm = admitting()
    async with (
        asyncio.timeout(60),
        aclosing(llm.generate(PROMPT, DELTA, "r")) as stuck,
        aclosing(llm.generate(PROMPT, DELTA, "r2")) as other,
    ):
        assert (await anext(stuck)).outputs[0].text == "a"
        collectors[0].put(output("b"))
        assert llm.gate.running.total() == 1
        collectors[0].put(output("c", "stop"))
        await asyncio.sleep(0)
        assert not llm.gate.running
        assert (await anext(other)).outputs[0].text == "a" and llm.gate.running.total() == 1
        assert [part.outputs[0].text async for part in stuck] == ["bc"]
        assert llm.gate.running.total() == 1, "its place is the other's now"
        collectors[1].put(output("d", "stop"))
        await asyncio.sleep(0)
        assert not llm.gate.running
