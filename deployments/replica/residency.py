"""The life every capability shares: ticket, load, serve, drain, sleep, wake, unload.

    async with residency.use("chat-tiny") as engine:
        async for part in engine.stream("POST", "/v1/chat/completions", headers, body): ...

A request for a resident model costs a counter here and no message anywhere. Everything else is one
task per model (single flight) that whoever needs the model waits for. All state lives on one event
loop, and no step between looking at it and changing it awaits.
"""

import asyncio
import contextlib
import contextvars
import logging
import time
import uuid
from collections.abc import Coroutine
from typing import Any

from arbiter.client import gang_request
from arbiter.client.holder import HolderClient
from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Reason, Tier
from arbiter.errors import (
    ENGINE_DIED,
    DeadlineUnmet,
    EngineLost,
    LoadFailed,
    RequestError,
    TicketClosed,
)
from arbiter.node.zygote_client import ZygoteError
from arbiter.protocol import messages
from arbiter.units import HolderId, TicketId, in_seconds, seconds
from deployments.config.load_plan import ModelPlan, Plans, parts
from deployments.messages import ResponseHead
from deployments.replica import resize, unloading, watchdog
from deployments.replica.background import BackgroundTasks, detached_task
from deployments.replica.engine_client import EngineLink, LoadRefused, why
from deployments.replica.held_model import UNDER_WAY, HeldModel, HolderState, Opens, new_ticket
from deployments.replica.use import Use, one_shot
from deployments.replica.watchdog import start_watchdog

logger = logging.getLogger("arbiter.residency")

# A model may go again before this request's turn; a longer chain is a fault that it hears of.
TURNS = 5
SAY_S = 1.0  # one message takes 1 ms; an arbiter that is away learns of the end from the agent


class Residency:
    """One per holder, on its event loop."""

    def __init__(self, capability: str, holder: HolderId) -> None:
        self.capability, self.holder = capability, holder
        self.slots: dict[str, HeldModel] = {}  # by model; the one new requests go to
        self._held: dict[TicketId, HeldModel] = {}  # those with bytes
        self._plans = Plans(capability)
        self._client: HolderClient | None = None
        self._pinned: frozenset[str] = frozenset()
        self._chores = BackgroundTasks()
        self._closed = False

    @classmethod
    def start(cls, capability: str, holder: str | None = None) -> "Residency":
        """Joins the arbiter in the background; takes no ticket and loads nothing."""
        residency = cls(capability, HolderId(holder or f"{capability}#{uuid.uuid4().hex[:8]}"))
        with contextlib.suppress(RuntimeError):  # no event loop yet: joins at the first use
            residency.client()
        return residency

    def client(self) -> HolderClient:
        if self._client is None:
            asyncio.get_running_loop()
            mine = self.capability, self.holder, self.account, self._obey
            self._client = contextvars.Context().run(HolderClient, *mine)  # as in chores.apart
        return self._client

    def use(
        self,
        model: str,
        *,
        deadline_s: float | None = None,
        priority: types.Priority = types.Priority.NORMAL,
        request: str = "",
        client: types.Client = types.ANYBODY,
    ) -> Use:
        """`async with` it. Raises RequestError: unknown, not in time, failed, no arbiter."""
        return Use(self, model, deadline_s, priority, request, client)

    async def request(
        self, model: str, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[ResponseHead, bytes]:
        """One-shot use."""
        return await one_shot(self.use(model), method, path, headers, body)

    async def grow(self, model: str) -> None:
        """A resident gets what its `grow_to` says (A14); growing.give_back: the reverse."""
        await resize.grow(self, model)

    def account(self) -> tuple[ev.HeldTicket, ...]:
        return tuple(slot.account() for slot in self._held.values())

    async def close(self) -> None:
        """Releases everything; requests in flight hear EngineLost."""
        self._closed = True
        for slot in {*self.slots.values(), *self._held.values()}:
            if slot.work:
                slot.work.cancel()
            self.end(slot, Reason.SHUTDOWN)
        if self._client:
            await self._client.close()
        await self._chores.done()

    # -- coming in -----------------------------------------------------------------------------

    async def enter(
        self, model: str, deadline_s: float | None, priority: types.Priority, client: types.Client
    ) -> HeldModel:
        """The model's slot with this request counted as in flight."""
        until_s = None if deadline_s is None else time.monotonic() + deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                for _ in range(TURNS):
                    slot = self.slots.get(model) or await self._open(model)
                    if slot.life is HolderState.RESIDENT:
                        slot.enter(priority, client)
                        return slot
                    if slot.note(priority, client, until_s):
                        self.client().tell(slot.asks(self.holder, self.capability))
                    if slot.life is HolderState.ASLEEP:
                        self._begin(slot, self._wake(slot))
                    if await self._wait(slot, until_s):
                        return slot
        except TimeoutError:
            ticket = self.slots[model].ticket if model in self.slots else TicketId(model)
            raise DeadlineUnmet(ticket, deadline_s or 0.0, 1.0) from None
        raise EngineLost(model, TicketId(model))

    async def _wait(self, slot: HeldModel, until_s: float | None) -> bool:
        """True: in flight. False: look again. Raises what the load failed with, DeadlineUnmet."""
        waiter = slot.wait(until_s)
        try:
            return await waiter
        except (asyncio.CancelledError, DeadlineUnmet):
            slot.waiters.pop(waiter, None)
            if waiter.done() and not waiter.cancelled() and not waiter.exception():
                if waiter.result():
                    slot.leave()
            elif not slot.waiters:
                self._abandon(slot)
            raise

    def _abandon(self, slot: HeldModel) -> None:
        """Nobody waits any more (A8). In the line: out of it. Of a load under way the arbiter
        knows how much is left. What is wanted with nobody waiting goes on."""
        if slot.wanted or slot.model in self._pinned:
            return
        if slot.life is HolderState.QUEUED and slot.work:
            slot.work.cancel()
            if slot.ticket in self._held:
                slot.life = HolderState.ASLEEP  # it was to be woken, and sleeps on
            else:
                self._forget(slot)
        elif slot.life is HolderState.LOADING:
            self.client().tell(ev.Withdrawn(slot.ticket))

    async def _open(self, model: str) -> HeldModel:
        """A slot with its load under way; another request may have opened it meanwhile."""
        made = await self.plan(model)
        return self.slots.get(model) or self.open(HeldModel(made, new_ticket(model)))

    async def plan(self, model: str) -> ModelPlan:
        """Once there is a table. Raises RequestError."""
        if self._closed:
            raise TicketClosed(TicketId(model))
        if not self._plans.known:
            await self.client().joined()
        return await self._plans.of(model)

    def open(self, slot: HeldModel) -> HeldModel:
        """Begins its load; there is no other of its model."""
        self.slots[slot.model] = slot
        self._begin(slot, self._bring(slot))
        return slot

    # -- load and wake -------------------------------------------------------------------------

    def _begin(self, slot: HeldModel, work: Coroutine[Any, Any, None]) -> None:
        if slot.life is HolderState.ASLEEP:
            slot.life = HolderState.QUEUED  # to be woken; whoever comes now waits for the same wake
        slot.work = detached_task(work)
        slot.work.add_done_callback(lambda ended: self._worked(slot, ended))

    def _worked(self, slot: HeldModel, ended: asyncio.Task[None]) -> None:
        """What the world breaks it has dealt with. Anything else is a bug, which ends this slot."""
        if slot.work is not ended:
            return
        if ended.cancelled():
            if slot.life in UNDER_WAY:  # not by us
                self.end(slot, Reason.WITHDRAWN)
        elif error := ended.exception():
            logger.error("%s: the work on it failed", slot.ticket, exc_info=error)
            failed = LoadFailed(slot.model, f"{type(error).__name__}: {error}", False)
            self.end(slot, Reason.FAILED, failed)

    async def _bring(self, slot: HeldModel) -> None:
        """QUEUED -> RESIDENT; tried again after a failure for memory or a death without a word."""
        try:
            try:
                await self._load(slot)
            except LoadFailed as failed:
                if not failed.out_of_memory and failed.cause != ENGINE_DIED:
                    raise
                slot.try_again()
                await self._load(slot)
        except TicketClosed:
            self.end(slot, Reason.WITHDRAWN)
        except RequestError as error:
            logger.warning("%s: %s", slot.ticket, error)
            self.end(slot, Reason.FAILED, error)

    async def _acquire(self, slot: HeldModel) -> messages.Granted:
        """The grant of the model's ticket, with those of its gang. Raises RequestError."""
        asked, gang = slot.asks(self.holder, self.capability), slot.gang
        if gang is None:
            return await self.client().acquire(asked)
        try:
            return await gang_request.acquire(self.client(), asked, gang)
        except (RequestError, asyncio.CancelledError):
            # The ticket may have been granted while another of the gang was refused.
            self.client().tell(ev.Withdrawn(slot.ticket))
            raise

    async def _load(self, slot: HeldModel) -> None:
        granted = await self._acquire(slot)
        self._hold(slot, granted)
        try:
            async with asyncio.timeout(in_seconds(granted.load_within)):
                opened = await self.start_engine(slot, self.client().spawn)
        except (TimeoutError, LoadRefused, EngineLost, ZygoteError, RequestError) as error:
            if isinstance(error, TicketClosed):
                raise
            raise await self._broke(slot, error) from error
        self._resident(slot, time.monotonic() - opened)

    async def start_engine(self, slot: HeldModel, opens: Opens) -> float:
        """When its process was there: waiting for a zygote is no part of what a load takes."""
        spec = messages.SpawnSpec(
            slot.plan.entry, slot.plan.config | parts(slot.devices), slot.devices
        )
        await watchdog.look(slot)
        path, opened = await opens(slot.ticket, spec), time.monotonic()
        slot.link = link = EngineLink(slot.model, slot.ticket, path)
        await link.hold(lambda: self._lost(slot, link))
        await link.ready()
        return opened

    async def _broke(self, slot: HeldModel, error: Exception) -> LoadFailed:
        """Say why, and only then let go of the engine: its end alone says less."""
        cause, out_of_memory = why(error, (time.monotonic_ns() - slot.granted_ns) / 1e9)
        self.client().tell(ev.LoadBroke(slot.ticket, cause, out_of_memory))
        await self.client().quiet(SAY_S)
        self._let_go(slot)
        return LoadFailed(slot.model, cause, out_of_memory)

    async def _wake(self, slot: HeldModel) -> None:
        """ASLEEP -> RESIDENT under the same ticket."""
        if await watchdog.is_stale(slot):
            self._outdated(slot)
            return self.end(slot, Reason.MANUAL)
        try:
            granted = await self.client().acquire(slot.asks(self.holder, self.capability))
        except TicketClosed:
            return self.end(slot, Reason.LOST)
        except RequestError as error:
            slot.life, slot.wanted = HolderState.ASLEEP, False
            return slot.turn_back(error)
        began = time.monotonic()
        self._hold(slot, granted)
        assert slot.link is not None
        try:
            async with asyncio.timeout(in_seconds(granted.load_within)):
                woken = await slot.link.wake()
        except (TimeoutError, LoadRefused, EngineLost) as error:
            failed = await self._broke(slot, error)
            return self.end(slot, Reason.FAILED, failed)
        self._resident(slot, time.monotonic() - began, woken.verified)

    def _hold(self, slot: HeldModel, granted: messages.Granted) -> None:
        slot.granted(granted)
        self._held[slot.ticket] = slot

    def _resident(self, slot: HeldModel, took_s: float, verified: bool = True) -> None:
        slot.life, slot.last_end_ns, slot.wanted = HolderState.RESIDENT, time.monotonic_ns(), False
        self.client().tell(ev.Loaded(slot.ticket, seconds(took_s), verified))
        slot.admit()
        if slot.watched is None:
            slot.watched = start_watchdog(slot, self._outdated, self.end)

    # -- going out -----------------------------------------------------------------------------

    def _obey(self, command: messages.Command) -> None:
        match command:
            case messages.RevokeOrder():
                if slot := self._held.get(command.ticket):
                    self._revoke(slot, command)
            case messages.WaitEstimate(ticket, predicted):
                for slot in [s for s in self.slots.values() if s.ticket == ticket]:
                    slot.expected(predicted)
            case messages.ReloadOrder(model):
                self._chores.begin(self._bring_back(model))
            case messages.Resize():
                self._chores.begin(resize.by_hand(self, command))
            case messages.ConfigChanged(table):
                self._take_table(table)

    def _revoke(self, slot: HeldModel, order: messages.RevokeOrder) -> None:
        """Without a barrier the agent ends it in any case; a load finds out by itself, and why."""
        if slot.life is HolderState.LOADING and order.reason is Reason.LOST:
            return
        if slot.restarts and order.barrier:
            self.client().tell(ev.Busy(slot.ticket, 1))
        elif order.barrier == 0:
            ended = LoadFailed(slot.model, "the arbiter ended its load", False)
            self.end(slot, order.reason, ended if order.reason is Reason.FAILED else None)
        elif slot.life is not HolderState.RESIDENT:
            return  # an order sent twice, or overtaken by what happened here
        elif slot.inflight and order.reason.only_if_idle:
            self.client().tell(ev.Busy(slot.ticket, slot.inflight))
        else:
            slot.life = HolderState.DRAINING
            self._begin(slot, self._drain(slot, order))

    async def _drain(self, slot: HeldModel, order: messages.RevokeOrder) -> None:
        if not await unloading.emptied(slot, order.barrier):
            return unloading.drop_barrier(slot, self.client())
        slot.life = HolderState.UNLOADING
        if order.to is Tier.GONE or not await unloading.fell_asleep(slot):
            return self.end(slot, order.reason)
        slot.life = HolderState.ASLEEP
        self.client().tell(ev.Slept(slot.ticket))
        slot.turn_back()

    def _lost(self, slot: HeldModel, link: EngineLink) -> None:
        """The lifeline broke. A load or wake under way notices by itself."""
        if slot.link is link and slot.life not in (HolderState.LOADING, HolderState.CLOSED):
            logger.warning("the engine of %s is gone", slot.ticket)
            self.end(slot, Reason.LOST)

    def end(self, slot: HeldModel, reason: Reason, error: RequestError | None = None) -> None:
        """End of the slot. Waiters hear the error, or open the next one."""
        if slot.life is HolderState.CLOSED:
            return
        if slot.ticket in self._held:  # said first: somebody may wait for its bytes
            self.client().tell(ev.Released(slot.ticket, reason.value))
        self._let_go(slot)
        for work in (slot.work, slot.growth):
            if work and work is not asyncio.current_task():
                work.cancel()
        self._forget(slot)
        slot.turn_back(error)
        if reason in (Reason.LOST, Reason.FAILED):
            self._pin_again(slot.model, 0.0 if error is None else error.retry_after_s)

    def _outdated(self, slot: HeldModel) -> None:
        """Its files are others now: no request that comes from here on gets the old one."""
        self._plans.forget(slot.model)
        if slot.life is HolderState.RESIDENT:
            slot.life = HolderState.DRAINING
            del self.slots[slot.model]

    def _let_go(self, slot: HeldModel) -> None:
        self._held.pop(slot.ticket, None)
        if slot.link:
            slot.link.cut()
            self._chores.begin(slot.link.closed())
            slot.link = None

    def _forget(self, slot: HeldModel) -> None:
        slot.life = HolderState.CLOSED
        if slot.watched:
            slot.watched.cancel()
        if self.slots.get(slot.model) is slot:
            del self.slots[slot.model]

    # -- configuration -------------------------------------------------------------------------

    def _take_table(self, raw: messages.Plain) -> None:
        """Tickets held stay; what is loaded next follows the new table."""
        self._pinned = frozenset(pinned := self._plans.take(raw))
        for model in pinned:
            self._chores.begin(self._bring_back(model))

    def _pin_again(self, model: str, after_s: float | None) -> None:
        """A pinned model is tried again once that may help; None: it will not."""

        def bring() -> None:
            if model in self._pinned and not self._closed:
                self._chores.begin(self._bring_back(model))

        if after_s is not None:
            asyncio.get_running_loop().call_later(after_s, bring)

    async def _bring_back(self, model: str) -> None:
        """Load with nobody waiting: pinned, or it had made room for a load that failed."""
        try:
            slot = await self._open(model)
        except RequestError as error:
            logger.warning("%s is not brought back: %s", model, error)
            return
        if slot.life is HolderState.ASLEEP:
            self._begin(slot, self._wake(slot))
        slot.wanted = slot.life in (HolderState.QUEUED, HolderState.LOADING)
