"""An engine's process: what happens between the fork and its death.

Serves the engine's own routes, and these, on the socket the zygote bound:

    GET  /control/ready     answers once loaded: 200 {"load_seconds", "can_sleep"}, or 500 {"error":
                            {"type", "message", "out_of_memory"}}, after which the process ends
    GET  /control/lifeline  never ends; when its connection closes, so does the process, at once
    GET  /control/health    200 {"asleep"}, of an engine that tells it also "kept"
                            (protocol.TellsKept), or 503 with the cause
    POST /control/sleep     200 {"seconds"}; repeating it is harmless
    POST /control/wake      200 {"seconds", "verified", "restored"}. Not verified: the probe
                            differed from the one recorded at load, and the model was loaded from
                            disk again if it can be. Not restored: no load in place brought the
                            recorded answer back, and the holder ends it
    POST /control/purge     200 {"purges"}: whether the engine has caches, which are then empty
    POST /control/shrink_slabs
                            200 {"shrinks"}: whether it writes slabs of the node's pool, which then
                            have no more than they may; asleep too
    POST /control/cap_slabs
                            {"caps": {TENANT: PART}}: 200 {"caps"}: whether its slabs keep tenants
                            to these parts of their rows; asleep too
    POST /control/forget_tenant
                            {"tenant": NAME}: 200 {"forgets"}: whether it keeps anything of a
                            tenant between requests, which has then left; asleep too
    GET  /control/side_stream/WORD
                            200 and the pieces of the event stream that was asked for with that word
    POST /control/drop_drafter
                            200 {"dropped"}: whether its drafter's memory is back; false: as before
"""

import asyncio
import gc
import importlib
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from types import TracebackType
from typing import Any, NoReturn, cast

from arbiter import heap
from deployments.engines import asgi, lent, linux, shared_copy
from deployments.engines.protocol import (
    ENDINGS,
    CannotReload,
    CannotSleep,
    CapsSlabs,
    Config,
    DropsDrafter,
    Engine,
    EngineLoadFailed,
    ForgetsTenants,
    Purges,
    Receive,
    Scope,
    Send,
    ShrinksSlabs,
    Spawn,
    TellsKept,
    load_failure,
)
from deployments.engines.side_streams import PATH as SIDE_STREAM
from deployments.engines.side_streams import SideStreams

# An engine process without a holder must not stay: the holder connects its lifeline right after the
# spawn, and a busy replica's event loop stalls for far less than this.
UNHELD_S = 60.0
# A failed load keeps its cause this long for a holder that asks late; then the process ends.
UNASKED_S = 30.0
# A written answer leaves the buffer with the next turn of the loop; then the process ends.
LAST_ANSWER_S = 0.05
_PRELOAD = (
    "uvicorn",
    "uvicorn.lifespan.off",
    "uvicorn.loops.uvloop",
    "deployments.engines.peer_auth",
    "uvloop",
    "httptools",
)


def preload() -> None:
    """Imports the server; uvicorn would import its parts by name when the first engine starts."""
    for module in _PRELOAD:
        importlib.import_module(module)


def run(spawn: Spawn, listener: socket.socket) -> NoReturn:
    """Runs all of the forked process: it ends in here."""
    status = 1
    try:
        _become(spawn, listener)
        _serve(spawn, listener)
        status = 0
    finally:
        linux.end(status)  # also on an error, which must never reach the zygote's loop


def _become(spawn: Spawn, listener: socket.socket) -> None:
    """Leaves the zygote's session, descriptors, environment, random seeds and output."""
    os.setsid()
    linux.close_all_but(listener.fileno())
    _redirect(spawn)
    linux.drop_privileges()
    linux.set_name(f"engine:{spawn.ticket}")
    _reset_signals()
    linux.take_environment(spawn.env | {"ARBITER_ENGINE": str(spawn.socket.with_suffix(""))})
    linux.reseed()
    gc.enable()


def _redirect(spawn: Spawn) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for target, opened in (
        (0, os.open(os.devnull, os.O_RDONLY)),
        (1, os.open(spawn.log, flags, 0o600)),
        (2, os.open(spawn.log, flags, 0o600)),
    ):
        os.dup2(opened, target)
        os.close(opened)


def _reset_signals() -> None:
    import signal

    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Ctrl-C is for the holder, whose end ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _serve(spawn: Spawn, listener: socket.socket) -> None:
    import uvicorn

    from deployments.engines.peer_auth import SameUserOnly

    host = EngineHost()
    with host.catch():
        module, _, function = spawn.entry.partition(":")
        build: Callable[[Config], Engine] = getattr(importlib.import_module(module), function)
        host.engine = build(shared_copy.received(lent.with_slabs(spawn.config)))
    config = uvicorn.Config(
        cast(Any, host),
        loop="uvloop",
        http=SameUserOnly,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=1,  # a lifeline never ends by itself
        timeout_keep_alive=600,  # the replica pools its connections; only it can open them
    )
    server = uvicorn.Server(config)
    runner = asyncio.Runner(loop_factory=config.get_loop_factory())
    with runner:
        runner.run(host.life(server.serve(sockets=[listener])))


class _LoadErrors(AbstractContextManager["_LoadErrors", bool]):
    """Turns an error that the library raises into the cause of the failed load."""

    def __init__(self, host: "EngineHost") -> None:
        self.host = host

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        if error is None or isinstance(error, ENDINGS):
            return False
        sys.excepthook(type(error), error, error.__traceback__)  # the log keeps the traceback
        self.host.failure = load_failure(error)
        return True


class EngineHost:
    """The ASGI application of an engine process: control routes, and the engine's own while it is
    awake."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.failure: EngineLoadFailed | None = None
        self.load_seconds = 0.0
        self.asleep = False
        self.known_probe: str | None = None
        self.loaded = asyncio.Event()
        self.residency_lock = (
            asyncio.Lock()
        )  # held by a sleep, a wake and whatever must not meet either
        self.held = asyncio.Event()
        self.side_streams = SideStreams()
        self.routes: dict[str, Callable[[Receive, Send], Awaitable[None]]] = {
            "GET /control/ready": self._ready,
            "GET /control/lifeline": self._lifeline,
            "GET /control/health": self._health,
            "POST /control/sleep": self._sleep,
            "POST /control/wake": self._wake,
            "POST /control/purge": self._purge,
            "POST /control/shrink_slabs": self._shrink_slabs,
            "POST /control/cap_slabs": self._cap_slabs,
            "POST /control/forget_tenant": self._forget_tenant,
            "POST /control/drop_drafter": self._drop_drafter,
        }

    def catch(self) -> _LoadErrors:
        return _LoadErrors(self)

    async def life(self, serving: Awaitable[None]) -> None:
        """Loads the engine while the server runs, so that lifeline and ready are answered from the
        first moment."""
        loading = asyncio.ensure_future(self._load())
        watching = asyncio.ensure_future(self._end_when_unheld())
        await serving
        loading.cancel()
        watching.cancel()

    async def _end_when_unheld(self) -> None:
        try:
            async with asyncio.timeout(UNHELD_S):
                await self.held.wait()
        except TimeoutError:
            linux.end(1)

    async def _load(self) -> None:
        began_s = time.perf_counter()
        with self.catch():
            if self.engine is not None:
                await self.engine.load()
                if self.engine.can_sleep:
                    self.known_probe = await self.engine.probe()
        self.load_seconds = time.perf_counter() - began_s
        self.loaded.set()
        if self.failure:
            await asyncio.sleep(UNASKED_S)
            linux.end(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        route = self.routes.get(f"{scope['method']} {scope['path']}")
        if route:
            await route(receive, send)
        elif scope["path"].startswith(SIDE_STREAM):
            await self.side_streams.read(scope, send)
        elif scope["path"].startswith("/control/"):
            await asgi.refuse(send, 404, f"no control route {scope['path']}", kind="NotFound")
        else:
            await self._data(scope, receive, send)

    async def _data(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.engine is None or not self.loaded.is_set() or self.failure or self.asleep:
            state = "asleep" if self.asleep else "not loaded"
            return await asgi.refuse(send, 503, f"the engine is {state}", kind="NotAwake")
        async with asgi.TypedFailures(send) as answer:
            await self.side_streams.answer(self.engine.app, scope, receive, answer)

    async def _ready(self, receive: Receive, send: Send) -> None:
        await self.loaded.wait()
        if not self.failure:
            assert self.engine is not None
            facts = {"load_seconds": self.load_seconds, "can_sleep": self.engine.can_sleep}
            return await asgi.respond(send, 200, facts)
        cause = {
            "type": self.failure.kind,
            "message": self.failure.message,
            "out_of_memory": self.failure.out_of_memory,
        }
        await asgi.respond(send, 500, {"error": cause})
        asyncio.get_running_loop().call_later(LAST_ANSWER_S, linux.end, 1)

    async def _lifeline(self, receive: Receive, send: Send) -> None:
        self.held.set()
        headers = [(b"content-type", b"application/octet-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            continue
        linux.end(0)

    async def _health(self, receive: Receive, send: Send) -> None:
        if self.engine is None or not self.loaded.is_set() or self.failure:
            return await asgi.refuse(send, 503, "the engine is not loaded", kind="NotAwake")
        task = asyncio.ensure_future(self.engine.health())
        await asyncio.wait({task})
        if error := task.exception():
            cause = load_failure(error)
            return await asgi.refuse(send, 503, cause.message, kind=cause.kind)
        health: dict[str, Any] = {"asleep": self.asleep}
        if isinstance(self.engine, TellsKept):
            health["kept"] = asdict(self.engine.kept_kv())
        await asgi.respond(send, 200, health)

    async def _sleep(self, receive: Receive, send: Send) -> None:
        await self._turned(send, self._fall_asleep())

    async def _wake(self, receive: Receive, send: Send) -> None:
        await self._turned(send, self._wake_up())

    async def _purge(self, receive: Receive, send: Send) -> None:
        """Has the engine empty its caches; a model that is not awake has none."""
        engine, is_awake = self.engine, self.loaded.is_set() and not self.asleep
        if self.failure or not is_awake or not isinstance(engine, Purges):
            return await asgi.respond(send, 200, {"purges": False})
        await self._attempt(send, engine.purge(), {"purges": True})

    async def _shrink_slabs(self, receive: Receive, send: Send) -> None:
        """Shrinks the slabs, but not during a sleep or a wake, because a wake may load the model
        anew."""
        engine = self.engine
        if self.failure or not self.loaded.is_set() or not isinstance(engine, ShrinksSlabs):
            return await asgi.respond(send, 200, {"shrinks": False})
        async with self.residency_lock:
            await self._attempt(send, engine.shrink_slabs(), {"shrinks": True})

    async def _cap_slabs(self, receive: Receive, send: Send) -> None:
        """The body: `{"caps": {TENANT: PART}}`."""
        engine, body = self.engine, await asgi.read_body(receive)
        if self.failure or not self.loaded.is_set() or not isinstance(engine, CapsSlabs):
            return await asgi.respond(send, 200, {"caps": False})
        async with self.residency_lock:
            caps = asgi.json_object(body or b"")["caps"]
            await self._attempt(send, engine.cap_slabs(caps), {"caps": True})

    async def _forget_tenant(self, receive: Receive, send: Send) -> None:
        """The body: `{"tenant": NAME}`."""
        engine, body = self.engine, await asgi.read_body(receive)
        if self.failure or not self.loaded.is_set() or not isinstance(engine, ForgetsTenants):
            return await asgi.respond(send, 200, {"forgets": False})
        async with self.residency_lock:
            tenant = asgi.json_object(body or b"")["tenant"]
            await self._attempt(send, engine.forget_tenant(tenant), {"forgets": True})

    async def _attempt(self, send: Send, act: Awaitable[None], reply: dict[str, Any]) -> None:
        """Answers `reply` after the act. A failure of the act is answered with its cause, and the
        engine goes on."""
        task = asyncio.ensure_future(act)
        await asyncio.wait({task})
        if error := task.exception():
            cause = load_failure(error)
            return await asgi.refuse(send, 503, cause.message, kind=cause.kind)
        await asgi.respond(send, 200, reply)

    async def _drop_drafter(self, receive: Receive, send: Send) -> None:
        await self._turned(send, self._without_drafter())

    async def _without_drafter(self) -> dict[str, Any]:
        engine, is_awake = self.engine, self.loaded.is_set() and not self.asleep
        if self.failure or not is_awake or not isinstance(engine, DropsDrafter):
            return {"dropped": False}
        return {"dropped": await engine.drop_drafter()}

    async def _turned(self, send: Send, act: Awaitable[dict[str, Any]]) -> None:
        """Answers what the act returns. After an act that failed half way the engine's state is
        unknown, so the process ends and frees its bytes."""
        async with self.residency_lock:
            task = asyncio.ensure_future(act)
            await asyncio.wait({task})
        if not (error := task.exception()):
            return await asgi.respond(send, 200, task.result())
        cause = load_failure(error)
        sys.excepthook(type(error), error, error.__traceback__)
        status = 409 if isinstance(error, CannotSleep) else 500
        await asgi.refuse(send, status, cause.message, kind=cause.kind)
        if status == 500:
            self.failure = cause
            asyncio.get_running_loop().call_later(LAST_ANSWER_S, linux.end, 1)

    def _engine_that_sleeps(self) -> Engine:
        if self.engine is None or not self.loaded.is_set() or not self.engine.can_sleep:
            raise CannotSleep("this engine cannot sleep, or is not loaded")
        return self.engine

    async def _fall_asleep(self) -> dict[str, Any]:
        engine, began_s = self._engine_that_sleeps(), time.perf_counter()
        if not self.asleep:
            self.asleep = True  # set first, so that a request is refused and reaches no engine
            await engine.sleep()
            gc.collect()
            heap.trim()  # without it the kernel sees a sleep only in part
        return {"seconds": time.perf_counter() - began_s}

    async def _wake_up(self) -> dict[str, Any]:
        engine, began_s = self._engine_that_sleeps(), time.perf_counter()
        verified = restored = True
        if self.asleep:
            await engine.wake()
            verified = restored = await engine.probe() == self.known_probe
            if not verified:
                restored = await self._reloaded(engine)
            self.asleep = not restored
        took_s = time.perf_counter() - began_s
        return {"seconds": took_s, "verified": verified, "restored": restored}

    async def _reloaded(self, engine: Engine) -> bool:
        """Loads from disk, in this process. Returns whether that brought the recorded answer
        back."""
        try:
            await engine.load()
        except CannotReload:
            return False
        return await engine.probe() == self.known_probe
