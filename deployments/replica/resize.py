"""A resident model is to have more memory, or gives it back (A14): for a longer context, a
larger KV cache. No engine here can enlarge its own, so growth is a restart of its process, under
the same ticket: the bytes are granted first, while it serves on; then what is in flight ends, and
the node's agent puts a new process in the place of the old.

Who cannot have the bytes goes on with what it has. A restart that fails ends the ticket, and the
next request loads the model as it was at first.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, Protocol

from arbiter.client.holder import HolderClient
from arbiter.core import events as ev
from arbiter.core.decisions import Reason
from arbiter.errors import EngineLost, GrowthRefused, LoadFailed, RequestError, TicketClosed
from arbiter.node.zygote_client import ZygoteError
from arbiter.protocol.messages import ModelSize, Resize
from arbiter.units import Bytes, Span, in_seconds, seconds
from deployments.config.load_plan import ModelPlan
from deployments.engines.protocol import COULD_GROW
from deployments.messages import Progress, ResponseHead
from deployments.replica import unloading
from deployments.replica.background import detached_task
from deployments.replica.engine_client import LoadRefused, why
from deployments.replica.held_model import Before, HeldModel, HolderState, Opens

logger = logging.getLogger("arbiter.residency")

ROOM = seconds(30)  # for idle models to make room: three barriers
BARRIER = seconds(10)  # A9: for what is in flight to end
RESTART = seconds(600)  # the arbiter's own default for a load (settings.Terms.load)


class ResidencyApi(Protocol):
    """What growth needs of Residency."""

    slots: dict[str, HeldModel]

    def client(self) -> HolderClient: ...
    async def start_engine(self, slot: HeldModel, opens: Opens) -> float: ...
    def end(self, slot: HeldModel, reason: Reason, error: RequestError | None = None) -> None: ...


def asks_for_more(part: object) -> bool:
    """An answer by which an engine says that it would do with more memory."""
    return isinstance(part, ResponseHead) and COULD_GROW in part.headers


def unmarked(part: Progress | ResponseHead | bytes) -> Progress | ResponseHead | bytes:
    """As a client may see it."""
    if not isinstance(part, ResponseHead) or COULD_GROW not in part.headers:
        return part
    kept = {name: value for name, value in part.headers.items() if name != COULD_GROW}
    return replace(part, headers=kept)


async def grow(keeper: ResidencyApi, model: str) -> None:
    """To what its configuration allows; whoever asks meanwhile waits for the same. Nothing happens
    to one that has it already. Raises GrowthRefused, NeverFits, TicketClosed, LoadFailed,
    ArbiterUnavailable."""
    for _ in range(2):  # the first may only wait for a change under way: that it gives back
        slot = keeper.slots.get(model)
        if slot is None or (slot.growth is None and slot.plan.grown is None):
            return
        await _alone(keeper, slot, _grow)


async def give_back(keeper: ResidencyApi, model: str) -> None:
    """It is again what it was before it grew. Raises GrowthRefused when what is in flight does not
    end, TicketClosed, LoadFailed."""
    slot = keeper.slots.get(model)
    if slot is None or (slot.growth is None and slot.before is None):
        return
    await _alone(keeper, slot, _shrink)


async def by_hand(keeper: ResidencyApi, order: Resize) -> None:
    """Somebody asks from outside; what comes of it is in the events and the log."""
    change = grow if order.size is ModelSize.GROWN else give_back
    with contextlib.suppress(RequestError):
        await change(keeper, order.model)


async def _alone(keeper: ResidencyApi, slot: HeldModel, change: "Change") -> None:
    """One change of size at a time; it goes on when who asked for it leaves."""
    task = slot.growth or _begin(keeper, slot, change)
    await asyncio.wait({task})
    if task.cancelled():
        raise TicketClosed(slot.ticket)
    task.result()


def _begin(keeper: ResidencyApi, slot: HeldModel, change: "Change") -> asyncio.Task[None]:
    slot.growth = task = detached_task(change(keeper, slot))
    task.add_done_callback(lambda task: _note_end(keeper, slot, task))
    return task


class Change(Protocol):
    """What `_grow` and `_shrink` are."""

    def __call__(self, keeper: ResidencyApi, slot: HeldModel) -> Coroutine[Any, Any, None]: ...


def _note_end(keeper: ResidencyApi, slot: HeldModel, task: asyncio.Task[None]) -> None:
    """What the world breaks was dealt with. Anything else is a bug, which costs this slot and keeps
    nobody waiting."""
    slot.growth = None
    error = None if task.cancelled() else task.exception()
    if isinstance(error, RequestError):
        logger.warning("%s keeps its size, or ends: %s", slot.ticket, error)
    elif error is not None:
        logger.error("%s: its growth failed", slot.ticket, exc_info=error)
        failed = LoadFailed(slot.model, f"{type(error).__name__}: {error}", False)
        keeper.end(slot, Reason.FAILED, failed)


async def _grow(keeper: ResidencyApi, slot: HeldModel) -> None:
    plan, before = slot.plan.grown, Before(slot.plan, slot.devices)
    if plan is None:
        return
    more = Bytes(plan.need.device_bytes - before.plan.need.device_bytes)
    granted = await keeper.client().grow(slot.ticket, more, ROOM)
    slot.devices = granted.devices
    try:
        await _restart(keeper, slot, plan, granted.load_within)
    except (GrowthRefused, TicketClosed):  # one that is revoked may outlive that, as it was
        slot.devices = before.devices
        keeper.client().tell(ev.GaveBack(slot.ticket, slot.devices))
        raise
    slot.before = before
    _look_later(keeper, slot, plan.stays_grown, plan.stays_grown)


def _look_later(keeper: ResidencyApi, slot: HeldModel, stays: Span, after: Span) -> None:
    """In the place of a look to come, which may be of an earlier growth."""
    if slot.gives_back:
        slot.gives_back.cancel()
    look, loop = _give_back_once_idle, asyncio.get_running_loop()
    slot.gives_back = loop.call_later(in_seconds(after), look, keeper, slot, stays)


def _give_back_once_idle(keeper: ResidencyApi, slot: HeldModel, stays: Span) -> None:
    """Nobody has asked it anything for as long as it stays grown. Each look is the cause of the
    next, until one finds the slot as it was before it grew, or closed."""
    if slot.life is HolderState.CLOSED or slot.before is None:
        return
    idle = Span(0) if slot.inflight else Span(time.monotonic_ns() - slot.last_end_ns)
    if idle < stays:
        return _look_later(keeper, slot, stays, Span(stays - idle))
    if slot.life is HolderState.RESIDENT and slot.growth is None:
        _begin(keeper, slot, _shrink)
    _look_later(keeper, slot, stays, stays)  # should it come to nothing


async def _shrink(keeper: ResidencyApi, slot: HeldModel) -> None:
    before = slot.before
    if before is None:
        return
    await _restart(keeper, slot, before.plan, RESTART)
    slot.before, slot.devices = None, before.devices  # the next look finds this, and is the last
    keeper.client().tell(ev.GaveBack(slot.ticket, slot.devices))


async def _restart(keeper: ResidencyApi, slot: HeldModel, plan: ModelPlan, within: Span) -> None:
    """Raises GrowthRefused having changed nothing; TicketClosed, LoadFailed when the ticket is
    over."""
    if slot.life is not HolderState.RESIDENT:
        raise TicketClosed(slot.ticket)
    slot.life, slot.restarts = HolderState.DRAINING, True
    try:
        is_empty = await unloading.emptied(slot, BARRIER)
        if slot.life is not HolderState.DRAINING:  # its engine died, or it was taken away
            raise TicketClosed(slot.ticket)
        if not is_empty:
            slot.life = HolderState.RESIDENT
            slot.admit()
            cause = f"what is in flight did not end in {in_seconds(BARRIER):.0f} s"
            raise GrowthRefused(slot.ticket, plan.need.device_bytes, cause)
        await _replace(keeper, slot, plan, within)
    finally:
        slot.restarts = False


async def _replace(keeper: ResidencyApi, slot: HeldModel, plan: ModelPlan, within: Span) -> None:
    """One process goes and another takes its place, socket and ticket."""
    old, began = slot.link, time.monotonic()
    slot.life, slot.link, slot.plan = HolderState.LOADING, None, plan
    assert old is not None
    try:
        async with asyncio.timeout(in_seconds(within)):
            await keeper.start_engine(slot, keeper.client().respawn)
    except (TimeoutError, LoadRefused, EngineLost, ZygoteError, RequestError) as error:
        failed = LoadFailed(slot.model, why(error, time.monotonic() - began)[0], False)
        keeper.end(slot, Reason.FAILED, failed)
        raise failed from error
    finally:
        old.cut()
    slot.life, slot.last_end_ns = HolderState.RESIDENT, time.monotonic_ns()
    slot.admit()
    await old.closed()
