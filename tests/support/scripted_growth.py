"""A holder whose model may grow, with the arbiter's and the agent's part in it scripted."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from arbiter.core import types
from arbiter.protocol import messages
from arbiter.units import Bytes, DeviceId, Epoch, Span, TicketId, seconds
from tests.support import scripted_holder
from tests.support.scripted_holder import use

MODEL = {**scripted_holder.MODEL, "grow_to": {"kv_cache_memory_bytes": 7}}


def table(model: dict[str, Any]) -> Any:
    return {"capabilities": {"c": {"role": "text", "engine": "m:f", "models": {"a": model}}}}


TABLE = table(MODEL)
GROWN = (types.DeviceBytes(DeviceId("n/cpu:0"), Bytes(12)),)


class ScriptedGrowth:
    """The arbiter's and the agent's part in it."""

    def __init__(self, arbiter: Any) -> None:
        self.arbiter, self.asked, self.spawned = arbiter, [], []  # type: ignore[var-annotated]
        self.error: Exception | None = None
        self.may_start = asyncio.Event()
        self.may_start.set()
        arbiter.grow, arbiter.respawn = self.grow, self.respawn

    async def grow(self, ticket: TicketId, more: Bytes, within: Span) -> messages.Granted:
        self.asked.append(more)
        if self.error:
            raise self.error
        return messages.Granted(ticket, GROWN, seconds(5), Span(0), Epoch(1))

    async def respawn(self, ticket: TicketId, spec: messages.SpawnSpec) -> messages.Spawned:
        self.spawned.append(spec.config["engine_args"])
        await self.may_start.wait()
        return messages.Spawned(str(self.arbiter.path), Span(0))


@asynccontextmanager
async def resident(model: dict[str, Any] = MODEL) -> AsyncIterator[tuple[Any, ScriptedGrowth, Any]]:
    async with scripted_holder.holder() as (residency, arbiter, engine):
        residency._on_command(messages.ConfigChanged(table(model)))
        await use(residency)
        yield residency, ScriptedGrowth(arbiter), engine
