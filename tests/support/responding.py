"""A capability that answers `/v1/responses` as vLLM does, speech as bytes and anything else with
what came, and the front's application over it with jobs, all in one process."""

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from deployments import messages
from deployments.front import application
from deployments.front.access import keys
from deployments.front.access.auth import Authenticator
from deployments.front.access.keys import Keyring, Scope
from deployments.front.dependencies import FrontState
from deployments.front.inference.service import InferenceService
from deployments.jobs.client import JobsClient
from deployments.jobs.errors import StorageFailed
from deployments.jobs.service import JobsService
from deployments.jobs.store import Job
from tests.support.jobs import WAIT_S, table

JSON = {"content-type": "application/json"}
EVENTS = {"content-type": "text/event-stream"}
WORDS = ("the", " arbiter", " does")
SOUND = (b"RIFF", b"\x00\xff")


class Responder:
    """Counts what it is asked; `gate` holds back the end of every answer."""

    def __init__(self) -> None:
        self.calls: list[messages.InferenceCall] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.at_once = self.cancelled_count = 0
        self.broken_ends: list[bytes] = []  # of the next streams, instead of their last events

    def service(self) -> InferenceService:
        made = InferenceService(lambda name: self.send)
        made.configure(table())
        return made

    def send(self, call: messages.InferenceCall) -> "_Answer":
        self.calls.append(call)
        return _Answer(self, call)

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(call.body) for call in self.calls]


class _Answer:
    def __init__(self, responder: Responder, call: messages.InferenceCall) -> None:
        self._responder, self._call = responder, call

    async def __aiter__(self) -> AsyncGenerator[messages.Part, None]:
        self._responder.at_once += 1
        try:
            if self._call.wants_progress:
                yield messages.Progress("loading", 0, 2.5)
            async for part in self._parts():
                yield part
        finally:
            self._responder.at_once -= 1

    async def _parts(self) -> AsyncGenerator[messages.Part, None]:
        if self._call.path == "/v1/audio/speech":
            yield messages.ResponseHead(200, {"content-type": "audio/wav"}, True)
            for piece in SOUND:
                yield piece
            return
        asked = json.loads(self._call.body)
        is_response = self._call.path == "/v1/responses"
        if asked.get("stream"):
            yield messages.ResponseHead(200, EVENTS, True)
            for event in _events(asked):
                if event["type"] == "response.completed":
                    await self._responder.gate.wait()
                    if self._responder.broken_ends:
                        yield self._responder.broken_ends.pop(0)
                        return
                data = json.dumps(event, ensure_ascii=False)  # as engines write it
                yield f"event: {event['type']}\ndata: {data}\n\n".encode()
            return
        await self._responder.gate.wait()
        said = response(asked, "completed") if is_response else asked
        yield messages.FullResponse(messages.ResponseHead(200, JSON), json.dumps(said).encode())

    def cancel(self) -> None:
        self._responder.cancelled_count += 1


def _events(asked: dict[str, Any]) -> list[dict[str, Any]]:
    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0, "logprobs": []}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": response(asked, "in_progress")},
        {"type": "response.in_progress", "response": response(asked, "in_progress")},
        *({"type": "response.output_text.delta", "delta": word, **place} for word in WORDS),
        {"type": "response.completed", "response": response(asked, "completed")},
    ]
    return [event | {"sequence_number": number} for number, event in enumerate(events)]


def response(asked: dict[str, Any], status: str) -> dict[str, Any]:
    """As vLLM has it, which knows of no store."""
    part = {"type": "output_text", "text": "".join(WORDS), "annotations": []}
    message = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"}
    thought = {"type": "reasoning", "id": "rs_1", "summary": []}
    return {
        "id": "resp_of_the_engine",
        "object": "response",
        "created_at": 1,
        "status": status,
        "model": asked["model"],
        "instructions": asked.get("instructions"),
        "output": [thought, message | {"content": [part]}] if status == "completed" else [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "background": False,
        "previous_response_id": None,
    }


class Front:
    """The front's application over a service of jobs in this process."""

    def __init__(self, folder: Path) -> None:
        self.responder, self.folder = Responder(), folder
        self.keys = folder / "keys.json"
        self.asked: list[str] = []  # the methods of the jobs' process that were called
        self.refusal: Exception | None = None  # of the next `keep`
        self.state = FrontState(0, auth=Authenticator(Keyring(self.keys)))
        self.state.service = self.responder.service()
        self.state.jobs = JobsClient(self._send)
        self.app = application.build(self.state)
        self.start()

    def start(self) -> None:
        """The process of jobs, or its heir."""
        inference = self.responder.service()

        async def service() -> InferenceService:
            return inference

        self.service = JobsService(self.folder / "arbiter.sqlite", service)
        self.service.start()

    async def _send(self, method: str, *args: Any) -> Any:
        self.asked.append(method)
        if method == "keep" and self.refusal is not None:
            raise self.refusal
        return await getattr(self.service, method)(*args)

    async def ended(self, job_id: str, tenant: str = "default") -> Job:
        """Waits as a client does: by the long poll of its events."""
        async with asyncio.timeout(WAIT_S):
            after = 0
            while True:
                page = await self.service.events(tenant, job_id, after, WAIT_S)
                if page.job.state.is_finished:
                    return page.job
                after = page.events[-1][0] if page.events else after

    def key(self, tenant: str, *scopes: Scope) -> str:
        return keys.add(self.keys, tenant, tenant, frozenset({Scope.INFER, *scopes}))

    def http(self, key: str = "none") -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {key}"} if key != "none" else {}
        transport = httpx.ASGITransport(self.app)
        return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)

    def client(self, key: str = "none") -> AsyncOpenAI:
        http: Any = self.http()  # of httpx, whichever the client is typed for
        return AsyncOpenAI(
            base_url="http://localhost/v1", api_key=key, http_client=http, max_retries=0
        )


def fail_at_the_second_look(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the events of a job, by any reader."""
    call, looks = front.state.jobs.call, 0

    async def fails(method: str, *said: Any) -> Any:
        nonlocal looks
        looks += method == "events"
        if method == "events" and looks == 2:
            raise StorageFailed("/state", "an error of the disk")
        return await call(method, *said)

    monkeypatch.setattr(front.state.jobs, "call", fails)
