"""A holder's models, with a scripted client of the arbiter and an engine on a unix socket."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from arbiter.client.request_log import RequestLog
from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Reason, Tier
from arbiter.core.settings import Timeouts
from arbiter.errors import ArbiterUnavailable
from arbiter.protocol import messages
from arbiter.units import Bytes, DeviceId, Epoch, HolderId, Span, TicketId, seconds
from deployments.replica.residency import Residency

MODEL = {"source": "x", "need": {"weights": 5, "host": 5}}
TABLE: Any = {"capabilities": {"c": {"role": "text", "engine": "m:f", "models": {"a": MODEL}}}}
ON = (types.DeviceBytes(DeviceId("n/cpu:0"), Bytes(5)),)


class ScriptedEngine:
    """The child's side: control routes and one slow answer."""

    def __init__(self) -> None:
        self.loaded, self.answer, self.dead = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.acts: list[str] = []
        self.told: list[Any] = []  # bodies of control calls
        self.verified, self.restored, self.asked_if_ready = True, True, False
        self.prewarms: list[Any] = []  # bodies, in the order in which they came
        self.warms = asyncio.Event()  # a pre-warm is answered once it is set
        self.warms.set()
        self.warmed: tuple[int, Any] = (200, {"prompt_tokens": 300, "cached_tokens": 0})
        self.drops_drafter: bool | None = False  # None: it fails over it
        self.on_wake: Callable[[], object] = lambda: None

    async def serve(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/control/lifeline":
            response, dead = web.StreamResponse(), self.dead
            await response.prepare(request)
            await dead.wait()
            assert request.transport is not None
            request.transport.close()
            return response
        if request.path == "/control/ready":
            self.asked_if_ready = True
            await self.loaded.wait()
            return web.json_response({"load_seconds": 0.0})
        self.acts.append(request.path)
        if request.path == "/control/drop_drafter":
            return self._drop_drafter()
        if request.path == "/control/wake":
            self.on_wake()
        if request.path.startswith("/control/"):
            if request.can_read_body:
                self.told.append(await request.json())
            said = {"seconds": 0.0, "verified": self.verified, "restored": self.restored}
            return web.json_response(said)
        if request.path == "/prewarm":
            self.prewarms.append(await request.json())
            await self.warms.wait()
            status, said = self.warmed
            return web.json_response(said, status=status)
        await self.answer.wait()
        return web.Response(body=b"answer")

    def _drop_drafter(self) -> web.Response:
        if self.drops_drafter is None:
            cause = {"type": "RuntimeError", "message": "half of it is gone"}
            return web.json_response({"error": cause}, status=500)
        return web.json_response({"dropped": self.drops_drafter})


class ScriptedClient:
    """Stands where HolderClient does: notes what is told, and grants at once, or when told to."""

    unreachable_s = 0.0
    timeouts = Timeouts()

    def __init__(self, path: str, grants_at_once: bool = True) -> None:
        self.path, self.grants_at_once = path, grants_at_once
        self.requests: list[ev.Requested] = []
        self.told: list[ev.Event] = []
        self.answers: dict[str, asyncio.Future[Exception | None]] = {}
        self.request_log = RequestLog()

    async def wait_until_joined(self, within_s: float = 0.0) -> None:
        if self.unreachable_s:
            raise ArbiterUnavailable(self.unreachable_s)

    async def flush(self, within_s: float) -> None: ...
    async def close(self) -> None: ...

    async def wait_unless_disconnected(self, event: asyncio.Event) -> bool:
        return await event.wait()

    async def acquire(self, requested: ev.Requested) -> messages.Granted:
        self.requests.append(requested)
        answer = self.answers[requested.model] = asyncio.get_running_loop().create_future()
        if self.grants_at_once:
            answer.set_result(None)
        try:
            error = await answer
        except asyncio.CancelledError:
            self.tell(ev.Withdrawn(requested.ticket))
            raise
        if error:
            raise error
        return messages.Granted(requested.ticket, ON, seconds(5), Span(0), Epoch(1))

    def says(self, model: str, error: Exception | None = None) -> None:
        """Answers the request for a model: a grant, or this error."""
        self.answers[model].set_result(error)

    async def spawn(self, ticket: TicketId, spec: messages.SpawnSpec) -> messages.Spawned:
        return messages.Spawned(self.path, Span(0))

    def tell(self, event: ev.Event) -> None:
        self.told.append(event)

    @property
    def asked(self) -> list[TicketId]:
        return [requested.ticket for requested in self.requests]

    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.told]


@asynccontextmanager
async def holder(loaded: bool = True) -> AsyncIterator[tuple[Any, ScriptedClient, ScriptedEngine]]:
    engine = ScriptedEngine()
    if loaded:
        engine.loaded.set()
    application = web.Application()
    application.router.add_route("*", "/{rest:.*}", engine.serve)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "s")
        await web.UnixSite(runner, path).start()
        arbiter = ScriptedClient(path)
        residency: Any = Residency("c", HolderId("h"))
        residency._client = arbiter
        residency._on_command(messages.ConfigChanged(TABLE))
        try:
            yield residency, arbiter, engine
        finally:
            await residency.close()
            engine.dead.set()
            engine.answer.set()
            engine.warms.set()
            await runner.cleanup()


def revoke(
    residency: Any,
    reason: Reason,
    to: Tier = Tier.GONE,
    barrier_s: float = 5,
    model: str = "a",
) -> None:
    ticket = residency.models[model].ticket
    residency._on_command(messages.RevokeCommand(ticket, reason, to, seconds(barrier_s)))


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


async def use(residency: Any) -> TicketId:
    async with residency.use("a") as engine:
        return TicketId(engine.ticket)


def breaking(arbiter: ScriptedClient, *errors: Exception) -> None:
    """The first spawns fail, one by one; those after them do not."""
    spawn, left = arbiter.spawn, list(errors)

    async def broken(ticket: TicketId, spec: messages.SpawnSpec) -> messages.Spawned:
        if left:
            raise left.pop(0)
        return await spawn(ticket, spec)

    arbiter.spawn = broken  # type: ignore[method-assign]
