"""A holder's connection to the arbiter, one epoch after the other.

A session joins with everything its holder has, listens for commands, renews, and sends the outbox
in order. When the epoch ends, or the connection to it, it joins the next one by itself.
"""

import asyncio
import logging
import os
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayError, RayTaskError

from arbiter.client.admin import arbiter_handle
from arbiter.client.request_log import RequestLog
from arbiter.core import events as ev
from arbiter.core.settings import Timeouts
from arbiter.errors import ActorAbsent, RequestError, StaleEpoch
from arbiter.node import procfs
from arbiter.protocol import messages, ray_internals, rpc
from arbiter.units import Epoch, HolderId

logger = logging.getLogger("arbiter.client")

RENEW_S = 1.0  # A5
REJOIN_FIRST_S, REJOIN_MOST_S = 0.05, 1.0  # between tries; the first finds a restart at once
ANSWER_S = 10.0  # for calls that the arbiter answers without waiting for anything
# A holder has a few events for each model that it loads or gives back, and sending one takes
# 0.2 ms, so thousands wait only while there is no arbiter. They are 200 B each.
OUTBOX_MOST_COUNT = 10_000
# What a join leaves unsaid in the same epoch: it tells what is held, not what is no longer wanted.
UNSAID_BY_JOIN = (ev.Withdrawn, ev.GrowthAsked)


class Session:
    """Connects one holder, on its event loop. `held_tickets` returns every ticket that the holder
    has, at any moment; `on_command` performs a command and must not wait; each new epoch calls
    `on_joined`."""

    def __init__(
        self,
        capability: str,
        holder: HolderId,
        held_tickets: Callable[[], tuple[ev.HeldTicket, ...]],
        on_command: Callable[[messages.Command], None],
        on_joined: Callable[[], None],
    ) -> None:
        self.capability, self.holder = capability, holder
        self.timeouts = Timeouts()  # the arbiter's, once joined
        self.epoch: Epoch | None = None  # None: not joined
        self.arbiter: rpc.Peer | None = None
        self.joined = asyncio.Event()
        self.lost = asyncio.Event()
        self.outbox_empty = asyncio.Event()
        self.outbox_empty.set()
        self.request_log = RequestLog()
        self._held_tickets, self._on_command, self._on_joined = held_tickets, on_command, on_joined
        self._handle: Any = None  # of the arbiter's actor
        self._keepalive: Any = None  # our pending call; the arbiter watches that we own it
        self._outbox: deque[ev.Event] = deque()
        self._outbox_ready = asyncio.Event()  # something is in it
        self._must_rejoin = False  # the outbox overflowed; what a join tells says the rest
        self._unreachable_since = time.monotonic()
        self._failed: BaseException | None = None  # a bug ended one of the tasks below
        work = self._stay_joined, self._renew, self._send
        self._tasks = [asyncio.ensure_future(begin()) for begin in work]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Notes the bug that ended one of the tasks, which else end only by being cancelled."""
        if not task.cancelled() and (error := task.exception()):
            self._failed = self._failed or error
            logger.critical("%s lost its session to a bug: %r", self.holder, error, exc_info=error)

    def check(self) -> None:
        """Raises what ended this session: without it no heartbeat goes out and no command comes
        in, so its holder must be replaced."""
        if self._failed is not None:
            raise self._failed

    @property
    def unreachable_s(self) -> float:
        """Returns for how many seconds the arbiter has not been reached; 0 when joined."""
        return 0.0 if self.epoch is not None else time.monotonic() - self._unreachable_since

    @property
    def has_found_no_arbiter(self) -> bool:
        """Says whether at least one try of joining has found no arbiter."""
        return self._handle is None and self.unreachable_s > REJOIN_MOST_S

    async def wait_unless_disconnected(self, event: asyncio.Event) -> bool:
        """Waits for the event. Returns False where the epoch ended before."""
        if event.is_set():
            return True
        waits = [asyncio.ensure_future(e.wait()) for e in (event, self.lost)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return event.is_set()

    async def call(
        self, arbiter: rpc.Peer, name: str, *args: Any, within_s: float | None = None
    ) -> Any:
        """Calls as `Peer.call` does. Raises ConnectionLost also when there is no answer within
        `within_s` seconds, and when the epoch ended before the answer: a call of Ray to an arbiter
        that hangs would wait on."""
        answer = asyncio.ensure_future(arbiter.call(name, *args))
        lost = asyncio.ensure_future(self.lost.wait())
        try:
            await asyncio.wait(
                {answer, lost}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            answer.cancel()  # unless it is done
            lost.cancel()
        if not answer.done():
            raise rpc.ConnectionLost(name)
        return answer.result()

    def lose(self, epoch: Epoch) -> None:
        """Leaves an epoch in which a call failed: it is over, or this holder is not in it."""
        if self.epoch == epoch:
            self._leave()

    async def close(self) -> None:
        """Ends the connection; the arbiter sees its pending call end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.arbiter is not None:
            self.arbiter.close()
        self._keepalive = None

    # -- joining ---------------------------------------------------------------------------------

    async def _stay_joined(self) -> None:
        """Joins and listens for commands until the epoch ends, then joins the next, without end."""
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
            except (RayError, rpc.ConnectionLost, TimeoutError, ActorAbsent):
                self._handle = None
            self._leave()
            await asyncio.sleep(pause_s)
            pause_s = min(REJOIN_MOST_S, 2 * pause_s)

    async def _join(self) -> None:
        """Joins the epoch of the arbiter that is found now. Raises ActorAbsent when there is no
        arbiter, VersionMismatch when it runs other code."""
        if self._handle is None:
            self._handle = await asyncio.to_thread(arbiter_handle)
        async with asyncio.timeout(ANSWER_S):
            greeting = await self._handle.hello.remote()
            if greeting["identity"] != messages.identity():
                raise messages.VersionMismatch(
                    greeting["identity"], messages.identity(), greeting["holders"]
                )
            node, own = ray_internals.own_node(), ray_internals.own_handle()
            self.arbiter = await rpc.connect_to_socket(
                self._handle, greeting.get("rpc_address"), node
            )
            session_id = uuid.uuid4().hex
            self._keepalive = self._handle.keepalive.remote(session_id)
            self._clear_outbox()  # the introduction that follows tells the same
            introduction = self._introduction()
            welcome = await self._handle.join.remote(
                introduction,
                session_id,
                [own] if own is not None else [],
                [self._keepalive],
            )
        self.epoch, self.timeouts = welcome.epoch, welcome.timeouts
        self._on_command(messages.ConfigChanged(welcome.table))
        self.lost.clear()
        self.joined.set()
        self._wake_sender()
        self._on_joined()

    def _introduction(self) -> ev.Joined:
        """Returns what this holder tells an arbiter that it joins: itself, its process and all its
        tickets."""
        own = procfs.process(os.getpid())
        assert own is not None
        name = own.pid, own.start_ticks
        node, is_driver = ray_internals.own_node(), ray_internals.own_handle() is None
        held = self._held_tickets()
        return ev.Joined(self.holder, node, self.capability, held, *name, is_driver=is_driver)

    def _leave(self) -> None:
        """Leaves the epoch, if it is in one, and wakes all that waits for an answer there."""
        if self.epoch is not None:
            self._unreachable_since = time.monotonic()
        self.epoch = None
        if self.arbiter is not None:
            self.arbiter.close()
            self.arbiter = None
        self.joined.clear()
        self.lost.set()

    # -- commands and heartbeats -----------------------------------------------------------------

    async def _listen(self) -> None:
        """Performs the arbiter's commands as they come. Returns when another call found the epoch
        over; raises what the call that listens raises."""
        ack, lost = 0, asyncio.ensure_future(self.lost.wait())
        try:
            while self.epoch is not None:
                listening = asyncio.ensure_future(self._next_commands(self.epoch, ack))
                try:
                    await asyncio.wait({listening, lost}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    listening.cancel()  # unless it is done; nothing else would see how it ends
                if not listening.done():
                    return
                for command in listening.result():
                    ack = command.sequence
                    self._on_command(command.command)
        finally:
            lost.cancel()

    async def _next_commands(self, epoch: Epoch, ack: int) -> tuple[messages.SequencedCommand, ...]:
        """Returns the next commands, and acknowledges those up to `ack`."""
        assert self.arbiter is not None
        commands: tuple[messages.SequencedCommand, ...] = await self.arbiter.call(
            "listen", self.holder, epoch, ack
        )
        return commands

    async def _renew(self) -> None:
        """Sends a heartbeat every RENEW_S while joined, without end."""
        while True:
            await asyncio.sleep(RENEW_S)
            epoch, arbiter = self.epoch, self.arbiter
            if epoch is None or arbiter is None:
                continue
            runs, dropped = self.request_log.untold()
            counted = self.request_log.usage(), self.request_log.times()
            renewed = ev.Renewed(self.holder, self._held_tickets(), runs, dropped, *counted)
            try:
                await self.call(arbiter, "renew", epoch, renewed, within_s=ANSWER_S)
            except (StaleEpoch, rpc.ConnectionLost, rpc.RemoteError):
                self.lose(epoch)
            else:
                self.request_log.forget_told(renewed)

    # -- the outbox ------------------------------------------------------------------------------

    def tell(self, event: ev.Event) -> None:
        """Sends the event once this holder has joined, in the order of the calls. A full outbox
        drops what a rejoin tells anyway, and this holder rejoins."""
        if len(self._outbox) >= OUTBOX_MOST_COUNT:
            self._drop_what_a_join_says()
            self._must_rejoin = True
        self._outbox.append(event)
        self.outbox_empty.clear()
        self._outbox_ready.set()

    def _clear_outbox(self) -> None:
        """Drops what the join that follows tells anyway, and lets the rest be sent."""
        self._drop_what_a_join_says()
        self._must_rejoin = False
        self._wake_sender()

    def _drop_what_a_join_says(self) -> None:
        """Drops the events that a rejoin says anyway; of the others it keeps the newest, half an
        outbox at most."""
        unsaid = [event for event in self._outbox if isinstance(event, UNSAID_BY_JOIN)]
        self._outbox = deque(unsaid[-(OUTBOX_MOST_COUNT // 2) :])

    def _wake_sender(self) -> None:
        """Lets the sender go on where the outbox has events, and those that wait for an empty one
        otherwise."""
        if self._outbox:
            self._outbox_ready.set()
        else:
            self.outbox_empty.set()

    async def _send(self) -> None:
        """Sends the outbox, first event first, while joined, without end."""
        while True:
            await self._outbox_ready.wait()
            await self.joined.wait()
            epoch, arbiter = self.epoch, self.arbiter
            if not self._outbox or epoch is None or arbiter is None:
                self._outbox_ready.clear()
                self._wake_sender()
            elif self._must_rejoin:
                self.lose(epoch)
            else:
                await self._send_first(epoch, arbiter)

    async def _send_first(self, epoch: Epoch, arbiter: rpc.Peer) -> None:
        """Sends the first event of the outbox, and drops it once the arbiter has received it or has
        failed on it."""
        event = self._outbox[0]
        try:
            await self.call(arbiter, "tell", epoch, self.holder, event, within_s=ANSWER_S)
        except (StaleEpoch, rpc.ConnectionLost):
            return self.lose(epoch)
        except (rpc.RemoteError, RequestError) as error:
            logger.error("the arbiter failed on %r: %r", event, error)
        if self._outbox and self._outbox[0] is event:
            self._outbox.popleft()
