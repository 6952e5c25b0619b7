"""Watches each loaded model for as long as it is held: are its files those it was loaded from (D5),
and does its engine answer (H9)? The answer says too what KV the engine still has (G3).

A model replaced on disk under its name is loaded anew; the old one finishes what it has begun and
answers no other request. An engine that is dead breaks its lifeline and is heard of at once; an
engine that hangs says nothing, so it is asked.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from arbiter.core.decisions import Reason
from arbiter.errors import EngineLost
from deployments.replica.background import detached_task, log_failure
from deployments.replica.engine_client import LoadRefused
from deployments.replica.held_model import HeldModel, HolderState
from deployments.replica.model_files import file_events, loaded_files
from deployments.replica.model_files.loaded_files import LoadedFiles

logger = logging.getLogger("arbiter.residency")

LOOK_S = 2.0  # a dozen files are looked at in 0.1 ms; a wake looks once more
ASK_S = 5.0  # between two questions; one costs an engine less than a token
# An engine's loop computes nothing itself and stalls for far less than this on a machine where
# twenty processes want two cores.
HUNG_S = 60.0

Outdate = Callable[[HeldModel], None]
Close = Callable[[HeldModel, Reason], None]


def start_watchdog(held: HeldModel, outdate: Outdate, close: Close) -> asyncio.Task[None]:
    """Begins both watches; they are cancelled when the model ends. `outdate` keeps new requests
    away from it, `close` ends it."""
    task = detached_task(_watch_all(held, outdate, close))
    task.add_done_callback(log_failure)
    return task


async def _watch_all(held: HeldModel, outdate: Outdate, close: Close) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(watch_files(held, outdate, close))
        group.create_task(watch_engine(held, close))


async def watch_files(held: HeldModel, outdate: Outdate, close: Close) -> None:
    """Returns when the files are others and the model has ended: no new request gets it, and it
    goes when those in flight are done."""
    async with asyncio.TaskGroup() as looks:
        moved = looks.create_task(_until_changed(held, outdate))
        both = [moved, looks.create_task(_until_other_bytes(held))]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        for look in both:
            look.cancel()
    logger.warning("%s: its files were replaced; it is loaded anew when it is wanted", held.ticket)
    outdate(held)
    await held.requests.all_ended()
    close(held, Reason.REPLACED)


async def _until_changed(held: HeldModel, outdate: Outdate) -> None:
    """Looks when the kernel tells of a change, and outdates the model before another request gets
    it; and every LOOK_S, because the kernel does not know of all. Returns too where others have
    found it outdated."""

    def look() -> None:
        if _is_whole(held) and loaded_files.has_changed_now(held.files):
            outdate(held)
            held.outdated.set()

    async with file_events.watched(held.files.model, look) as has_room:
        held.files.is_unwatched = held.files.is_unwatched or not has_room
        while not held.outdated.is_set():
            if await loaded_files.has_changed(held.files) and _is_whole(held):
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(held.outdated.wait(), LOOK_S)


def _is_whole(held: HeldModel) -> bool:
    """Whether no load, wake, drain or unload is under way, which would see new files or end by
    itself."""
    return held.state in (HolderState.RESIDENT, HolderState.ASLEEP)


async def _until_other_bytes(held: HeldModel) -> None:
    """Reads the large files whole: after the load, once they are settled, and in each sleep."""
    read_as: tuple[LoadedFiles, bool] | None = None
    changed: LoadedFiles | None = None
    was_asleep = False
    while not (changed is held.files and _is_whole(held)):
        is_asleep = held.state is HolderState.ASLEEP
        version = held.files, held.files.settles_in_s == 0.0
        if _is_whole(held) and (version != read_as or (is_asleep and not was_asleep)):
            read_as = version
            changed = version[0] if await loaded_files.read_whole(version[0]) else changed
        was_asleep = is_asleep
        await asyncio.sleep(LOOK_S)


async def watch_engine(held: HeldModel, close: Close) -> None:
    """Returns when the engine does not answer, or says that it cannot. Its ticket is released then,
    which has the node agent kill it, and requests in flight fail."""
    while True:
        await asyncio.sleep(ASK_S)
        link = held.link
        if held.state is not HolderState.RESIDENT or link is None:
            continue
        try:
            async with asyncio.timeout(HUNG_S):
                kept = await link.health()
            if held.link is link:
                held.kept_kv = kept
        except EngineLost:
            if held.link is link and not link.is_alive:
                return  # the lifeline says so as well
            # Else it was replaced, or only a connection failed, as for want of descriptors.
        except (TimeoutError, LoadRefused) as error:
            if held.link is link and held.state in (HolderState.RESIDENT, HolderState.DRAINING):
                logger.warning("the engine of %s does not serve: %r", held.ticket, error)
                return close(held, Reason.LOST)
