"""The models of one holder, and the life that every capability shares: ticket, load, serve, sleep,
wake, unload.

    async with residency.use("chat-tiny") as engine:
        async for part in engine.stream("POST", "/v1/chat/completions", headers, body): ...

A request for a resident model costs a counter here and no message anywhere. Everything else is one
task per model (single flight) that every request for the model waits for. All state lives on one
event loop, and no step between looking at it and changing it awaits.

This file has the requests' way in and the arbiter's commands. In lifecycle/, loading.py makes
a model resident, unloading.py ends that, and resize.py changes its size; held_model.py has the
table of its states.
"""

import asyncio
import contextlib
import contextvars
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from arbiter.client.holder import HolderClient
from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Reason
from arbiter.errors import DeadlineUnmet, EngineLost, LoadFailed, RequestError, TicketClosed
from arbiter.protocol import messages
from arbiter.units import HolderId, TicketId
from deployments.config.load_plan import ModelPlan, Plans
from deployments.replica.background import BackgroundTasks, detached_task
from deployments.replica.engine_client import LoadRefused
from deployments.replica.held_model import LEAVING, UNDER_WAY, HeldModel, HolderState, new_ticket
from deployments.replica.lifecycle import loading, resize, unloading
from deployments.replica.model_files import loaded_files
from deployments.replica.use import Use

logger = logging.getLogger("arbiter.residency")

# How often a request waits for a model, which may leave again before the request enters it. A
# request that is not served after so many attempts gets EngineLost.
ATTEMPTS_COUNT = 5
# Seconds, at least, until a load without a request is tried again where it was refused: its plan
# may have failed because its files are being copied at the moment.
RETRY_PLAN_S = 10.0


class Residency:
    """Every model that one holder has or asks for (see ResidencyApi). One per holder."""

    def __init__(self, capability: str, holder: HolderId) -> None:
        self.capability, self.holder = capability, holder
        self.models: dict[str, HeldModel] = {}  # by name; new requests go to these
        self.tickets: dict[TicketId, HeldModel] = {}  # those that hold bytes
        self.plans = Plans(capability)
        self.background = BackgroundTasks()
        self._client: HolderClient | None = None
        self.on_tenant_removed: Callable[[str], None] = lambda tenant: None
        self._pinned: frozenset[str] = frozenset()
        # How often the arbiter withdrew a load without a request, by model.
        self._withdrawn: Counter[str] = Counter()
        # When each tenant was removed, on the monotonic clock; few, because a person removes them.
        self._removed_ns: dict[str, int] = {}
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
            # Raises RuntimeError without a loop: a session's tasks would be of another loop.
            asyncio.get_running_loop()
            mine = self.capability, self.holder, self.held_tickets, self._on_command
            # A context of its own, as in background.detached_task.
            self._client = contextvars.Context().run(HolderClient, *mine)
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
        """Returns one use of a model, to be entered by `async with`: that waits until the model
        serves. `deadline_s`: seconds from then that it may wait; None: as long as it takes.
        `request`: the request's id, for the event log. Entering raises UnknownModel,
        UnknownCapability, DeadlineUnmet, LoadFailed, ArbiterUnavailable, or what else the arbiter
        refuses with."""
        return Use(self, model, deadline_s, priority, request, client)

    async def grow(self, model: str) -> None:
        """Gives a resident model what its `grow_to` says (A14); resize.give_back is the reverse."""
        await resize.grow(self, model)

    def held_tickets(self) -> tuple[ev.HeldTicket, ...]:
        """Returns every ticket with bytes, for the heartbeat."""
        return tuple(held.heartbeat_entry() for held in self.tickets.values())

    async def close(self) -> None:
        """Releases everything; requests in flight hear EngineLost."""
        self._closed = True
        for held in {*self.models.values(), *self.tickets.values()}:
            if held.work:
                held.work.cancel()
            unloading.end(self, held, Reason.SHUTDOWN)
        if self._client:
            await self._client.close()
        await self.background.done()

    # -- a request's way in --------------------------------------------------------------------

    async def begin_request(
        self, model: str, deadline_s: float | None, priority: types.Priority, client: types.Client
    ) -> HeldModel:
        """Returns the held model once it serves, with this request in flight: its ticket is
        requested or its wake begun if need be. Raises RequestError; EngineLost when it left again
        ATTEMPTS_COUNT times before this request could enter."""
        until_s = None if deadline_s is None else time.monotonic() + deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                for _ in range(ATTEMPTS_COUNT):
                    held = self.models.get(model) or self._find_or_load(await self.plan(model))
                    if held.state is HolderState.RESIDENT:
                        if await self._is_current(held):
                            held.begin_request(priority, client)
                            return held
                        continue
                    if held.note_request(priority, client, until_s):
                        self.client().tell(held.ticket_request(self.holder, self.capability))
                    if held.state is HolderState.ASLEEP:
                        self.begin_work(held, loading.wake(self, held))
                    if await self._wait(held, until_s):
                        return held
        except TimeoutError:
            what = self.models[model].ticket if model in self.models else model
            raise DeadlineUnmet(what, deadline_s or 0.0, 1.0) from None
        raise EngineLost(model)

    async def _is_current(self, held: HeldModel) -> bool:
        """Whether the model still serves, from the files that are there now."""
        if await loaded_files.changed_before_request(held.files):
            unloading.outdate(self, held)
        return held.state is HolderState.RESIDENT

    async def _wait(self, held: HeldModel, until_s: float | None) -> bool:
        """Waits for the work on the model to end. True: this request is in flight now. False: the
        model's state must be looked at again. Raises what the load failed with, DeadlineUnmet."""
        waiter: asyncio.Future[bool] | None = None
        try:
            waiter = held.wait(until_s)
            return await waiter
        except (asyncio.CancelledError, DeadlineUnmet):
            if waiter is not None and _is_answered(waiter):
                if waiter.result():
                    held.end_request()
                raise
            if waiter is not None:
                held.demand.waiters.pop(waiter, None)
            if not held.demand.waiters:
                self._abandon(held)
            raise

    def _abandon(self, held: HeldModel) -> None:
        """Ends what the last waiting request had begun, which has left (A8). A queued ticket is
        withdrawn. Of a load under way the arbiter decides: it knows how much is left. A model
        wanted without requests goes on."""
        if held.demand.is_wanted or held.model in self._pinned:
            return
        if held.state is HolderState.QUEUED:
            self._leave_queue(held)
        elif held.state is HolderState.LOADING:
            self.client().tell(ev.Withdrawn(held.ticket))

    def _leave_queue(self, held: HeldModel) -> None:
        if held.work is None:
            return
        held.work.cancel()
        if held.ticket in self.tickets:
            held.move(HolderState.ASLEEP)  # it waited for its wake, and sleeps on
        else:
            unloading.close(self, held)

    def _find_or_load(self, plan: ModelPlan) -> HeldModel:
        """Returns the held model; where there is none yet, a new one with its load under way."""
        held = self.models.get(plan.model)
        return held or self.begin_load(HeldModel(plan, new_ticket(plan.model)))

    async def plan(self, model: str) -> ModelPlan:
        """Waits for the arbiter's table. Raises RequestError."""
        if self._closed:
            raise TicketClosed(model)
        if not self.plans.known:
            await self.client().wait_until_joined()
        return await self.plans.of(model)

    def begin_load(self, held: HeldModel) -> HeldModel:
        """Begins the load of a new held model; no other one has its name."""
        self.models[held.model] = held
        self.begin_work(held, loading.load(self, held))
        return held

    # -- the work on one model -----------------------------------------------------------------

    def begin_work(self, held: HeldModel, work: Coroutine[Any, Any, None]) -> None:
        """See ResidencyApi. An asleep model is queued first: a request that comes now waits for the
        same wake."""
        if held.state is HolderState.ASLEEP:
            held.move(HolderState.QUEUED)
            held.load.serves_at_ns = 0  # of a wake that was refused before
        held.work = detached_task(work)
        held.work.add_done_callback(lambda ended: self._note_end(held, ended))

    def _note_end(self, held: HeldModel, ended: asyncio.Task[None]) -> None:
        """Notes the end of a model's work, which deals with what the world breaks. Any other error
        is a bug, which ends this model and leaves the others alone."""
        if held.work is not ended:
            return
        if ended.cancelled():
            if held.state in UNDER_WAY:  # not by us
                unloading.end(self, held, Reason.WITHDRAWN)
        elif error := ended.exception():
            logger.error("%s: the work on it failed", held.ticket, exc_info=error)
            failed = LoadFailed(held.model, f"{type(error).__name__}: {error}", False)
            unloading.end(self, held, Reason.FAILED, failed)

    # -- the arbiter's commands ----------------------------------------------------------------

    def _on_command(self, command: messages.Command) -> None:
        match command:
            case messages.RevokeCommand(ticket) if ticket in self.tickets:
                unloading.revoke(self, self.tickets[ticket], command)
            case (
                messages.PurgeCommand() | messages.PrewarmCommand() | messages.ForgetTenantCommand()
            ):
                self._on_caches(command)
            case messages.WaitEstimate(ticket, predicted):
                for held in [h for h in self.models.values() if h.ticket == ticket]:
                    held.on_wait_estimate(predicted)
            case messages.ReloadCommand() | messages.WithdrawCommand():
                self._on_unasked_load(command)
            case messages.Resize():
                self.background.begin(resize.on_command(self, command))
            case messages.ConfigChanged(table):
                self._take_table(table)

    def _on_unasked_load(self, command: messages.ReloadCommand | messages.WithdrawCommand) -> None:
        match command:
            case messages.ReloadCommand(model):
                self._begin_return(model)
            case messages.WithdrawCommand(model):
                self._withdraw(model)

    def _on_caches(self, command: messages.CacheCommand) -> None:
        if isinstance(command, messages.ForgetTenantCommand):
            return self._forget_tenant(command.tenant)
        held = self.tickets.get(command.ticket)
        if held is None:
            return
        if isinstance(command, messages.PurgeCommand):
            self.background.begin(_purge(held, only_slabs=command.only_slabs))
        elif held.warmer is not None:
            held.warmer.on_speech()

    def was_removed_since(self, tenant: str, began_ns: int) -> bool:
        return began_ns <= self._removed_ns.get(tenant, -1)

    def _forget_tenant(self, tenant: str) -> None:
        self._removed_ns[tenant] = time.monotonic_ns()
        for warmer in [held.warmer for held in self.models.values() if held.warmer]:
            warmer.forget_tenant(tenant)
        self.on_tenant_removed(tenant)
        for held in self.tickets.values():
            if held.link is not None:
                self.background.begin(_warn_if_refused(held, held.link.forget_tenant(tenant)))

    def tell_caps(self, held: HeldModel) -> None:
        """See ResidencyApi."""
        caps = self.plans.slab_caps
        lives = held.state in (HolderState.RESIDENT, HolderState.DRAINING, HolderState.ASLEEP)
        if held.slab_caps != caps and lives and held.link is not None:
            held.slab_caps = caps
            self.background.begin(_warn_if_refused(held, held.link.cap_slabs(dict(caps))))

    def _take_table(self, raw: messages.Plain) -> None:
        """Tickets held stay; what is loaded next follows the new table. Caps of tenants hold for
        slabs that are in use, too."""
        self._pinned = frozenset(pinned := self.plans.take(raw))
        for held in self.tickets.values():
            self.tell_caps(held)
        for model in pinned:
            self._begin_return(model)

    def bring_back_after(
        self, model: str, after_s: float | None, *, is_wanted: bool = False
    ) -> None:
        """See ResidencyApi."""
        withdrawn_count = self._withdrawn[model]

        def bring() -> None:
            if (is_wanted or model in self._pinned) and not self._closed:
                self.background.begin(self._bring_back(model, withdrawn_count))

        if after_s is not None:
            asyncio.get_running_loop().call_later(after_s, bring)

    def _withdraw(self, model: str) -> None:
        """Ends a load without a request, unless it was granted. Requests that wait for it go on,
        and the last of them ends it. A ticket that no such load brought is of a request that is
        about to wait, as for a gang."""
        self._withdrawn[model] += 1
        held = self.models.get(model)
        if held is None:
            return
        was_wanted, held.demand.is_wanted = held.demand.is_wanted, False
        if was_wanted and held.state is HolderState.QUEUED and not held.demand.waiters:
            self._leave_queue(held)

    def _begin_return(self, model: str) -> None:
        self.background.begin(self._bring_back(model, self._withdrawn[model]))

    async def _bring_back(self, model: str, withdrawn_count: int) -> None:
        """Loads without a request: the model is pinned, or had made room for a load that failed.
        Not where that was withdrawn since it began. A model that is just leaving leaves first."""
        try:
            plan = await self.plan(model)
            if self._withdrawn[model] > withdrawn_count:
                return
            held = self._find_or_load(plan)
            if held.state in LEAVING:
                if await held.wait(None):
                    return held.end_request()  # it serves on
                return await self._bring_back(model, withdrawn_count)
        except RequestError as error:
            logger.warning("%s is not brought back: %s", model, error)
            again_s = error.retry_after_s
            return self.bring_back_after(
                model, None if again_s is None else max(again_s, RETRY_PLAN_S)
            )
        if held.state is HolderState.ASLEEP:
            self.begin_work(held, loading.wake(self, held))
        held.demand.is_wanted = held.state in (HolderState.QUEUED, HolderState.LOADING)


def _is_answered(waiter: asyncio.Future[bool]) -> bool:
    return waiter.done() and not waiter.cancelled() and waiter.exception() is None


async def _purge(held: HeldModel, *, only_slabs: bool) -> None:
    """Empties the caches of a model that serves. Asleep it has none but its slabs, and in every
    other state it is about to end."""
    is_asleep = held.state is HolderState.ASLEEP
    is_served = held.state is HolderState.RESIDENT or (is_asleep and only_slabs)
    if held.link is None or not is_served:
        return
    await _warn_if_refused(held, held.link.shrink_slabs() if only_slabs else held.link.purge())


async def _warn_if_refused(held: HeldModel, call: Coroutine[Any, Any, None]) -> None:
    """Awaits a call of the engine. A failure is logged, and the engine goes on as it is."""
    try:
        await call
    except (EngineLost, LoadRefused) as error:
        logger.warning("%s: its caches stay as they are: %s", held.ticket, error)
