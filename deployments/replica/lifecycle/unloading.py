"""How a model stops serving: a revoke drains it, and it sleeps, goes, or serves on (A9, D1)."""

import asyncio
import logging

from arbiter.core import events as ev
from arbiter.core.decisions import Reason, Tier
from arbiter.errors import EngineLost, LoadFailed, RequestError
from arbiter.protocol.messages import RevokeCommand
from arbiter.units import Span, in_seconds, seconds
from deployments.replica.engine_client import EngineLink, LoadRefused
from deployments.replica.held_model import HeldModel, HolderState
from deployments.replica.model_files import loaded_files
from deployments.replica.residency_api import ResidencyApi

logger = logging.getLogger("arbiter.residency")


def revoke(residency: ResidencyApi, held: HeldModel, command: RevokeCommand) -> None:
    """Carries out a revoke. Without a barrier the node agent kills the engine in any case; a
    load under way finds that out by itself, with its cause."""
    if held.state is HolderState.LOADING and command.reason is Reason.LOST:
        return
    if held.growth.is_restart and command.barrier:
        residency.client().tell(ev.Busy(held.ticket, 1))
    elif command.barrier == 0:
        ended = LoadFailed(held.model, "the arbiter ended its load", False)
        end(residency, held, command.reason, ended if command.reason is Reason.FAILED else None)
    elif held.state is not HolderState.RESIDENT:
        return  # a command sent twice, or too late: the state has changed here
    elif held.requests.inflight and command.reason.only_if_idle:
        residency.client().tell(ev.Busy(held.ticket, held.requests.inflight))
    elif command.reason is Reason.IDLE and held.requests.is_kept_warm:  # which it did not know yet
        residency.client().tell(ev.Busy(held.ticket, 0))
    else:
        held.move(HolderState.DRAINING)
        residency.begin_work(held, drain(residency, held, command))


async def drain(residency: ResidencyApi, held: HeldModel, command: RevokeCommand) -> None:
    """Lets the requests in flight end, while new ones wait behind the barrier, and then has the
    model sleep or end. A model whose requests outlive the barrier serves on."""
    client = residency.client()
    if not await held.requests.ended_within(command.barrier):
        client.tell(ev.BarrierDropped(held.ticket, held.requests.inflight))
        return await serve_on(residency, held)
    held.move(HolderState.UNLOADING)
    if command.to is Tier.GONE or not await _fell_asleep(held, client.timeouts.unload):
        return end(residency, held, command.reason)
    held.move(HolderState.ASLEEP)
    client.tell(ev.Slept(held.ticket))
    held.turn_back_waiting()


async def serve_on(residency: ResidencyApi, held: HeldModel) -> None:
    """Takes a model from DRAINING back to RESIDENT, because what is in flight outlived the barrier.
    The watchdog does not look at a model that drains, so its files are looked at before a request
    gets it."""
    is_outdated = await loaded_files.changed_while_draining(held.files)
    if held.state is not HolderState.DRAINING:
        return  # it ended meanwhile
    held.move(HolderState.RESIDENT)
    if not is_outdated:
        return held.admit_waiting()
    outdate(residency, held)
    held.turn_back_waiting()


async def _fell_asleep(held: HeldModel, within: Span) -> bool:
    """Has the engine sleep. False: it did not, and must end."""
    assert held.link is not None
    try:
        async with asyncio.timeout(in_seconds(within)):
            if held.warmer is not None:
                await held.warmer.settled()
            await held.link.sleep()
    except (TimeoutError, LoadRefused, EngineLost) as error:
        logger.warning(
            "%s is unloaded, because it did not fall asleep: %r (may take %.0f s)",
            held.ticket,
            error,
            in_seconds(within),
        )
        return False
    return True


def on_engine_lost(residency: ResidencyApi, held: HeldModel, link: EngineLink) -> None:
    """Ends a model whose engine's lifeline broke. A load or wake under way notices by itself."""
    if held.link is link and held.state not in (HolderState.LOADING, HolderState.CLOSED):
        logger.warning("the engine of %s is gone", held.ticket)
        end(residency, held, Reason.LOST)


def end(
    residency: ResidencyApi, held: HeldModel, reason: Reason, error: RequestError | None = None
) -> None:
    """Closes the held model, from any state. Its waiting requests fail with the error; without an
    error they open the model anew."""
    if held.state is HolderState.CLOSED:
        return
    if held.ticket in residency.tickets:  # said first: a queued ticket may wait for the bytes
        residency.client().tell(ev.Released(held.ticket, reason.value))
    cut_off(residency, held)
    for work in (held.work, held.growth.work):
        if work and work is not asyncio.current_task():
            work.cancel()
    close(residency, held)
    held.turn_back_waiting(error)
    if reason in (Reason.LOST, Reason.FAILED, Reason.REPLACED):
        residency.bring_back_after(held.model, 0.0 if error is None else error.retry_after_s)


def retire(residency: ResidencyApi, held: HeldModel) -> None:
    """Keeps requests that come from here on away from this model; those in flight finish with
    it."""
    if held.state is HolderState.RESIDENT:
        held.move(HolderState.DRAINING)
        del residency.models[held.model]


def outdate(residency: ResidencyApi, held: HeldModel) -> None:
    """Retires a model whose files were replaced. Its watchdog ends it once nothing is in flight."""
    residency.plans.forget(held.model)
    retire(residency, held)
    held.outdated.set()


def end_outdated(residency: ResidencyApi, held: HeldModel) -> None:
    """Ends a model whose files were replaced while it slept, woke or grew. Requests that wait for
    it load the new files; the replica does where the model is wanted without a request."""
    logger.warning("%s: its files were replaced meanwhile; they are loaded anew", held.ticket)
    residency.plans.forget(held.model)
    is_wanted = held.demand.is_wanted
    end(residency, held, Reason.REPLACED)
    if is_wanted:
        residency.bring_back_after(held.model, 0.0, is_wanted=True)


def end_unrestored(residency: ResidencyApi, held: HeldModel, took_s: float) -> None:
    """Ends a model that woke with other answers, which no load in place mended. A new engine loads
    it, for requests that wait and where it is wanted without one."""
    logger.warning(
        "%s woke with other answers, and not mended in place; it is loaded anew", held.ticket
    )
    residency.client().tell(ev.Loaded(held.ticket, seconds(took_s), verified=False))
    is_wanted = held.demand.is_wanted
    end(residency, held, Reason.FAILED)
    if is_wanted:
        residency.bring_back_after(held.model, 0.0, is_wanted=True)


def cut_off(residency: ResidencyApi, held: HeldModel) -> None:
    """Closes the way to the engine, which ends it."""
    residency.tickets.pop(held.ticket, None)
    if held.link:
        held.link.cut()
        residency.background.begin(held.link.closed())
        held.link = None


def close(residency: ResidencyApi, held: HeldModel) -> None:
    """Takes it off the holder's list; it holds nothing any more."""
    held.move(HolderState.CLOSED)
    if held.watch:
        held.watch.cancel()
    if residency.models.get(held.model) is held:
        del residency.models[held.model]
