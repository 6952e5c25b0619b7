"""POST /v1/prewarm over ASGI: answered at once, whether or not a replica runs."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient

from deployments import messages
from deployments.config.schema import parse_table
from deployments.front import application
from deployments.front.access import keys
from deployments.front.access.auth import Authenticator
from deployments.front.access.keys import Keyring
from deployments.front.dependencies import FrontState
from deployments.front.inference.service import InferenceService, Send
from deployments.front.routes import prewarm
from deployments.front.status.serve_status import Applications
from deployments.requests import prefixes

pytestmark = pytest.mark.spec("G1")

ACCEPTED = messages.ResponseHead(202, {"content-type": "application/json"})
PATHS = {"chat": [], "speak": ["/v1/hum"]}


class Replica:
    """Answers once it is let."""

    def __init__(self) -> None:
        self.calls: list[messages.InferenceCall] = []
        self.runs = asyncio.Event()
        self.runs.set()
        self.head = ACCEPTED

    def send_of(self, capability: str) -> Send:
        return self.send

    def send(self, call: messages.InferenceCall) -> AsyncIterator[messages.Part]:
        self.calls.append(call)
        return self._parts(call)

    async def _parts(self, call: messages.InferenceCall) -> AsyncGenerator[messages.Part, None]:
        await self.runs.wait()
        said = prefixes.accepted(call.request_id, call.served, "resident")
        yield messages.FullResponse(self.head, json.dumps(said).encode())


@pytest.fixture
async def replica() -> Replica:
    return Replica()


@pytest.fixture
def app(replica: Replica, tmp_path: Path) -> FastAPI:
    keys.ensure_first(path := tmp_path / "keys.json")
    service = InferenceService(replica.send_of)
    homes = {
        name: {"role": "text", "engine": "m:f", "models": {name: {"source": "x"}}, "paths": paths}
        for name, paths in PATHS.items()
    }
    service.configure(parse_table({"capabilities": homes, "front": {"in_flight": 1}}))
    return application.build(
        FrontState(7, Authenticator(Keyring(path)), service, Applications(dict))
    )


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(transport=ASGITransport(app), base_url="http://localhost") as made:
        yield made


def body(**more: Any) -> dict[str, Any]:
    return {"model": "chat", "messages": [{"role": "system", "content": "be brief"}], **more}


async def test_session_is_accepted_with_the_state_of_its_model(
    client: AsyncClient, replica: Replica
) -> None:
    headers = {"x-conversation-id": "c-1", "x-request-id": "r-1"}
    answer = await client.post(prefixes.PATH, json=body(), headers=headers)
    said = {"object": "prewarm", "id": "r-1", "model": "chat", "state": "resident"}
    assert (answer.status_code, answer.json()) == (202, said)
    [call] = replica.calls
    assert (call.path, call.key) == (prefixes.PATH, "conv:c-1")
    assert call.stable is not None and call.stable.whole_count == 1


async def test_client_does_not_wait_for_a_replica_that_starts(
    app: FastAPI, client: AsyncClient, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prewarm, "PATIENCE_S", 0.0)
    replica.runs.clear()
    answer = await client.post(prefixes.PATH, json=body())
    assert (answer.status_code, answer.json()["state"]) == (202, "starting")
    service = app.state.front.service
    assert service.in_flight == 1  # it goes on
    assert (await client.post(prefixes.PATH, json=body())).status_code == 429
    replica.runs.set()
    async with asyncio.timeout(60):
        while service.in_flight:
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"model": "unlisted"}, 404, "model"),
        ({"model": "speak"}, 404, "model"),
        ({"messages": "hello"}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "x", "stable": 1}]}, 400, "messages[0].stable"),
    ],
)
async def test_wrong_prewarm_is_refused_at_once(
    client: AsyncClient, replica: Replica, change: dict[str, Any], status: int, param: str
) -> None:
    answer = await client.post(prefixes.PATH, json=body(**change))
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert replica.calls == []


async def test_refusal_of_the_replica_reaches_the_client(
    client: AsyncClient, replica: Replica
) -> None:
    replica.head = messages.ResponseHead(429, {"content-type": "application/json"})
    assert (await client.post(prefixes.PATH, json=body())).status_code == 429


async def test_prewarm_is_described_once(client: AsyncClient) -> None:
    described = (await client.get("/openapi.json")).json()["paths"][prefixes.PATH]["post"]
    assert "202" in described["responses"] and "200" not in described["responses"]
