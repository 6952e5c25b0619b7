"""A holder asks for several tickets at once: all of them or none (SPEC A13)."""

import asyncio
from dataclasses import replace
from typing import Protocol

from arbiter import wire
from arbiter.events import Requested
from arbiter.units import Epoch, TicketId


class Asker(Protocol):
    """A holder's line to the arbiter."""

    async def acquire(self, requested: Requested) -> wire.Granted:
        """Across any number of the arbiter's lives. Raises RequestError."""

    async def comes_first(self, event: asyncio.Event) -> bool:
        """Waits for it. False: the arbiter went before."""


async def acquire_all(asker: Asker, requested: tuple[Requested, ...]) -> tuple[wire.Granted, ...]:
    """Raises what the first refused one does."""
    gang = tuple(r.ticket for r in requested)
    got: dict[TicketId, Epoch] = {}
    whole = asyncio.Event()
    members = (_member(asker, replace(r, gang=gang), got, whole) for r in requested)
    asked = [asyncio.ensure_future(member) for member in members]
    try:
        return tuple(await asyncio.gather(*asked))
    finally:
        for one in asked:
            one.cancel()  # withdrawn, if it still waits
        await asyncio.gather(*asked, return_exceptions=True)


async def _member(
    asker: Asker, requested: Requested, got: dict[TicketId, Epoch], whole: asyncio.Event
) -> wire.Granted:
    """An arbiter may end when some of its answers have arrived: the next knows nothing of those,
    and would wait for them, so they are asked for again as well."""
    while True:
        granted = await asker.acquire(requested)
        got[requested.ticket] = granted.epoch
        if all(got.get(ticket) == granted.epoch for ticket in requested.gang):
            whole.set()
        if await asker.comes_first(whole):
            return granted
