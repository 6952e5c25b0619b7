"""A holder asks for several tickets at once: all of them or none (A13)."""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Protocol

from arbiter.core.events import Requested
from arbiter.errors import RequestError
from arbiter.protocol import messages
from arbiter.units import Epoch, TicketId


class TicketClient(Protocol):
    """Names what a gang needs of a holder's connection to the arbiter."""

    async def acquire(self, requested: Requested) -> messages.Granted:
        """Waits for the grant, across any number of epochs. Raises RequestError."""

    async def wait_unless_disconnected(self, event: asyncio.Event) -> bool:
        """Waits for the event. False: the epoch ended before."""


@dataclass(slots=True, eq=False)
class Gang:
    """Describes tickets of one holder that are asked for together, with their grants."""

    tickets: tuple[TicketId, ...]
    grant_epochs: dict[TicketId, Epoch] = field(default_factory=dict)  # of the grants so far
    # Set once all grants are here, or one of them never will be.
    decided: asyncio.Event = field(default_factory=asyncio.Event)


async def acquire(asker: TicketClient, requested: Requested, gang: Gang) -> messages.Granted:
    """Waits for one ticket of a gang, and for the others. The caller asks for each of them in a
    call of its own. Raises RequestError."""
    request = replace(requested, gang=gang.tickets)
    try:
        return await _acquire(asker, request, gang)
    except (RequestError, asyncio.CancelledError):
        gang.decided.set()  # a grant that is here already waits for this one no longer
        raise


async def _acquire(asker: TicketClient, requested: Requested, gang: Gang) -> messages.Granted:
    """Asks again until all grants are of one epoch. An arbiter may end when some of its answers
    have arrived; the next arbiter knows nothing of those tickets, and would wait for them."""
    while True:
        granted = await asker.acquire(requested)
        gang.grant_epochs[requested.ticket] = granted.epoch
        if all(gang.grant_epochs.get(ticket) == granted.epoch for ticket in gang.tickets):
            gang.decided.set()
        if await asker.wait_unless_disconnected(gang.decided):
            return granted
