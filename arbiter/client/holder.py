"""A holder's end of the ticket protocol.

The arbiter may die at any time. A HolderClient then joins the next epoch with everything its holder
has, asks again for what it was waiting for, under the same ticket ids, and gives up only after
UNREACHABLE_S. Nothing of it is in the way of a request whose model is resident.
"""

import asyncio
import contextlib
import logging
import os
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError, RayTaskError

from arbiter.client.admin import (
    find_actor,
    find_arbiter,
)
from arbiter.client.request_log import RequestLog
from arbiter.core import events as ev
from arbiter.core.settings import Timeouts
from arbiter.errors import ArbiterUnavailable, RequestError, StaleEpoch, TicketClosed
from arbiter.node import procfs
from arbiter.protocol import messages, ray_internals, rpc
from arbiter.units import Bytes, Epoch, HolderId, Span, TicketId, in_seconds, seconds

logger = logging.getLogger("arbiter.client")

RENEW_S = 1.0  # A5
UNREACHABLE_S = 10.0  # a restart takes 1.0-2.0 s measured; five times that is an outage
REJOIN_FIRST_S, REJOIN_MOST_S = 0.05, 1.0  # between tries; the first finds a restart at once
ANSWER_S = 10.0  # for calls that the arbiter answers without waiting for anything


class HolderClient:
    """One per holder, on its event loop. `account` tells what is held, in full, at any moment;
    `obey` performs an order and must not wait."""

    def __init__(
        self,
        capability: str,
        holder: HolderId,
        account: Callable[[], tuple[ev.HeldTicket, ...]],
        obey: Callable[[messages.Command], None],
    ) -> None:
        self.capability, self.holder = capability, holder
        self.table: messages.Plain = {}  # the configuration, once joined
        self.timeouts = Timeouts()  # the arbiter's, once joined
        self.epoch: Epoch | None = None  # None: not joined
        self.calls_count, self.runs = 0, RequestLog()
        self._account, self._obey = account, obey
        self._handle: Any = None  # of the arbiter's actor
        self._arbiter: rpc.Peer | None = None
        self._agent: rpc.Peer | None = None
        self._finding = asyncio.Lock()  # the agent
        self._preparing: asyncio.Future[None] | None = None
        self._watched: Any = None  # our pending keepalive; the arbiter watches that we own it
        self._joined = asyncio.Event()
        self._lost = asyncio.Event()
        self._outbox: deque[ev.Event] = deque()
        self._said = asyncio.Event()  # something is in the outbox
        self._quiet = asyncio.Event()  # nothing is
        self._quiet.set()
        self._away_since = time.monotonic()
        self._failed: BaseException | None = None  # a bug ended one of the tasks below
        self._tasks = [asyncio.ensure_future(t()) for t in (self._life, self._renew, self._send)]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """These end only by being cancelled; anything else is a bug, and must be seen."""
        if not task.cancelled() and (error := task.exception()):
            self._failed = self._failed or error
            logger.critical("a holder lost its line to the arbiter: %r", error, exc_info=error)

    def check(self) -> None:
        """Raises what ended this holder's line to the arbiter, for whoever can replace the holder:
        without it no heartbeat goes out and no order comes in."""
        if self._failed is not None:
            raise self._failed

    @property
    def away_s(self) -> float:
        """How long the arbiter has not been reached; 0 when joined."""
        return 0.0 if self.epoch is not None else time.monotonic() - self._away_since

    async def joined(self, within_s: float = UNREACHABLE_S) -> None:
        """Raises ArbiterUnavailable when the arbiter has been away, or stays away, for long."""
        left_s = max(0.0, within_s - self.away_s) if self._has_failed else within_s
        try:
            async with asyncio.timeout(left_s):
                await self._joined.wait()
        except TimeoutError:
            raise ArbiterUnavailable(self.away_s) from None

    async def acquire(self, requested: ev.Requested) -> messages.Granted:
        """Wait for the grant, across any number of the arbiter's lives. Raises RequestError.
        Cancelled: the ticket is withdrawn."""
        asked = time.monotonic()
        try:
            while True:
                await self.joined()
                if not await self._all_is_said():  # what was said of this ticket goes first
                    continue
                if granted := await self._ask_once(_aged(requested, time.monotonic() - asked)):
                    return granted
        except asyncio.CancelledError:
            self.tell(ev.Withdrawn(requested.ticket))
            raise

    async def grow(self, ticket: TicketId, more: Bytes, within: Span) -> messages.Granted:
        """More for a resident (A14); the grant says what it has now. Raises GrowthRefused,
        NeverFits, TicketClosed, ArbiterUnavailable: then it goes on with what it had."""
        await self.joined()
        asked, arbiter = ev.GrowthAsked(ticket, more, within), self._arbiter
        if arbiter is None or not await self._all_is_said():  # that it gave back goes first
            raise ArbiterUnavailable(0.0)
        try:
            granted: messages.Granted = await arbiter.call("grow", self.epoch, self.holder, asked)
        except rpc.ConnectionLost:
            raise ArbiterUnavailable(0.0) from None
        except asyncio.CancelledError:
            self.tell(replace(asked, more_bytes=Bytes(0)))  # over a socket nobody else says so
            raise
        return granted

    async def _all_is_said(self) -> bool:
        """False: the arbiter went before it had heard everything."""
        return await self.comes_first(self._quiet)

    async def comes_first(self, event: asyncio.Event) -> bool:
        """Waits for it. False: the arbiter went before."""
        if event.is_set():
            return True
        waits = [asyncio.ensure_future(e.wait()) for e in (event, self._lost)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return event.is_set()

    async def _ask_once(self, requested: ev.Requested) -> messages.Granted | None:
        """None: that life of the arbiter is over."""
        epoch, arbiter = self.epoch, self._arbiter
        if epoch is None or arbiter is None:
            return None
        self.calls_count += 1
        try:
            granted: messages.Granted = await arbiter.call("acquire", epoch, requested)
        except StaleEpoch as stale:
            self._lose(epoch)
            if stale.sent == stale.current:  # we were counted as dead, and the ticket with us
                raise TicketClosed(requested.ticket) from None
            return None
        except rpc.ConnectionLost:
            self._lose(epoch)
            return None
        return granted if granted.epoch == self.epoch else None

    def tell(self, event: ev.Event) -> None:
        """Say it, in order, once joined. What a rejoin says anyway is not said twice."""
        self._outbox.append(event)
        self._quiet.clear()
        self._said.set()

    async def quiet(self, within_s: float) -> None:
        """Everything told so far has been heard, or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._quiet.wait()

    async def spawn(self, ticket: TicketId, spec: messages.SpawnSpec) -> str:
        """Socket path of the ticket's engine. Waits for a node agent that restarts; bound it.
        Raises TicketClosed when the arbiter has had the ticket reaped, ZygoteError."""
        return await self._opened("spawn", ticket, spec)

    async def respawn(self, ticket: TicketId, spec: messages.SpawnSpec) -> str:
        """As `spawn`, in the place of the process that the ticket has."""
        return await self._opened("respawn", ticket, spec)

    async def _opened(self, how: str, ticket: TicketId, spec: messages.SpawnSpec) -> str:
        while True:
            try:
                agent = await self._own_agent()
                path: str = await agent.call(how, ticket, spec)
                return path
            except (rpc.ConnectionLost, LookupError, RayError):
                self._agent = None
            await asyncio.sleep(REJOIN_FIRST_S)

    async def _own_agent(self) -> rpc.Peer:
        """Of this node. Raises LookupError when there is none yet, RayError while it restarts."""
        async with self._finding:
            if self._agent is None:
                node = ray_internals.own_node()
                handle = await asyncio.to_thread(find_actor, messages.agent_name(node))
                if handle is None:
                    raise LookupError("no agent")
                self._agent = await rpc.connect_to_socket(handle, await handle.door.remote(), node)
            return self._agent

    async def close(self) -> None:
        """Say the last things, and that this holder is gone."""
        if self.epoch is not None:
            self.tell(ev.HolderLost(self.holder))
            await self.quiet(ANSWER_S)
        for task in (*self._tasks, *([self._preparing] if self._preparing else [])):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for peer in (self._arbiter, self._agent):
            if peer is not None:
                peer.close()
        self._watched = None

    # -- one epoch after the other ---------------------------------------------------------------

    @property
    def _has_failed(self) -> bool:
        return self._handle is None and self.away_s > REJOIN_MOST_S

    async def _life(self) -> None:
        pause_s = REJOIN_FIRST_S
        while True:
            try:
                await self._join()
                pause_s = REJOIN_FIRST_S
                await self._listen()
            except messages.VersionMismatch as error:
                logger.error("%s", error)
            except StaleEpoch as stale:
                logger.info("%s rejoins: %s", self.holder, stale)
            except (rpc.RemoteError, RayTaskError) as error:
                logger.error("the arbiter failed on %s: %r", self.holder, error)
            except (RayError, rpc.ConnectionLost, TimeoutError, LookupError):
                self._handle = None
            self._leave()
            await asyncio.sleep(pause_s)
            pause_s = min(REJOIN_MOST_S, 2 * pause_s)

    async def _join(self) -> None:
        """Raises LookupError when there is no arbiter."""
        if self._handle is None:
            self._handle = await asyncio.to_thread(find_arbiter)
        if self._handle is None:
            raise LookupError("no arbiter")
        async with asyncio.timeout(ANSWER_S):
            said = await self._handle.hello.remote()
            if said["identity"] != messages.identity():
                raise messages.VersionMismatch(
                    said["identity"], messages.identity(), said["holders"]
                )
            node, own = ray_internals.own_node(), ray_internals.own_handle()
            self._arbiter = await rpc.connect_to_socket(self._handle, said.get("door"), node)
            stay = uuid.uuid4().hex
            self._watched = self._handle.keepalive.remote(stay)
            self._forget_said()  # the account that follows says it
            account = self._introduction()
            welcome = await self._handle.join.remote(
                self.epoch, account, stay, [own] if own is not None else [], [self._watched]
            )
        self.epoch, self.timeouts = welcome.epoch, welcome.timeouts
        self._take(messages.ConfigChanged(welcome.table))
        self._lost.clear()
        self._joined.set()
        self._wake_sender()
        self._preparing = asyncio.ensure_future(self._prepare())

    async def _prepare(self) -> None:
        """Look for the agent before the first grant, which then need not wait for it."""
        with contextlib.suppress(LookupError, RayError, TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                await self._own_agent()

    def _introduction(self) -> ev.Joined:
        own = procfs.process(os.getpid())
        assert own is not None
        name = own.pid, own.start_ticks
        node, is_driver = ray_internals.own_node(), ray_internals.own_handle() is None
        return ev.Joined(
            self.holder, node, self.capability, self._account(), *name, is_driver=is_driver
        )

    def _leave(self) -> None:
        if self.epoch is not None:
            self._away_since = time.monotonic()
        self.epoch = None
        if self._arbiter is not None:
            self._arbiter.close()
            self._arbiter = None
        self._joined.clear()
        self._lost.set()

    def _lose(self, epoch: Epoch) -> None:
        """A call failed: that epoch is over, or we are not in it."""
        if self.epoch == epoch:
            self._leave()

    async def _listen(self) -> None:
        """Returns when another call found the epoch over; raises what listening raises."""
        ack, lost = 0, asyncio.ensure_future(self._lost.wait())
        try:
            while self.epoch is not None:
                heard = asyncio.ensure_future(self._hear(self.epoch, ack))
                try:
                    await asyncio.wait({heard, lost}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    heard.cancel()  # unless it is done; nobody else would hear how it ends
                if not heard.done():
                    return
                for order in heard.result():
                    ack = order.sequence
                    self._take(order.command)
        finally:
            lost.cancel()

    async def _hear(self, epoch: Epoch, ack: int) -> tuple[messages.SequencedCommand, ...]:
        assert self._arbiter is not None
        orders: tuple[messages.SequencedCommand, ...] = await self._arbiter.call(
            "listen", self.holder, epoch, ack
        )
        return orders

    def _take(self, command: messages.Command) -> None:
        if isinstance(command, messages.ConfigChanged):
            self.table = command.table
        self._obey(command)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            epoch, arbiter = self.epoch, self._arbiter
            if epoch is None or arbiter is None:
                continue
            runs, dropped, usage = *self.runs.waiting(), self.runs.usage()
            renewed = ev.Renewed(self.holder, self._account(), runs, dropped, usage)
            try:
                await arbiter.call("renew", epoch, renewed)
            except (StaleEpoch, rpc.ConnectionLost, rpc.RemoteError):
                self._lose(epoch)
            else:
                self.runs.said(runs, dropped, usage)

    # -- the outbox ------------------------------------------------------------------------------

    def _forget_said(self) -> None:
        self._outbox.clear()
        self._wake_sender()

    def _wake_sender(self) -> None:
        if self._outbox:
            self._said.set()
        else:
            self._quiet.set()

    async def _send(self) -> None:
        while True:
            await self._said.wait()
            await self._joined.wait()
            epoch, arbiter = self.epoch, self._arbiter
            if not self._outbox or epoch is None or arbiter is None:
                self._said.clear()
                self._wake_sender()
                continue
            event = self._outbox[0]
            try:
                await arbiter.call("tell", epoch, self.holder, event)
            except (StaleEpoch, rpc.ConnectionLost):
                self._lose(epoch)
                continue
            except (rpc.RemoteError, RequestError) as error:
                logger.error("the arbiter failed on %r: %r", event, error)
            if self._outbox and self._outbox[0] is event:
                self._outbox.popleft()


def _aged(requested: ev.Requested, waited_s: float) -> ev.Requested:
    """The deadline runs from the first asking, whichever life of the arbiter hears it."""
    if requested.deadline is None:
        return requested
    left = max(0.0, in_seconds(requested.deadline) - waited_s)
    return replace(requested, deadline=Span(max(1, seconds(left))))
