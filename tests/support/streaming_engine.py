"""An engine of a few pieces behind a real socket, served as its process does, in a test's loop."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn

from deployments.engines.host import EngineHost
from deployments.engines.peer_auth import SameUserOnly
from deployments.engines.protocol import Receive, Scope, Send

SSE = [(b"content-type", b"text/event-stream")]


class StreamingEngine:
    """Sends each piece as soon as a test lets it; `breaks`: it then fails instead of ending."""

    can_sleep = False

    def __init__(self, *pieces: bytes, status: int = 200, breaks: bool = False) -> None:
        self.pieces, self.status, self.breaks = pieces, status, breaks
        self.gates = [asyncio.Event() for _ in pieces]
        self.left = asyncio.Event()
        self.asked: list[dict[bytes, bytes]] = []

    def let_all(self) -> "StreamingEngine":
        for gate in self.gates:
            gate.set()
        return self

    async def load(self) -> None:
        """Nothing to load."""

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked.append(dict(scope["headers"]))
        while (await receive()).get("more_body"):
            continue
        leaving = asyncio.ensure_future(self._hear(receive))
        await send({"type": "http.response.start", "status": self.status, "headers": SSE})
        for gate, piece in zip(self.gates, self.pieces, strict=True):
            going = asyncio.ensure_future(gate.wait())
            await asyncio.wait({going, leaving}, return_when=asyncio.FIRST_COMPLETED)
            going.cancel()
            if leaving.done():
                return
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        leaving.cancel()
        if self.breaks:
            raise RuntimeError("told to break")
        await send({"type": "http.response.body", "body": b""})

    async def _hear(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            continue
        self.left.set()


@asynccontextmanager
async def serving(engine: Any) -> AsyncIterator[str]:
    """Yields the path of its socket."""
    host = EngineHost()
    host.engine = engine
    await host._load()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "engine.sock")
        config = uvicorn.Config(
            host,
            uds=path,
            http=SameUserOnly,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        async with _until_served(server):
            yield path


@asynccontextmanager
async def _until_served(server: uvicorn.Server) -> AsyncIterator[None]:
    config = server.config
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    ticking = asyncio.ensure_future(server.main_loop())
    try:
        yield
    finally:
        server.should_exit = True
        await ticking
        await server.shutdown()
