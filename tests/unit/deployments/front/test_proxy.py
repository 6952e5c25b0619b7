"""What stands around Serve's proxy."""

from typing import Any

import pytest
from httpx import ASGITransport, AsyncClient
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.front.proxy import middlewares


def around(app: ASGIApp) -> AsyncClient:
    """As Serve applies them."""
    for middleware in middlewares():
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)
    return AsyncClient(transport=ASGITransport(app), base_url="http://localhost")


@pytest.mark.spec("J8")
async def test_request_that_got_no_response_is_503_with_when_to_come_back() -> None:
    async def dies(scope: Scope, receive: Receive, send: Send) -> None:
        """As the proxy does where the replica died: returns having sent nothing."""

    async with around(dies) as client:
        answer = await client.get("/v1/models")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert answer.json()["error"]["code"] == "front_lost"


async def test_response_that_was_sent_is_left_alone() -> None:
    async def answers(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 418, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})

    async with around(answers) as client:
        answer = await client.get("/")
    assert (answer.status_code, answer.content) == (418, b"x")


@pytest.mark.spec("L3")
@pytest.mark.parametrize(("given", "is_kept"), [(b"mine-1", True), (b"\xff", False)])
async def test_request_id_that_is_not_ascii_does_not_reach_serve(
    given: bytes, is_kept: bool
) -> None:
    seen: list[Any] = []

    async def answers(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend(value for name, value in scope["headers"] if name == b"x-request-id")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    async with around(answers) as client:
        await client.get("/", headers=[(b"x-request-id", given)])
    assert seen == ([given] if is_kept else [])
