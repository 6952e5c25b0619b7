"""A resident model gets more memory, or gives it back (A14): for a longer context, a larger KV
cache; or it gives its drafter's back (F9), in place where the engine can. No engine here can
enlarge its own memory, so growth is a restart of its process under the same ticket: the bytes are
granted first, while the model serves on; then the requests in flight end, and the node's agent puts
a new process in the place of the old.

A model that is refused the bytes goes on with what it has. A restart that fails ends the ticket,
and the next request loads the model as it was at first.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, Protocol

from arbiter.core import events as ev
from arbiter.core.decisions import Reason
from arbiter.core.types import DeviceBytes
from arbiter.errors import (
    ArbiterUnavailable,
    EngineLost,
    GrowthRefused,
    LoadFailed,
    RequestError,
    TicketClosed,
)
from arbiter.node.zygote_client import ZygoteError
from arbiter.protocol.messages import ModelSize, Resize
from arbiter.units import Bytes, Span, in_seconds
from deployments.config.load_plan import ModelPlan
from deployments.engines.protocol import COULD_GROW
from deployments.messages import Progress, ResponseHead
from deployments.replica.background import detached_task
from deployments.replica.engine_client import LoadRefused, failure_cause
from deployments.replica.held_model import BeforeGrowth, HeldModel, HolderState
from deployments.replica.lifecycle import loading, unloading
from deployments.replica.residency_api import ResidencyApi

logger = logging.getLogger("arbiter.residency")

ROOM_BARRIERS = 3  # how many victims may be drained, one after the other, to make room


def asks_for_more(part: object) -> bool:
    """Whether a part is an answer by which an engine says that it could use more memory."""
    return isinstance(part, ResponseHead) and COULD_GROW in part.headers


def unmarked(part: Progress | ResponseHead | bytes) -> Progress | ResponseHead | bytes:
    """Returns the part without the mark by which an engine asks for growth."""
    if not isinstance(part, ResponseHead) or COULD_GROW not in part.headers:
        return part
    headers = {name: value for name, value in part.headers.items() if name != COULD_GROW}
    return replace(part, headers=headers)


async def grow(residency: ResidencyApi, model: str) -> None:
    """Grows it to what its configuration allows; requests that ask meanwhile wait for the same.
    Does nothing to a model that has it already. Raises GrowthRefused, NeverFits, TicketClosed,
    LoadFailed, ArbiterUnavailable."""
    for _ in range(2):  # the first may only wait for a change under way: that it gives back
        held = residency.models.get(model)
        if held is None or (held.growth.work is None and held.plan.grown is None):
            return
        await _one_at_a_time(residency, held, _grow)


async def give_back(residency: ResidencyApi, model: str) -> None:
    """Makes the model again what it was before it grew. Raises GrowthRefused when the requests in
    flight do not end, ArbiterUnavailable while there is no arbiter, TicketClosed, LoadFailed."""
    held = residency.models.get(model)
    if held is None or (held.growth.work is None and held.growth.before is None):
        return
    await _one_at_a_time(residency, held, _shrink)


async def drop_drafter(residency: ResidencyApi, model: str) -> None:
    """Goes on without the model's drafter until the model leaves (F9). Does nothing to a model that
    has no drafter, or has grown. Raises as `give_back` does."""
    held = residency.models.get(model)
    if held is not None and held.plan.without_drafter is not None:
        await _one_at_a_time(residency, held, _drop_drafter)


async def on_command(residency: ResidencyApi, command: Resize) -> None:
    """Makes the change that a person asks for, or that short memory does; what comes of it is in
    the events and the log."""
    changes = {
        ModelSize.GROWN: grow,
        ModelSize.FIRST: give_back,
        ModelSize.WITHOUT_DRAFTER: drop_drafter,
    }
    with contextlib.suppress(RequestError):
        await changes[command.size](residency, command.model)


async def _one_at_a_time(residency: ResidencyApi, held: HeldModel, change: "Change") -> None:
    """Waits for the model's change of size: the one under way, else the given one, which begins. It
    goes on when the request that asked for it leaves."""
    task = held.growth.work or _begin(residency, held, change)
    await asyncio.wait({task})
    if task.cancelled():
        raise TicketClosed(held.ticket)
    task.result()


def _begin(residency: ResidencyApi, held: HeldModel, change: "Change") -> asyncio.Task[None]:
    held.growth.work = task = detached_task(change(residency, held))
    task.add_done_callback(lambda task: _note_end(residency, held, task))
    return task


class Change(Protocol):
    """What `_grow`, `_shrink` and `_drop_drafter` are."""

    def __call__(self, residency: ResidencyApi, held: HeldModel) -> Coroutine[Any, Any, None]: ...


def _note_end(residency: ResidencyApi, held: HeldModel, task: asyncio.Task[None]) -> None:
    """Notes the end of a change, which dealt with what the world breaks. Any other error is a bug,
    which ends this model, so that no request waits for it."""
    held.growth.work = None
    error = None if task.cancelled() else task.exception()
    if isinstance(error, RequestError):
        logger.warning("%s keeps its size, or ends: %s", held.ticket, error)
    elif error is not None:
        logger.error("%s: its growth failed", held.ticket, exc_info=error)
        failed = LoadFailed(held.model, f"{type(error).__name__}: {error}", False)
        unloading.end(residency, held, Reason.FAILED, failed)


async def _grow(residency: ResidencyApi, held: HeldModel) -> None:
    plan, before = held.plan.grown, BeforeGrowth(held.plan, held.devices)
    if plan is None:
        return
    client = residency.client()
    more = Bytes(plan.need.device_bytes - before.plan.need.device_bytes)
    room = Span(ROOM_BARRIERS * client.timeouts.barrier)
    granted = await client.grow(held.ticket, more, room)
    held.devices = granted.devices
    try:
        await _restart(residency, held, plan, granted.load_within)
    except (GrowthRefused, TicketClosed, ArbiterUnavailable):
        # A model that was being revoked may yet keep its place, as it was before.
        held.devices = before.devices
        client.tell(ev.GaveBack(held.ticket, held.devices))
        raise
    held.growth.before = before
    _look_later(residency, held, plan.stays_grown, plan.stays_grown)


def _look_later(residency: ResidencyApi, held: HeldModel, stays: Span, after: Span) -> None:
    """Replaces the next look, which may be of an earlier growth."""
    if held.growth.look:
        held.growth.look.cancel()
    look, loop = _give_back_once_idle, asyncio.get_running_loop()
    held.growth.look = loop.call_later(in_seconds(after), look, residency, held, stays)


def _give_back_once_idle(residency: ResidencyApi, held: HeldModel, stays: Span) -> None:
    """Gives back after no request for as long as the model stays grown. Each look plans the next,
    until a look finds the model as it was before it grew, or closed."""
    if held.state is HolderState.CLOSED or held.growth.before is None:
        return
    requests = held.requests
    idle = Span(0) if requests.inflight else Span(time.monotonic_ns() - requests.last_end_ns)
    if idle < stays:
        return _look_later(residency, held, stays, Span(stays - idle))
    if held.state is HolderState.RESIDENT and held.growth.work is None:
        _begin(residency, held, _shrink)
    _look_later(residency, held, stays, stays)  # should it come to nothing


async def _shrink(residency: ResidencyApi, held: HeldModel) -> None:
    before = held.growth.before
    if before is None:
        return
    await _give_back(residency, held, before.plan, before.devices)
    held.growth.before = None  # the next look finds this, and is the last


async def _drop_drafter(residency: ResidencyApi, held: HeldModel) -> None:
    plan = held.plan.without_drafter
    if plan is None:
        return
    one = max(held.devices, key=lambda part: part.size_bytes)  # a pair lies on one device
    less = replace(one, size_bytes=Bytes(one.size_bytes - held.plan.need.drafter_bytes))
    devices = tuple(less if part is one else part for part in held.devices)
    if not await _dropped_in_place(residency, held):
        return await _give_back(residency, held, plan, devices)
    held.plan, held.devices = plan, devices
    residency.client().tell(ev.GaveBack(held.ticket, devices))


async def _dropped_in_place(residency: ResidencyApi, held: HeldModel) -> bool:
    """Has the engine give its drafter's memory back while it goes on with what it has in flight.
    False: only a restart does. An engine that fails over it ends, and its ticket with it. Raises
    TicketClosed."""
    if held.state is not HolderState.RESIDENT or held.link is None:
        raise TicketClosed(held.ticket)
    try:
        dropped = await held.link.drop_drafter()
    except (LoadRefused, EngineLost) as error:
        logger.warning("%s: its drafter did not leave: %s", held.ticket, error)
        raise TicketClosed(held.ticket) from error
    if held.state is not HolderState.RESIDENT and held.work is not None:
        await asyncio.wait({held.work})  # of a revoke: the model may yet keep its place
    if held.state is not HolderState.RESIDENT:
        raise TicketClosed(held.ticket)
    return dropped


async def _give_back(
    residency: ResidencyApi, held: HeldModel, plan: ModelPlan, devices: tuple[DeviceBytes, ...]
) -> None:
    client = residency.client()
    # Its process must not end for nothing: the agent starts no other while the arbiter is away.
    await client.wait_until_joined(0.0)
    await _restart(residency, held, plan, client.timeouts.load)
    held.devices = devices
    client.tell(ev.GaveBack(held.ticket, devices))


async def _restart(residency: ResidencyApi, held: HeldModel, plan: ModelPlan, within: Span) -> None:
    """Drains the model behind the barrier that a swap has, and replaces its process. Raises
    GrowthRefused or ArbiterUnavailable having changed nothing; TicketClosed, LoadFailed when the
    ticket is over."""
    if held.state is not HolderState.RESIDENT:
        raise TicketClosed(held.ticket)
    barrier = residency.client().timeouts.barrier
    held.move(HolderState.DRAINING)
    held.growth.is_restart = True
    try:
        if not await _is_emptied(held, barrier):
            await unloading.serve_on(residency, held)
            cause = f"what is in flight did not end in {in_seconds(barrier):.0f} s"
            raise GrowthRefused(held.ticket, plan.need.device_bytes, cause)
        await _replace(residency, held, plan, within)
    finally:
        held.growth.is_restart = False


async def _is_emptied(held: HeldModel, barrier: Span) -> bool:
    """Waits for the requests in flight to end. False: one outlived the barrier. Raises TicketClosed
    when the engine died meanwhile, or the arbiter ended the ticket."""
    is_empty = await held.requests.ended_within(barrier)
    if held.state is not HolderState.DRAINING:
        raise TicketClosed(held.ticket)
    return is_empty


async def _replace(residency: ResidencyApi, held: HeldModel, plan: ModelPlan, within: Span) -> None:
    """Replaces the engine's process by another, which takes its place, socket and ticket. Raises
    LoadFailed; TicketClosed where the files were replaced meanwhile; ArbiterUnavailable when the
    node agent found no arbiter to ask, and the model goes on."""
    old, began_s = held.link, time.monotonic()
    before = held.link, held.plan, held.files
    held.move(HolderState.LOADING)
    held.link, held.plan = None, plan
    assert old is not None
    try:
        async with asyncio.timeout(in_seconds(within)):
            await loading.start_engine(residency, held, residency.client().respawn)
            is_outdated = await loading.files_changed_during_load(held)
    except (OSError, LoadRefused, EngineLost, ZygoteError, RequestError) as error:
        if isinstance(error, ArbiterUnavailable) and old.is_alive:
            held.link, held.plan, held.files = before
            _serve(held)
            raise
        failed = LoadFailed(held.model, failure_cause(error, time.monotonic() - began_s)[0], False)
        unloading.end(residency, held, Reason.FAILED, failed)
        raise failed from error
    finally:
        if held.link is not old:
            old.cut()
    if is_outdated:
        residency.background.begin(old.closed())
        unloading.end_outdated(residency, held)
        raise TicketClosed(held.ticket)
    _serve(held)
    await old.closed()


def _serve(held: HeldModel) -> None:
    held.move(HolderState.RESIDENT)
    held.requests.last_end_ns = time.monotonic_ns()
    held.admit_waiting()
