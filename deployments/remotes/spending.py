"""Where budgets are kept: by the arbiter, which writes down each egress before it happens.

The front remembers what the arbiter said last, so that an offer needs no call; what counts is the
reservation that `reserve` makes. The end of an egress is told until the arbiter has written it
down, which it does once for each id.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Protocol

from arbiter.client.admin import call_arbiter
from arbiter.errors import ArbiterUnavailable, EgressUnsettled, RemoteBudgetSpent
from arbiter.protocol.egress_budget import day_of, refusal
from arbiter.protocol.messages import DaySpent, Egress, EgressEnd

# An arbiter that restarts is back within two seconds; a request waits no longer for its egress.
RESERVE_S = 5.0
# Between two tries to tell the end of one request. The first pause is that of an arbiter's restart;
# later ones double, because a person may have to mend a disk. An answer of the arbiter to another
# request ends the pause.
AGAIN_S, AGAIN_MOST_S = 2.0, 60.0

logger = logging.getLogger("ray.serve")


class Book(Protocol):
    """Where egresses are reserved and settled. Each call returns what the tenant has spent at the
    remote today, and is done once for an id however often it is repeated."""

    async def reserve(self, egress: Egress) -> DaySpent: ...

    async def settle(self, end: EgressEnd) -> DaySpent: ...


class ArbiterBook:
    """The arbiter's book (arbiter.server.egress). Every call raises ArbiterUnavailable, and the
    error that the arbiter answers: then nothing leaves."""

    async def reserve(self, egress: Egress) -> DaySpent:
        spent: DaySpent = await call_arbiter("leave", egress, within_s=RESERVE_S)
        return spent

    async def settle(self, end: EgressEnd) -> DaySpent:
        spent: DaySpent = await call_arbiter("left", end)
        return spent


def utc_now() -> datetime:
    return datetime.now(UTC)


class Spending:
    """A Book, and what it said last of each tenant and remote."""

    def __init__(self, book: Book, now: Callable[[], datetime] = utc_now) -> None:
        self._book, self._now = book, now
        self._day = ""
        self._known: dict[tuple[str, str], DaySpent] = {}  # of that day
        self._has_answered = asyncio.Event()  # set at the arbiter's next answer

    async def reserve(self, egress: Egress) -> None:
        """Reserves the price of a request that is about to leave. Raises RemoteBudgetSpent,
        EgressRefused, ArbiterUnavailable."""
        await self._note(egress, self._book.reserve(egress))

    async def settle(self, end: EgressEnd) -> None:
        """Settles the price of a request that has ended. Returns once that is written down, however
        often it has to be told."""
        pause_s = AGAIN_S
        while True:
            try:
                await self._note(end.egress, self._book.settle(end))
                return
            except (ArbiterUnavailable, EgressUnsettled) as error:
                logger.error("the end of %s is told again: %s", end.egress.id, error)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_answered.wait(), pause_s)
            pause_s = min(2 * pause_s, AGAIN_MOST_S)

    def refusal(self, egress: Egress) -> RemoteBudgetSpent | None:
        """The refusal of an egress, as far as is known here."""
        spent = self._of_today().get((egress.tenant, egress.remote), DaySpent(0, 0))
        return refusal(egress, spent, self._now())

    async def _note(self, egress: Egress, answer: Awaitable[DaySpent]) -> None:
        spent = await answer
        self._has_answered.set()
        self._has_answered = asyncio.Event()
        self._of_today()[egress.tenant, egress.remote] = spent

    def _of_today(self) -> dict[tuple[str, str], DaySpent]:
        if (today := day_of(self._now())) != self._day:
            self._day, self._known = today, {}
        return self._known
