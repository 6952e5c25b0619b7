"""An engine's socket answers this user's processes and nobody else's."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import uvloop

from deployments.engines import peer_auth


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"for its own"})


@asynccontextmanager
async def served(path: str) -> AsyncIterator[None]:
    """As an engine's process serves: uvicorn with our protocol on a unix socket."""
    config = uvicorn.Config(
        app, uds=path, http=peer_auth.SameUserOnly, lifespan="off", log_config=None
    )
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    try:
        yield
    finally:
        await server.shutdown()


async def ask(path: str) -> bytes:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(b"GET / HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n\r\n")
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.spec("L4")
@pytest.mark.parametrize("other", [0, 1], ids=["own", "another"])
def test_engine_socket_answers_its_own_user_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: int
) -> None:
    """The stranger is a stand-in: the server believes to run as another user."""
    own = os.getuid()

    async def scenario() -> bytes:
        path = str(tmp_path / "e.sock")
        async with served(path), asyncio.timeout(60):
            monkeypatch.setattr(peer_auth.os, "getuid", lambda: own + other)
            return await ask(path)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        answer = runner.run(scenario())
    assert b"for its own" in answer if other == 0 else answer == b""
