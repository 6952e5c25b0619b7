"""A request whose body comes slowly, or whose sender may not send it, takes no place for long."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from httpx import ASGITransport, AsyncClient

from deployments.front import application, keys
from deployments.front.auth import Authenticator
from deployments.front.body_limit import BodyLimit
from deployments.front.dependencies import FrontState
from deployments.front.keys import Keyring, Scope
from deployments.front.serve_status import Applications
from deployments.front.service import InferenceService
from tests.support.speaker import FORM, Speaker, table

pytestmark = pytest.mark.spec("J8", "L3")
JSON = {"content-type": "application/json"}
WITHIN_S = 60.0  # for what takes some hundredths of a second


@pytest.fixture
def front(keys_file: Path) -> FrontState:
    service = InferenceService(Speaker().send_of)
    return FrontState(7, Authenticator(Keyring(keys_file)), service, Applications(dict))


@pytest.fixture
async def client(front: FrontState) -> AsyncIterator[AsyncClient]:
    transport = ASGITransport(application.build(front))
    async with AsyncClient(transport=transport, base_url="http://localhost") as made:
        yield made


def configure(front: FrontState, **seconds: float) -> None:
    plain = table()
    section = plain.front.model_copy(update=seconds)
    front.service.configure(plain.model_copy(update={"front": section}))


async def stalled() -> AsyncIterator[bytes]:
    yield b"{"
    await asyncio.Event().wait()


async def unread() -> AsyncIterator[bytes]:
    raise AssertionError("the body is read")
    yield b""


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/embeddings", JSON),
        ("/v1/responses", JSON),
        ("/v1/prewarm", JSON),
        ("/v1/audio/transcriptions", FORM),
        ("/arbiter/plan", JSON),
    ],
)
async def test_body_that_stops_coming_is_408_and_its_place_is_free(
    client: AsyncClient, front: FrontState, path: str, headers: dict[str, str]
) -> None:
    configure(front, body_piece_s=0.05)
    async with asyncio.timeout(WITHIN_S):
        answer = await client.post(path, content=stalled(), headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (408, "body_too_slow")
    assert "1 bytes" in error["message"] and "0.05 s" in error["message"]
    assert front.service.in_flight == 0


async def test_body_that_comes_drop_by_drop_is_408_in_the_end(
    client: AsyncClient, front: FrontState
) -> None:
    async def drops() -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0)
            yield b" "

    configure(front, body_s=0.1)
    async with asyncio.timeout(WITHIN_S):
        answer = await client.post("/v1/embeddings", content=drops(), headers=JSON)
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "body_too_slow")
    assert "0.1 s" in answer.json()["error"]["message"]
    assert front.service.in_flight == 0


async def test_answer_may_take_longer_than_its_body_had(front: FrontState) -> None:
    """After its body a client has nothing more to send, and leaves when it likes."""
    configure(front, body_piece_s=0.01, body_s=0.01)
    said = [{"type": "http.request", "body": b"", "more_body": False}]
    loop = asyncio.get_running_loop()
    begun_s = loop.time()

    async def receive() -> Any:
        if said:
            return said.pop()
        while loop.time() < begun_s + 0.05:  # five times the bounds
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "http.request"
        await send(await receive())

    async def send(message: Any) -> None:
        sent.append(message["type"])

    sent: list[str] = []
    scope = {"type": "http", "path": "/x", "headers": [], "app": application.build(front)}
    async with asyncio.timeout(WITHIN_S):
        await BodyLimit(answer)(scope, receive, send)
    assert sent == ["http.disconnect"]


@pytest.mark.spec("L1")
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/chat"),
        ("POST", "/arbiter/plan"),
        ("PUT", "/arbiter/leases/a"),
        ("POST", "/v1/batches"),
        ("PUT", "/api/v1/config"),
        ("POST", "/v1/embeddings"),
    ],
)
async def test_key_and_host_are_checked_before_the_body_is_read(
    client: AsyncClient, front: FrontState, keys_file: Path, method: str, path: str
) -> None:
    configure(front)
    keys.add(keys_file, "ann", "acme", frozenset({Scope.INFER}))  # from now on each needs a key
    answer = await client.request(method, path, content=unread(), headers=JSON)
    assert answer.status_code == 401
    foreign = JSON | {"host": "evil.example"}
    answer = await client.request(method, path, content=unread(), headers=foreign)
    assert answer.status_code == 403
