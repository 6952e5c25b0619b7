"""The bounds of one tenant among several: no key shuts the others out."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from pathlib import Path

import pytest
from httpx import AsyncClient, Response

from arbiter.errors import QueueFull
from deployments import messages
from deployments.config.schema import parse_table
from deployments.front import dependencies
from deployments.front.access import keys
from deployments.front.access.keys import Scope
from deployments.front.dependencies import FrontState
from deployments.front.inference.service import InferenceService
from deployments.jobs.errors import TenantLimitReached
from tests.support.front_application import error
from tests.support.waits import eventually

CHAT, ACQUIRE = "/v1/chat/completions", "/v1/acquire"
ASKED = {"model": "one", "messages": [{"role": "user", "content": "x"}]}
IN_FLIGHT = 6


class Serve:
    """Answers at once; an acquired model stays in use until its client leaves."""

    def __init__(self, call: messages.InferenceCall) -> None:
        self.is_acquire = call.path == ACQUIRE

    def cancel(self) -> None: ...

    async def __aiter__(self) -> AsyncGenerator[messages.Part, None]:
        if self.is_acquire:
            yield messages.ResponseHead(200, {"content-type": "text/event-stream"}, True)
            yield b"data: {}\n\n"
            await asyncio.Event().wait()
        yield messages.FullResponse(messages.ResponseHead(200, {}), b"{}")


def configure(front: FrontState, **section: int) -> None:
    chat = {"role": "text", "engine": "vllm", "models": {"one": {"source": "x"}}}
    front.service = InferenceService(lambda name: Serve)
    section = {"in_flight": IN_FLIGHT} | section
    front.service.configure(parse_table({"front": section, "capabilities": {"chat": chat}}))


def key_of(tenant: str, keys_file: Path) -> dict[str, str]:
    token = keys.add(keys_file, "a test", tenant, frozenset({Scope.INFER}))
    return {"authorization": f"Bearer {token}"}


async def chat(client: AsyncClient, key: dict[str, str]) -> Response:
    return await client.post(CHAT, json=ASKED, headers=key)


@pytest.mark.spec("J8", "L3")
@pytest.mark.parametrize(("section", "most"), [({}, IN_FLIGHT // 2), ({"tenant_in_flight": 5}, 5)])
async def test_no_tenant_alone_fills_the_front(
    client: AsyncClient, front: FrontState, keys_file: Path, section: dict[str, int], most: int
) -> None:
    configure(front, **section)
    greedy, other = key_of("greedy", keys_file), key_of("other", keys_file)
    assert (await chat(client, greedy)).status_code == 200
    with ExitStack() as requests:
        requests.enter_context(front.counted("greedy"))  # a stream that was admitted before
        for _ in range(most - 1):
            requests.enter_context(front.admitted("greedy"))
        refused = await chat(client, greedy)
        assert (refused.status_code, error(refused)["code"]) == (429, "quota_exceeded")
        assert refused.headers["retry-after"] == "1" and str(most) in error(refused)["message"]
        assert (await chat(client, other)).status_code == 200
    assert (await chat(client, greedy)).status_code == 200
    assert front.service.in_flight == 0


@pytest.mark.spec("J8")
async def test_only_tenant_has_the_whole_front(front: FrontState, keys_file: Path) -> None:
    configure(front)
    gone = keys.add(keys_file, "a test", "gone", frozenset({Scope.INFER})).split("-")[1]
    keys.remove(keys_file, gone)
    with ExitStack() as requests:
        for _ in range(IN_FLIGHT):
            requests.enter_context(front.admitted("default"))
        with pytest.raises(QueueFull):
            requests.enter_context(front.admitted("default"))
        key_of("other", keys_file)
        with pytest.raises(QueueFull):
            requests.enter_context(front.admitted("other"))
    with ExitStack() as requests:
        for _ in range(IN_FLIGHT // 2):
            requests.enter_context(front.admitted("default"))
        with pytest.raises(TenantLimitReached):
            requests.enter_context(front.admitted("default"))


@pytest.mark.spec("J8", "L3")
async def test_models_that_a_tenant_keeps_in_use_leave_places_for_others(
    client: AsyncClient, front: FrontState, keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dependencies, "ACQUIRES_MOST", 2)
    configure(front)
    greedy, other = key_of("greedy", keys_file), key_of("other", keys_file)

    def acquire(key: dict[str, str]) -> "asyncio.Task[Response]":
        return asyncio.create_task(client.post(ACQUIRE, json={"model": "one"}, headers=key))

    held = [acquire(greedy), acquire(greedy)]
    await eventually(lambda: front.acquires._counts["greedy"] == 2)
    refused = await acquire(greedy)
    assert (refused.status_code, error(refused)["code"]) == (429, "quota_exceeded")
    assert (await chat(client, greedy)).status_code == 200
    held.append(acquire(other))
    await eventually(lambda: front.acquires._counts["other"] == 1)
    for one in held:
        one.cancel()
    await asyncio.wait(held)
    await eventually(lambda: not front.acquires._counts and front.service.in_flight == 0)
