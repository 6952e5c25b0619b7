"""A node's host copies without an arbiter: every lease is granted."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from arbiter.core.events import HostCopyReading
from arbiter.core.types import ModelName
from arbiter.node.host_copies import HostCopies
from arbiter.protocol.messages import CopyRequest, LeaseCall, LeaseState
from arbiter.units import NodeId, TicketId
from deployments.config.engine_kinds import SAFETENSORS
from tests.support.waits import WITHIN_S


class Grants:
    """An arbiter with room for everything."""

    async def call(self, name: str, *args: object) -> object:
        await asyncio.sleep(0.1)  # as an arbiter waits for news
        [call] = args if name == "lease" else [None]
        return (
            LeaseState(call.ticket, "held", call.devices) if isinstance(call, LeaseCall) else call
        )


class Copies:
    """The copies of a node, on a loop of their own."""

    def __init__(self, folder: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._running: list[asyncio.Future[None]] = []
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._made = self._run(self._make(folder))

    async def _make(self, folder: Path) -> HostCopies:
        def start(work: Coroutine[Any, Any, None]) -> None:
            self._running.append(asyncio.ensure_future(work))

        return HostCopies(NodeId("n"), folder, Grants(), start)

    def close(self) -> None:
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WITHIN_S)
        self._loop.close()

    async def _end(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._made.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def lend(
        self,
        ticket: str,
        model: Path,
        patterns: tuple[str, ...] = SAFETENSORS,
        *,
        for_group: bool = False,
    ) -> dict[str, Any]:
        """What an engine's configuration has as `copy`."""
        request = CopyRequest(ModelName("all", "m"), str(model), patterns, for_group)
        lent: dict[str, Any] = self._run(self._made.lend(TicketId(ticket), request))
        return lent

    def take_back(self, ticket: str) -> None:
        self._run(self._call(self._made.take_back, TicketId(ticket)))

    def drop(self, key: str) -> bool:
        return bool(self._run(self._call(self._made.drop, key)))

    def readings(self) -> tuple[HostCopyReading, ...]:
        found: tuple[HostCopyReading, ...] = self._run(self._call(self._made.readings))
        return found

    async def _call(self, function: Callable[..., Any], *args: object) -> Any:
        return function(*args)

    @property
    def held_bytes(self) -> int:
        return int(self._made.held_bytes)
