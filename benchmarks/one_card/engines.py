"""The same engines for the other systems: started, asked and ended without an arbiter."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from deployments.config import load_plan
from deployments.config.engine_kinds import engine_kind
from deployments.config.schema import parse_table
from tests.support.engine_host import Child, ZygoteUnderTest, kill

HOP = {"transfer-encoding", "connection", "content-length", "date", "server", "keep-alive"}
ENV = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


@dataclass(slots=True)
class Engine:
    """One loaded model."""

    child: Child
    session: aiohttp.ClientSession
    own_zygote: ZygoteUnderTest | None = None

    async def end(self) -> None:
        """Returns once its process is gone, and with it its memory."""
        await self.session.close()
        await asyncio.to_thread(kill, self.child)
        if self.own_zygote is not None:
            await asyncio.to_thread(self.own_zygote.close)


@dataclass(slots=True)
class Starter:
    """Starts engines of a table's models. `is_fresh`: each in an interpreter of its own; else by a
    fork of a process with the libraries imported."""

    table: Mapping[str, Any]
    is_fresh: bool
    _zygote: ZygoteUnderTest | None = None
    _started: int = 0
    _plans: dict[str, tuple[str, dict[str, Any], str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        capabilities = parse_table(dict(self.table), "one_card").capabilities
        modules: list[str] = []
        for row in capabilities.values():
            preload = engine_kind(row.engine).preload
            modules += preload
            for model in row.models:
                made = load_plan.plan(model, row)
                self._plans[model] = made.entry, made.config, ",".join(preload)
        if not self.is_fresh:
            self._zygote = ZygoteUnderTest(",".join(dict.fromkeys(modules)), ENV, 30.0)

    async def start(self, model: str) -> Engine:
        """Raises RuntimeError where it does not load."""
        entry, config, preload = self._plans[model]
        self._started += 1
        ticket = f"{model}-{self._started}".replace(".", "-")
        child, own = await asyncio.to_thread(self._spawn, ticket, entry, config, preload)
        connector = aiohttp.UnixConnector(path=child.path, limit=0)
        return Engine(child, aiohttp.ClientSession("http://engine", connector=connector), own)

    def _spawn(
        self, ticket: str, entry: str, config: dict[str, Any], preload: str
    ) -> tuple[Child, ZygoteUnderTest | None]:
        own = ZygoteUnderTest(preload, ENV, 30.0) if self.is_fresh else None
        zygote = own or self._zygote
        assert zygote is not None
        child = zygote.spawn(ticket, entry, config).hold()
        status, said = child.ready()
        if status != 200:
            raise RuntimeError(f"{ticket}: {said}")
        return child, own

    def close(self) -> None:
        if self._zygote is not None:
            self._zygote.close()


async def relayed(request: web.Request, body: bytes, engine: Engine) -> web.StreamResponse:
    """The engine's answer, part by part."""
    kind = {"content-type": request.headers["content-type"]}
    async with engine.session.post(request.path, data=body, headers=kind) as said:
        headers = {k: v for k, v in said.headers.items() if k.lower() not in HOP}
        response = web.StreamResponse(status=said.status, headers=headers)
        await response.prepare(request)
        async for part in said.content.iter_any():
            await response.write(part)
        await response.write_eof()
        return response


class Partition:
    """A part of the card that one model at a time has; who asks for another waits for its turn."""

    def __init__(self, starter: Starter) -> None:
        self._starter = starter
        self._turn = asyncio.Lock()  # first come, first served
        self._idle = asyncio.Event()
        self._idle.set()
        self._in_flight, self.loads = 0, 0
        self._model = ""
        self._engine: Engine | None = None

    @contextlib.asynccontextmanager
    async def use(self, model: str) -> AsyncIterator[Engine]:
        """Raises RuntimeError where the model does not load."""
        async with self._turn:
            if self._model != model:
                await self._idle.wait()
                if self._engine is not None:
                    ended, self._engine, self._model = self._engine, None, ""
                    await ended.end()
                self._engine = await self._starter.start(model)
                self._model = model
                self.loads += 1
            self._in_flight += 1
            self._idle.clear()
            engine = self._engine
        assert engine is not None
        try:
            yield engine
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def end(self) -> None:
        if self._engine is not None:
            await self._engine.end()
