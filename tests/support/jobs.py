"""Capabilities that answer what a test says, for jobs and batches without Ray."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, TypeVar

from arbiter.errors import RequestError
from deployments import messages
from deployments.config.schema import Table, parse_table
from deployments.front.inference.service import InferenceService
from deployments.jobs.batch_store import Batch, NewBatch
from deployments.jobs.file_store import NewFile
from deployments.jobs.service import JobsService
from tests.support.waits import eventually

T = TypeVar("T")
CHAT = "/v1/chat/completions"
WAIT_S = 60.0  # for what takes milliseconds, on a machine that others share


def table(**models: str) -> Table:
    """A capability `chat` with the models that are given, each from nowhere, and `speak`."""
    made = {name: {"source": "x"} for name in models or ("one", "two", "three")}
    chat = {"role": "text", "engine": "vllm", "models": made}
    speak = {"role": "tts", "engine": "kokoro", "models": {"voice": {"source": "x"}}}
    return parse_table({"capabilities": {"chat": chat, "speak": speak}})


class Capability:
    """Answers each call with what `say` makes of it; counts calls, those at once, and those that
    wait for the gate to open."""

    def __init__(self) -> None:
        self.calls: list[messages.InferenceCall] = []
        self.by_text: Counter[str] = Counter()
        self.at_once = self.most_at_once = self.at_gate = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.refusals: list[RequestError] = []  # raised by the next calls, in order
        self.memory: dict[str, asyncio.Event] = {}  # by models that wait for some until it is set
        self.stream: list[bytes] | None = None
        self.cancelled_count = 0

    def service(self, plain: Table | None = None) -> InferenceService:
        made = InferenceService(lambda name: self.send)
        made.configure(plain or table())
        return made

    def send(self, call: messages.InferenceCall) -> "_Response":
        self.calls.append(call)
        self.by_text[text_of(call)] += 1
        return _Response(self, call)

    async def pass_gate(self) -> None:
        self.at_gate += 1
        try:
            await self.gate.wait()
        finally:
            self.at_gate -= 1

    @property
    def order(self) -> list[str]:
        return [call.model for call in self.calls]


class _Response:
    def __init__(self, capability: Capability, call: messages.InferenceCall) -> None:
        self._capability, self._call = capability, call

    async def __aiter__(self) -> AsyncGenerator[messages.Part, None]:
        mine = self._capability
        mine.at_once += 1
        mine.most_at_once = max(mine.most_at_once, mine.at_once)
        try:
            if mine.refusals:
                raise mine.refusals.pop(0)
            if (granted := mine.memory.get(self._call.model)) is not None:
                if self._call.wants_progress:
                    yield messages.Progress("queued", 0, None)
                await granted.wait()
                if self._call.wants_progress:
                    yield messages.RUNNING
            if mine.stream is not None:
                yield messages.ResponseHead(200, {"content-type": "text/event-stream"}, True)
                for piece in mine.stream:
                    yield piece
                await mine.gate.wait()
                return
            await mine.pass_gate()
            usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
            body = {"said": text_of(self._call), "model": self._call.model, "usage": usage}
            head = messages.ResponseHead(200, {"content-type": "application/json"})
            yield messages.FullResponse(head, json.dumps(body).encode())
        finally:
            mine.at_once -= 1

    def cancel(self) -> None:
        self._capability.cancelled_count += 1


def text_of(call: messages.InferenceCall) -> str:
    return str(json.loads(call.body)["messages"][0]["content"])


def chat(text: str, model: str = "one") -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}]}


def jobs_service(folder: Path, capability: Capability, plain: Table | None = None) -> JobsService:
    """A process of jobs on the state file of a folder; it takes them from the one before."""
    inference = capability.service(plain)

    async def service() -> InferenceService:
        return inference

    made = JobsService(folder / "arbiter.sqlite", service)
    made.start()
    return made


async def ended(service: JobsService, batch_id: str = "batch_a") -> Batch:
    """The batch of tenant `t` in its last state."""

    async def look() -> Batch | None:
        batch = await service.batch("t", batch_id)
        return batch if batch.state in ("completed", "failed", "expired", "cancelled") else None

    found: Batch | None = await eventually(look)
    assert found is not None
    return found


def line(custom_id: str, model: str = "one", **fields: Any) -> dict[str, Any]:
    body = chat(custom_id, model) | fields
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


async def upload(
    service: JobsService, lines: list[Any], file_id: str = "file-in", purpose: str = "batch"
) -> None:
    text = [one if isinstance(one, str) else json.dumps(one) for one in lines]
    raw = "\n".join(text).encode()
    await service.begin_file(NewFile(file_id, "t", "in.jsonl", purpose, len(raw)))
    half = len(raw) // 2
    await service.append_file(file_id, 0, raw[:half])
    await service.append_file(file_id, half, raw[half:])
    await service.append_file(file_id, half, raw[half:])  # the answer to the first was lost
    assert (await service.finish_file(file_id)).bytes == len(raw)


async def begin(
    service: JobsService, lines: list[Any], batch_id: str = "batch_a", window_s: float = 3_600.0
) -> Batch:
    input_file = f"file-{batch_id}"
    await upload(service, lines, input_file)
    names = f"file-{batch_id}-out", f"file-{batch_id}-err"
    new = NewBatch(batch_id, "t", CHAT, input_file, "1h", window_s, *names)
    return await service.create_batch(new)


async def results(service: JobsService, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    raw = b""
    while piece := await service.file_content("t", file_id, len(raw)):
        raw += piece
    return [json.loads(one) for one in raw.splitlines()]
