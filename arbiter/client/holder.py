"""A holder's end of the ticket protocol: what a holder may ask of the arbiter and its node agent.

The arbiter may die at any time. The session then joins the next epoch with everything its holder
has, and a HolderClient asks again for what it was waiting for, under the same ticket ids; it gives
up only after UNREACHABLE_S. A request whose model is resident calls nothing here.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

from arbiter.client.agent_client import AgentClient
from arbiter.client.request_log import RequestLog
from arbiter.client.session import ANSWER_S, Session
from arbiter.core import events as ev
from arbiter.core.settings import Timeouts
from arbiter.errors import ArbiterUnavailable, StaleEpoch, TicketClosed
from arbiter.protocol import messages, rpc
from arbiter.units import Bytes, Epoch, HolderId, Span, TicketId, in_seconds, seconds

UNREACHABLE_S = 10.0  # a restart takes 1.0-2.0 s measured; five times that is an outage


class HolderClient:
    """Asks for one holder, on its event loop. `held_tickets` returns every ticket that the holder
    has, at any moment; `on_command` performs a command and must not wait."""

    def __init__(
        self,
        capability: str,
        holder: HolderId,
        held_tickets: Callable[[], tuple[ev.HeldTicket, ...]],
        on_command: Callable[[messages.Command], None],
    ) -> None:
        self.capability, self.holder = capability, holder
        self.calls_count = 0
        self._agent = AgentClient()
        self.session = Session(capability, holder, held_tickets, on_command, self._agent.prepare)

    @property
    def timeouts(self) -> Timeouts:
        """Returns the arbiter's times; the defaults before the first join."""
        return self.session.timeouts

    @property
    def epoch(self) -> Epoch | None:
        """Returns the epoch that this holder has joined; None while it has joined none."""
        return self.session.epoch

    @property
    def request_log(self) -> RequestLog:
        """Returns the log of finished requests, which heartbeats take to the event log."""
        return self.session.request_log

    def check(self) -> None:
        """Raises the bug that ended the session: a holder without a session must be replaced."""
        self.session.check()

    async def wait_until_joined(self, within_s: float = UNREACHABLE_S) -> None:
        """Waits until this holder has joined. Raises ArbiterUnavailable after `within_s` seconds,
        which count from the loss of the arbiter where the session has found none since."""
        session = self.session
        left_s = within_s
        if session.has_found_no_arbiter:
            left_s = max(0.0, within_s - session.unreachable_s)
        try:
            async with asyncio.timeout(left_s):
                await session.joined.wait()
        except TimeoutError:
            raise ArbiterUnavailable(session.unreachable_s) from None

    # -- tickets ---------------------------------------------------------------------------------

    async def acquire(self, requested: ev.Requested) -> messages.Granted:
        """Waits for the grant, across any number of epochs. Raises the RequestError that the
        arbiter refused with, TicketClosed when it counted this holder as dead meanwhile, and
        ArbiterUnavailable. Cancelled: the ticket is withdrawn."""
        started_s = time.monotonic()
        try:
            while True:
                await self.wait_until_joined()
                if not await self._flush_outbox():  # what was said of this ticket goes first
                    continue
                if granted := await self._ask_once(
                    _with_deadline_left(requested, time.monotonic() - started_s)
                ):
                    return granted
        except asyncio.CancelledError:
            self.tell(ev.Withdrawn(requested.ticket))
            raise

    async def _ask_once(self, requested: ev.Requested) -> messages.Granted | None:
        """Asks the arbiter of the present epoch. Returns None where that epoch is over. Raises
        RequestError."""
        epoch, arbiter = self.session.epoch, self.session.arbiter
        if epoch is None or arbiter is None:
            return None
        self.calls_count += 1
        try:
            granted: messages.Granted = await self.session.call(
                arbiter, "acquire", epoch, requested
            )
        except StaleEpoch as stale:
            self.session.lose(epoch)
            if stale.sent == stale.current:  # we were counted as dead, and the ticket with us
                raise TicketClosed(requested.ticket) from None
            return None
        except rpc.ConnectionLost:
            self.session.lose(epoch)
            return None
        return granted if granted.epoch == self.epoch else None

    async def grow(self, ticket: TicketId, more: Bytes, within: Span) -> messages.Granted:
        """Asks for `more` bytes for a resident model and waits for them, `within` at most (A14);
        the grant says what the model has now. Raises GrowthRefused, NeverFits, TicketClosed, and
        ArbiterUnavailable also where the epoch ends during the call. Refused, the model goes on
        with what it had."""
        await self.wait_until_joined()
        event, arbiter = ev.GrowthAsked(ticket, more, within), self.session.arbiter
        epoch = self.epoch
        if (
            epoch is None or arbiter is None or not await self._flush_outbox()
        ):  # what it gave back first
            raise ArbiterUnavailable(0.0)
        try:
            granted: messages.Granted = await self.session.call(
                arbiter, "grow", epoch, self.holder, event
            )
        except StaleEpoch as stale:
            self.session.lose(epoch)
            if stale.sent == stale.current:  # we were counted as dead, and the ticket with us
                raise TicketClosed(ticket) from None
            raise ArbiterUnavailable(0.0) from None
        except rpc.ConnectionLost:
            # The arbiter may live on, in the same epoch, and would make room for the growth.
            self.tell(replace(event, more_bytes=Bytes(0)))
            raise ArbiterUnavailable(0.0) from None
        except asyncio.CancelledError:
            # Ray cancels the remote call by itself; a socket does not.
            self.tell(replace(event, more_bytes=Bytes(0)))
            raise
        return granted

    # -- messages --------------------------------------------------------------------------------

    def tell(self, event: ev.Event) -> None:
        """Sends the event once this holder has joined, in the order of the calls."""
        self.session.tell(event)

    async def flush(self, within_s: float) -> None:
        """Waits until the arbiter has received everything told so far, for `within_s` seconds at
        most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self.session.outbox_empty.wait()

    async def _flush_outbox(self) -> bool:
        """Waits until the arbiter has received everything told so far. Returns False where the
        epoch ended before."""
        return await self.wait_unless_disconnected(self.session.outbox_empty)

    async def wait_unless_disconnected(self, event: asyncio.Event) -> bool:
        """Waits for the event. Returns False where the epoch ended before."""
        return await self.session.wait_unless_disconnected(event)

    # -- engines ---------------------------------------------------------------------------------

    async def spawn(self, ticket: TicketId, spec: messages.SpawnSpec) -> messages.Spawned:
        """Returns the ticket's engine process. Waits for a node agent that restarts; the caller
        bounds the wait. Raises TicketNotGranted, TicketClosed when the arbiter has had the ticket
        killed, ArbiterUnavailable, ZygoteError."""
        spawned: messages.Spawned = await self._agent.call("spawn", ticket, spec)
        return spawned

    async def respawn(self, ticket: TicketId, spec: messages.SpawnSpec) -> messages.Spawned:
        """Replaces the process that the ticket has by a new one; otherwise as `spawn`."""
        spawned: messages.Spawned = await self._agent.call("respawn", ticket, spec)
        return spawned

    async def close(self) -> None:
        """Sends what is in the outbox, then that this holder is gone, and ends the connections."""
        if self.epoch is not None:
            self.tell(ev.HolderLost(self.holder))
            await self.flush(ANSWER_S)
        self._agent.close()
        await self.session.close()


def _with_deadline_left(requested: ev.Requested, waited_s: float) -> ev.Requested:
    """Returns a request with what is left of its deadline, which counts from its first try,
    whichever epoch receives it."""
    if requested.deadline is None:
        return requested
    remaining_s = max(0.0, in_seconds(requested.deadline) - waited_s)
    return replace(requested, deadline=Span(max(1, seconds(remaining_s))))
