"""A holder's connection to one engine process: HTTP over the unix socket that the zygote bound.

The lifeline is a request that is never answered to its end. When the holder closes it, or dies, the
engine ends; when it breaks from the other end, the holder knows that the engine is dead.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arbiter.errors import ENGINE_DIED, EngineLost
from arbiter.units import Span, TicketId, seconds
from deployments.messages import SIDE_STREAM, ResponseHead, WholeEvents
from deployments.routing.pieces import KeptKv

if TYPE_CHECKING:  # a tenth of a second, spent while the first engine starts
    import aiohttp

# Headers of the engine's answer that concern its connection, not the client's.
_HOP = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "content-length", "date", "server"}
)


class LoadRefused(Exception):
    """The engine says why it did not load, sleep, wake or serve."""

    def __init__(self, cause: str, out_of_memory: bool) -> None:
        super().__init__(cause, out_of_memory)
        self.cause, self.out_of_memory = cause, out_of_memory


@dataclass(frozen=True, slots=True)
class WakeResult:
    """How a wake went."""

    took: Span
    verified: bool  # False: the engine found its answer changed and loaded from disk again
    restored: bool  # False: it is changed still, and the engine must end


class EngineLink:
    """The connection to one engine, open for as long as the engine is ours. Every call raises
    EngineLost when it is gone."""

    def __init__(self, model: str, ticket: TicketId, path: str) -> None:
        import aiohttp

        self._broken = (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError)
        self._model, self._ticket, self._path = model, ticket, path
        # No bound on connections: the engine's own queue is where requests wait.
        connector = aiohttp.UnixConnector(path=path, limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        self._session = aiohttp.ClientSession("http://engine", connector=connector, timeout=timeout)
        self._lifeline: aiohttp.ClientResponse | None = None
        self._watch: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    async def open_lifeline(self, lost: Callable[[], None]) -> None:
        """Opens the lifeline; `lost` is called once, when it breaks from the other end."""
        with self._engine_lost_if_broken():
            self._lifeline = await self._session.get("/control/lifeline")
        self._watch = asyncio.ensure_future(self._until_broken(self._lifeline, lost))

    @property
    def is_alive(self) -> bool:
        """Whether the lifeline is open: the engine lives, as far as this process knows."""
        return self._watch is not None and not self._watch.done()

    async def ready(self) -> None:
        """Waits for the load. Raises LoadRefused."""
        with self._engine_lost_if_broken():
            async with self._session.get("/control/ready") as answer:
                facts = await answer.json()
        if answer.status != 200:
            error = facts["error"]
            raise LoadRefused(f"{error['type']}: {error['message']}", error["out_of_memory"])

    async def health(self) -> KeptKv | None:
        """Returns what KV of its requests the engine has kept, None where it does not say (see
        protocol.TellsKept). Raises LoadRefused when the engine says that it cannot serve."""
        with self._engine_lost_if_broken():
            async with self._session.get("/control/health") as answer:
                facts = await answer.json()
        if answer.status != 200:
            raise LoadRefused(facts["error"]["message"], False)
        return KeptKv(**facts["kept"]) if "kept" in facts else None

    async def sleep(self) -> None:
        """Has the engine sleep. Raises LoadRefused when it cannot."""
        await self._control("/control/sleep")

    async def purge(self) -> None:
        """Has the engine empty its caches, where it has any. Raises LoadRefused."""
        await self._control("/control/purge")

    async def shrink_slabs(self) -> None:
        """Has the engine's slabs give back and erase what their owner says. Raises LoadRefused."""
        await self._control("/control/shrink_slabs")

    async def cap_slabs(self, caps: dict[str, float]) -> None:
        """Tells which part of its slabs' rows each tenant may have. Raises LoadRefused."""
        await self._control("/control/cap_slabs", {"caps": caps})

    async def forget_tenant(self, tenant: str) -> None:
        """Has the engine unload the tenant's own adapters. Raises LoadRefused."""
        await self._control("/control/forget_tenant", {"tenant": tenant})

    async def drop_drafter(self) -> bool:
        """Has the engine give its drafter's memory back. False: the drafter only leaves with a
        restart. Raises LoadRefused."""
        return bool((await self._control("/control/drop_drafter"))["dropped"])

    async def wake(self) -> WakeResult:
        """Wakes the engine. Where neither host RAM nor disk brought its recorded answer back,
        `restored` is False and the caller must end it. Raises LoadRefused when the wake failed."""
        facts = await self._control("/control/wake")
        return WakeResult(
            seconds(facts["seconds"]), bool(facts["verified"]), bool(facts["restored"])
        )

    async def stream(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> AsyncGenerator[ResponseHead | bytes, None]:
        """Yields the engine's answer: its head, then its bytes as they come, of an event stream by
        whole events; none where the head says at which socket they are. Closing this generator
        closes the connection, which cancels the work in the engine."""
        with self._engine_lost_if_broken():
            async with self._session.request(method, path, headers=headers, data=body) as answer:
                passed_on = {
                    k.lower(): v for k, v in answer.headers.items() if k.lower() not in _HOP
                }
                if SIDE_STREAM in passed_on:
                    passed_on[SIDE_STREAM] = f"{self._path} {passed_on[SIDE_STREAM]}"
                is_chunked = answer.content_length is None
                head = ResponseHead(answer.status, passed_on, is_chunked)
                yield head
                events = WholeEvents() if head.is_event_stream else None
                async for chunk in answer.content.iter_any():
                    if piece := events.whole(chunk) if events else chunk:
                        yield piece
                if events and (rest := events.rest()):
                    yield rest

    def cut(self) -> None:
        """Closes the lifeline and everything else; the engine ends at once."""
        if self._watch:
            self._watch.cancel()
        if self._lifeline:
            self._lifeline.close()
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._session.close())

    async def closed(self) -> None:
        """Waits until what `cut` began has closed."""
        if self._closing:
            await self._closing

    async def _control(self, path: str, body: Any = None) -> dict[str, Any]:
        with self._engine_lost_if_broken():
            async with self._session.post(path, json=body) as answer:
                reply: dict[str, Any] = await answer.json()
        if answer.status != 200:
            raise LoadRefused(reply["error"]["message"], reply["error"].get("out_of_memory", False))
        return reply

    @contextlib.contextmanager
    def _engine_lost_if_broken(self) -> Any:
        """Raises EngineLost for a broken connection, which means that the engine is gone."""
        try:
            yield
        except self._broken as error:
            raise EngineLost(self._model, self._ticket) from error
        except RuntimeError as error:
            if not self._session.closed:
                raise
            raise EngineLost(self._model, self._ticket) from error

    async def _until_broken(
        self, lifeline: "aiohttp.ClientResponse", lost: Callable[[], None]
    ) -> None:
        with contextlib.suppress(*self._broken):
            while await lifeline.content.read(1):
                pass  # the engine may write to keep the connection from looking idle
        lost()


def failure_cause(error: Exception, after_s: float) -> tuple[str, bool]:
    """Returns the cause of a failed load in words, and whether the engine ran out of memory."""
    if isinstance(error, LoadRefused):
        return error.cause, error.out_of_memory
    if isinstance(error, TimeoutError) and error.errno is None:  # a file server's has one
        return f"not loaded after {after_s:.0f} s", False
    if isinstance(error, EngineLost):
        return ENGINE_DIED, False
    return str(error), False
