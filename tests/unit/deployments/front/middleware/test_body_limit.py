"""A request whose body comes slowly, or whose sender may not send it, takes no place for long."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from httpx import ASGITransport, AsyncClient
from starlette.exceptions import HTTPException

from deployments.config.front_section import FrontConfig
from deployments.front import application
from deployments.front.access import keys
from deployments.front.access.auth import Authenticator
from deployments.front.access.keys import Keyring, Scope
from deployments.front.dependencies import FrontState
from deployments.front.inference.service import InferenceService
from deployments.front.middleware import body_limit
from deployments.front.middleware.body_limit import SMALL_BYTES, BodyLimit, BoundedBody
from deployments.front.middleware.error_forms import form_of, message_of
from deployments.front.status.serve_status import Applications
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


def configure(front: FrontState, **settings: float) -> None:
    plain = table()
    section = plain.front.model_copy(update=settings)
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
    sends = [{"type": "http.request", "body": b"", "more_body": False}]
    loop = asyncio.get_running_loop()
    begun_s = loop.time()

    async def receive() -> Any:
        if sends:
            return sends.pop()
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


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/messages", "/api/embed", "/v1/responses"])
async def test_body_beyond_what_the_front_holds_of_all_is_429_and_harms_no_other(
    client: AsyncClient, front: FrontState, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(body_limit, "SLOW_S", WITHIN_S)
    asked = {"model": "unknown", "input": "x", "max_tokens": 1}
    asked["messages"] = [{"role": "user", "content": "x"}]
    small = json.dumps(asked).encode()
    configure(front, in_flight=9, bodies_bytes=4 * SMALL_BYTES + len(small))
    rest = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b" " * (2 * SMALL_BYTES)
        yield b" " * (2 * SMALL_BYTES)
        await rest.wait()
        yield small

    def post(content: Any) -> Any:
        return client.post(path, content=content, headers=JSON)

    async with asyncio.timeout(WITHIN_S):
        first = asyncio.create_task(post(slow()))
        while front.bodies.size_bytes < 4 * SMALL_BYTES:
            await asyncio.sleep(0)
        large = small + b" " * (2 * SMALL_BYTES)
        refused = await post(large)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "`front.bodies_bytes`" in message_of(refused.content)
        assert form_of(path) or refused.json()["error"]["code"] == "queue_full"
        assert front.bodies.size_bytes == 4 * SMALL_BYTES
        assert (await post(small)).status_code == 404, "it is taken, and there is no such model"
        full = small + b" " * (SMALL_BYTES - len(small))
        assert (await post(full)).status_code == 404
        rest.set()
        assert (await first).status_code == 404 == (await post(large)).status_code
    assert (front.bodies.size_bytes, front.service.in_flight) == (0, 0)


async def test_body_that_comes_slowly_gives_its_bytes_to_others_once_all_are_held(
    client: AsyncClient, front: FrontState, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = b'{"model": "unknown", "input": "x"}'
    configure(front, in_flight=9, bodies_bytes=6 * SMALL_BYTES)
    monkeypatch.setattr(body_limit, "SLOW_S", WITHIN_S)
    rest = asyncio.Event()

    async def body(pieces: int) -> AsyncIterator[bytes]:
        for _ in range(pieces):
            yield b" " * SMALL_BYTES
        await rest.wait()
        yield small

    def post(content: Any) -> Any:
        return asyncio.create_task(client.post("/v1/embeddings", content=content, headers=JSON))

    async with asyncio.timeout(WITHIN_S):
        slow = [post(body(2)), post(body(2))]
        while front.bodies.size_bytes < 4 * SMALL_BYTES:
            await asyncio.sleep(0)
        large = small + b" " * (3 * SMALL_BYTES)
        assert (await post(large)).status_code == 429, "they may still come"
        for held in front.bodies.arriving:
            held.progress_s -= WITHIN_S
        assert (await post(large + b" " * (3 * SMALL_BYTES))).status_code == 429, "not even so"
        assert not slow[0].done(), "it would have ended for nothing"
        assert (await post(large)).status_code == 404, "it is taken, and there is no such model"
        ended = await slow[0]
        error = ended.json()["error"]
        assert (ended.status_code, error["code"]) == (408, "body_too_slow")
        assert "another request needs the memory" in error["message"]
        assert not slow[1].done(), "there is room without it"
        rest.set()
        assert (await slow[1]).status_code == 404
    assert (front.bodies.size_bytes, front.bodies.arriving) == (0, {})


async def test_refused_body_gives_its_bytes_to_others_at_once(front: FrontState) -> None:
    pieces = [b"a" * SMALL_BYTES, b"b" * SMALL_BYTES]

    async def receive() -> Any:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": True}

    limits = FrontConfig().model_copy(update={"bodies_bytes": SMALL_BYTES + 1})
    body = BoundedBody(receive, "/v1/embeddings", limits, front.bodies)
    await body()
    assert front.bodies.size_bytes == SMALL_BYTES
    with pytest.raises(HTTPException, match=r"takes at most 0\.1 MiB"):
        await body()
    assert front.bodies.size_bytes == 0


@pytest.mark.parametrize(("path", "counted"), [("/v1/embeddings", 3), ("/v1/files", 0)])
@pytest.mark.parametrize("ends", [None, ValueError])
async def test_body_counts_from_its_arrival_until_its_answer_and_on_disk_not_at_all(
    front: FrontState, path: str, counted: int, ends: type[Exception] | None
) -> None:
    configure(front)
    pieces = [b"a", b"bc"]
    seen: list[int] = []

    async def receive() -> Any:
        piece = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            seen.append(front.bodies.size_bytes)
        seen.append(front.bodies.size_bytes)
        if ends is not None:
            raise ends

    async def send(message: Any) -> None:
        raise AssertionError(message)

    scope = {"type": "http", "path": path, "headers": [], "app": application.build(front)}
    with contextlib.suppress(ValueError):
        await BodyLimit(answer)(scope, receive, send)
    assert seen == [counted // 3, counted] and front.bodies.size_bytes == 0


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
