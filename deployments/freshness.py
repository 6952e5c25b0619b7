"""Whether the files of a model are those it was loaded from (SPEC D5). A model replaced under the
same name is loaded anew; the old one finishes what it has begun and answers nobody else.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from arbiter.decisions import Reason
from deployments.slot import Life, Slot

logger = logging.getLogger("arbiter.residency")

LOOK_S = 2.0  # a dozen files are looked at in 0.1 ms; a wake looks once more
Files = tuple[tuple[str | int, ...], ...]


def files(model: str) -> Files:
    """Name, size, mtime, ctime and inode of each file in a model's folder; empty for a name that
    is no folder, like a hub id, whose revisions have folders of their own. Follows symlinks."""
    folder = Path(model)
    if not folder.is_dir():
        return ()
    found = []
    for path in sorted(folder.rglob("*")):
        try:
            stat = path.stat()
        except FileNotFoundError:
            continue  # just replaced: the next look sees the new one
        if path.is_file():
            row = stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
            found.append((str(path.relative_to(folder)), *row))
    return tuple(found)


async def look(slot: Slot) -> None:
    """Before its engine reads them: what changes from now on is noticed."""
    slot.files = await asyncio.to_thread(files, slot.plan.config.get("model", ""))


async def is_stale(slot: Slot) -> bool:
    """One whose plan names no folder never is."""
    return slot.files != await asyncio.to_thread(files, slot.plan.config.get("model", ""))


async def watch(
    slot: Slot, outdated: Callable[[Slot], None], close: Callable[[Slot, Reason], None]
) -> None:
    """Until its files are others: then nobody new gets it, and it goes when who has it is done.
    Cancelled with its slot."""
    while not (await is_stale(slot) and slot.life in (Life.RESIDENT, Life.ASLEEP)):
        await asyncio.sleep(LOOK_S)
    logger.warning("%s: its files were replaced; it is loaded anew", slot.ticket)
    outdated(slot)
    while slot.inflight:
        slot.emptied.clear()
        await slot.emptied.wait()
    close(slot, Reason.MANUAL)
