"""Engines whose process goes so that another takes its place under the same ticket (SPEC A14)."""

import asyncio

from arbiter.units import TicketId


class Replacing:
    """Whose end is awaited, and is no news to the arbiter."""

    def __init__(self) -> None:
        self._ends: dict[TicketId, asyncio.Future[None]] = {}

    def __contains__(self, ticket: TicketId) -> bool:
        return ticket in self._ends

    def begin(self, ticket: TicketId) -> asyncio.Future[None]:
        """Done once nothing is left of its process; who asks again waits for the same end."""
        if ticket not in self._ends:
            self._ends[ticket] = asyncio.get_running_loop().create_future()
        return self._ends[ticket]

    def ended(self, ticket: TicketId) -> None:
        """Nothing is left of it."""
        if (end := self._ends.pop(ticket, None)) and not end.done():
            end.set_result(None)
