"""How a model comes to serve: its grant, its engine's load, and its wake (A4, A12, D1)."""

import asyncio
import logging
import time
from dataclasses import replace

from arbiter.client import gang_request
from arbiter.core import events as ev
from arbiter.core.decisions import Reason
from arbiter.core.types import ModelName
from arbiter.errors import (
    FILES_REPLACED,
    TRIED_AGAIN,
    ArbiterUnavailable,
    EngineLost,
    LoadFailed,
    RequestError,
    TicketClosed,
)
from arbiter.node.zygote_client import ZygoteError
from arbiter.protocol.messages import Granted, SlabRequest, SpawnSpec
from arbiter.units import Span, in_seconds, seconds
from deployments.config.load_plan import parts
from deployments.replica.engine_client import EngineLink, LoadRefused, failure_cause
from deployments.replica.held_model import EngineSpawner, HeldModel, HolderState
from deployments.replica.lifecycle import unloading, watchdog
from deployments.replica.model_files import loaded_files
from deployments.replica.prefixes.prefix_warmer import PrefixWarmer
from deployments.replica.residency_api import ResidencyApi

logger = logging.getLogger("arbiter.residency")

REPORT_S = 1.0  # one message takes 1 ms; an arbiter that is away learns of the end from the agent


async def load(residency: ResidencyApi, held: HeldModel) -> None:
    """Takes a model from QUEUED to RESIDENT. A load that failed for memory, whose engine died
    without a word, or whose files were replaced meanwhile, is tried once more where it is still
    wanted."""
    try:
        try:
            await _load_once(residency, held)
        except LoadFailed as failed:
            is_tried_again = failed.out_of_memory or failed.cause in TRIED_AGAIN
            if not (is_tried_again and held.demand.is_any):
                raise
            held.try_again()
            await _load_once(residency, held)
    except TicketClosed:
        unloading.end(residency, held, Reason.WITHDRAWN)
    except RequestError as error:
        logger.warning("%s: %s", held.ticket, error)
        unloading.end(residency, held, Reason.FAILED, error)


async def _load_once(residency: ResidencyApi, held: HeldModel) -> None:
    """Raises RequestError: TicketClosed when the ticket is over, ArbiterUnavailable when no arbiter
    confirmed it, LoadFailed."""
    granted = await _acquire(residency, held)
    _take_grant(residency, held, granted)
    try:
        async with asyncio.timeout(in_seconds(granted.load_within)):
            waited = await start_engine(residency, held, residency.client().spawn)
            took_s = held.load.granted_s - in_seconds(waited)
            if await files_changed_during_load(held):
                raise LoadRefused(FILES_REPLACED, False)
    except (OSError, LoadRefused, EngineLost, ZygoteError, RequestError) as error:
        if isinstance(error, (TicketClosed, ArbiterUnavailable)):
            raise  # no fault of the model, which need not cool down
        raise await _report_failure(residency, held, error) from error
    serve(residency, held, took_s)


async def _acquire(residency: ResidencyApi, held: HeldModel) -> Granted:
    """Waits for the grant of the model's ticket, once those of its gang are granted too. Raises
    RequestError."""
    client, gang = residency.client(), held.gang
    request = held.ticket_request(residency.holder, residency.capability)
    if gang is None:
        return await client.acquire(request)
    try:
        return await gang_request.acquire(client, request, gang)
    except (RequestError, asyncio.CancelledError):
        # The ticket may have been granted while another of the gang was refused.
        client.tell(ev.Withdrawn(held.ticket))
        raise


async def start_engine(residency: ResidencyApi, held: HeldModel, spawn: EngineSpawner) -> Span:
    """Starts the model's process and waits for its load. Returns how long of that it waited for a
    copy of its files in host RAM and for a zygote, which is no part of what a load takes. Raises
    LoadRefused, EngineLost, ZygoteError, TicketClosed, OSError where the model's files cannot be
    seen."""
    plan = held.plan
    spec = SpawnSpec(
        plan.entry,
        plan.config | parts(held.devices),
        held.devices,
        slabs=_slabs(residency, held),
        copy=plan.copy and replace(plan.copy, owner=ModelName(residency.capability, held.model)),
    )
    before = held.files
    held.files = await loaded_files.look(plan.config.get("model", ""))  # before the engine reads
    held.files.is_unwatched |= before.is_unwatched and before.model == held.files.model
    spawned = await spawn(held.ticket, spec)
    held.link = link = EngineLink(held.model, held.ticket, spawned.path)
    await link.open_lifeline(lambda: unloading.on_engine_lost(residency, held, link))
    await link.ready()
    return spawned.waited


async def files_changed_during_load(held: HeldModel) -> bool:
    """Whether the model's files changed since its engine began to read them. Raises EngineLost: the
    look takes a moment, in which an end of the engine is noticed by nothing else."""
    is_outdated = await loaded_files.changed_during_load(held.files)
    if held.link is None or not held.link.is_alive:
        raise EngineLost(held.model, held.ticket)
    return is_outdated


def _slabs(residency: ResidencyApi, held: HeldModel) -> tuple[SlabRequest, ...]:
    """Asks for the slabs that the last engine of these settings has left, or empty ones."""
    owner, key = ModelName(residency.capability, held.model).path, held.plan.settings_key
    held.slab_caps = caps = residency.plans.slab_caps
    return tuple(SlabRequest(content, owner, key, caps) for content in held.plan.slab_contents)


async def wake(residency: ResidencyApi, held: HeldModel) -> None:
    """Takes a model from ASLEEP to RESIDENT under the same ticket. `Residency.begin_work` has
    queued it."""
    if await loaded_files.changed_in_sleep(held.files):
        return unloading.end_outdated(residency, held)
    try:
        request = held.ticket_request(residency.holder, residency.capability)
        granted = await residency.client().acquire(request)
    except TicketClosed:
        return unloading.end(residency, held, Reason.LOST)
    except RequestError as error:
        held.move(HolderState.ASLEEP)
        held.demand.is_wanted = False
        return held.turn_back_waiting(error)
    began_s = time.monotonic()
    _take_grant(residency, held, granted)
    assert held.link is not None
    try:
        async with asyncio.timeout(in_seconds(granted.load_within)):
            woken = await held.link.wake()
            took_s = time.monotonic() - began_s
            is_outdated = await files_changed_during_load(held)
    except (OSError, LoadRefused, EngineLost) as error:
        failed = await _report_failure(residency, held, error)
        return unloading.end(residency, held, Reason.FAILED, failed)
    if is_outdated:
        return unloading.end_outdated(residency, held)
    if not woken.restored:
        return unloading.end_unrestored(residency, held, took_s)
    serve(residency, held, took_s, woken.verified)


def _take_grant(residency: ResidencyApi, held: HeldModel, granted: Granted) -> None:
    held.on_grant(granted)
    residency.tickets[held.ticket] = held


def serve(residency: ResidencyApi, held: HeldModel, took_s: float, verified: bool = True) -> None:
    """Takes a model from LOADING to RESIDENT, with the waiting requests in flight."""
    if held.warmer is None and held.plan.takes_prewarms:
        held.warmer = warmer = PrefixWarmer(held, residency.holder, residency.client().tell)
        held.requests.on_begin = warmer.interrupt
    held.move(HolderState.RESIDENT)
    held.requests.last_end_ns, held.demand.is_wanted = time.monotonic_ns(), False
    is_used = held.demand.has_waiting
    residency.client().tell(ev.Loaded(held.ticket, seconds(took_s), verified, is_used))
    held.admit_waiting()
    residency.tell_caps(held)
    if held.watch is None:
        held.watch = watchdog.start_watchdog(
            held,
            lambda held: unloading.outdate(residency, held),
            lambda held, reason: unloading.end(residency, held, reason),
        )


async def _report_failure(residency: ResidencyApi, held: HeldModel, error: Exception) -> LoadFailed:
    """Tells the arbiter why a load or wake failed, and only then cuts the engine off, whose end
    alone says less. Returns the error for those who wait."""
    cause, out_of_memory = failure_cause(error, held.load.granted_s)
    client = residency.client()
    client.tell(ev.LoadBroke(held.ticket, cause, out_of_memory))
    await client.flush(REPORT_S)
    unloading.cut_off(residency, held)
    return LoadFailed(held.model, cause, out_of_memory)
