"""Whether the files of a model are those it was loaded from (D5). A model replaced under the
same name is loaded anew; the old one finishes what it has begun and answers nobody else.

Names, sizes, times and inodes are looked at each few seconds. What lies in the files is looked at
only when a load begins and before a wake: a copy can have the times of what it replaced, and two
writes within one tick of the kernel's clock have the same.
"""

import asyncio
import contextlib
import hashlib
import logging
import stat
from collections.abc import Callable
from pathlib import Path

from arbiter.core.decisions import Reason
from arbiter.errors import EngineLost
from deployments.replica.background import detached_task, log_failure
from deployments.replica.engine_client import LoadRefused
from deployments.replica.held_model import HeldModel, HolderState

logger = logging.getLogger("arbiter.residency")

LOOK_S = 2.0  # a dozen files are looked at in 0.1 ms; a wake looks once more
# Of a file up to 16 MiB all is read, of a larger one 64 pieces of 64 KiB from its first to its
# last byte: 4 MiB are hashed in 5 ms, where a wake of 188 MiB takes 390 (docs/benchmarks.md).
# Weights that were trained or converted anew differ in every piece.
WHOLE_BYTES = 16 << 20
PIECE_BYTES, PIECES = 64 << 10, 64
Files = tuple[tuple[str | int, ...], ...]


def files(model: str) -> Files:
    """Name, size, mtime, ctime and inode of each file in a model's folder, or of a model in one
    file; empty for a name that is neither, like a hub id, whose revisions have folders of their
    own. Follows symlinks. Of a file that cannot be looked at, its name alone. Raises OSError where
    the folder cannot be."""
    root = Path(model)
    found: list[tuple[str | int, ...]] = []
    for path in [root] if root.is_file() else sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        try:
            seen = path.stat()
        except FileNotFoundError:
            continue  # just replaced: the next look sees the new one
        except OSError:  # closed to us, a loop of symlinks, or its server is away just now
            found.append((name,))
            continue
        if stat.S_ISREG(seen.st_mode):
            found.append((name, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_ino))
    return tuple(found)


def contents(model: str, rows: Files) -> str:
    """A hash of what lies in the files that `files` could look at. Equal for equal bytes, whatever
    their times. Raises OSError for one that cannot be read."""
    digest = hashlib.blake2b()
    for name, size, *_ in (row for row in rows if len(row) > 1):
        try:
            with (Path(model) / str(name)).open("rb") as stream:
                digest.update(f"{name} {size} ".encode())
                for start, length in pieces(int(size)):
                    stream.seek(start)
                    digest.update(stream.read(length))
        except FileNotFoundError:
            continue
    return digest.hexdigest()


def pieces(size_bytes: int) -> list[tuple[int, int]]:
    """Which parts of a file are read, as start and length."""
    if size_bytes <= WHOLE_BYTES:
        return [(0, size_bytes)]
    last = size_bytes - PIECE_BYTES
    return [(last * number // (PIECES - 1), PIECE_BYTES) for number in range(PIECES)]


async def look(slot: HeldModel) -> None:
    """Before its engine reads them: what changes from now on is noticed."""
    name = slot.plan.config.get("model", "")
    slot.files, slot.contents = await asyncio.to_thread(files, name), ""
    with contextlib.suppress(OSError):  # unknown: its names, sizes and times must do
        slot.contents = await asyncio.to_thread(contents, name, slot.files)


async def has_moved(slot: HeldModel) -> bool:
    """By names, sizes, times and inodes. One whose plan names no folder never has."""
    try:
        now = await asyncio.to_thread(files, slot.plan.config.get("model", ""))
    except OSError:
        return False  # not looked; the next look tells
    unseen = {row[0] for row in (*slot.files, *now) if len(row) == 1}
    was, is_now = ([row for row in rows if row[0] not in unseen] for rows in (slot.files, now))
    return was != is_now


async def is_stale(slot: HeldModel) -> bool:
    """By their contents as well."""
    if await has_moved(slot):
        return True
    name = slot.plan.config.get("model", "")
    try:
        return slot.contents not in ("", await asyncio.to_thread(contents, name, slot.files))
    except OSError:
        return False  # not looked either; once it is awake, it is watched


async def watch_files(
    slot: HeldModel,
    outdated: Callable[[HeldModel], None],
    close: Callable[[HeldModel, Reason], None],
) -> None:
    """Until its files are others: then nobody new gets it, and it goes when who has it is done.
    Cancelled with its slot."""
    while not (await has_moved(slot) and slot.life in (HolderState.RESIDENT, HolderState.ASLEEP)):
        await asyncio.sleep(LOOK_S)
    logger.warning("%s: its files were replaced; it is loaded anew", slot.ticket)
    outdated(slot)
    while slot.inflight:
        slot.emptied.clear()
        await slot.emptied.wait()
    close(slot, Reason.MANUAL)


# -------------------------------------------------------------------------------------------------
# Whether an engine still answers (H9). One that is dead breaks its lifeline and is heard of
# at once; one that hangs says nothing, so it is asked.


logger = logging.getLogger("arbiter.residency")

ASK_S = 5.0  # between two questions; one costs an engine less than a token
# An engine's loop computes nothing itself and stalls for far less than this on a machine where
# twenty processes want two cores.
HUNG_S = 60.0

Close = Callable[[HeldModel, Reason], None]


async def watch_engine(slot: HeldModel, close: Close) -> None:
    """Until it does not answer, or says that it cannot. Then its ticket is given back, which has
    the node agent kill it, and who waits for an answer is told. Cancelled with its slot."""
    while True:
        await asyncio.sleep(ASK_S)
        link = slot.link
        if slot.life is not HolderState.RESIDENT or link is None:
            continue
        try:
            async with asyncio.timeout(HUNG_S):
                await link.health()
        except EngineLost:
            if slot.link is link:
                return  # the lifeline says so as well
        except (TimeoutError, LoadRefused) as error:
            if slot.link is link and slot.life in (HolderState.RESIDENT, HolderState.DRAINING):
                logger.warning("the engine of %s does not serve: %r", slot.ticket, error)
                return close(slot, Reason.LOST)


def start_watchdog(
    slot: HeldModel, outdated: Callable[[HeldModel], None], close: Close
) -> asyncio.Task[None]:
    """Its files and its engine, for as long as the slot lives."""
    task = detached_task(_watch_all(slot, outdated, close))
    task.add_done_callback(log_failure)
    return task


async def _watch_all(slot: HeldModel, outdated: Callable[[HeldModel], None], close: Close) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(watch_files(slot, outdated, close))
        group.create_task(watch_engine(slot, close))
