"""Whether the files of a model are those it was loaded from (SPEC D5). A model replaced under the
same name is loaded anew; the old one finishes what it has begun and answers nobody else.

Names, sizes, times and inodes are looked at each few seconds. What lies in the files is looked at
only when a load begins and before a wake: a copy can have the times of what it replaced, and two
writes within one tick of the kernel's clock have the same.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

from arbiter.decisions import Reason
from deployments.slot import Life, Slot

logger = logging.getLogger("arbiter.residency")

LOOK_S = 2.0  # a dozen files are looked at in 0.1 ms; a wake looks once more
# Of a file up to 16 MiB all is read, of a larger one 64 pieces of 64 KiB from its first to its
# last byte: 4 MiB are hashed in 5 ms, where a wake of 188 MiB takes 390 (docs/benchmarks.md).
# Weights that were trained or converted anew differ in every piece.
WHOLE_BYTES = 16 << 20
PIECE_BYTES, PIECES = 64 << 10, 64
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


def contents(model: str) -> str:
    """A hash of what lies in those files. Equal for equal bytes, whatever their times."""
    digest = hashlib.blake2b()
    for name, size, *_ in files(model):
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


async def look(slot: Slot) -> None:
    """Before its engine reads them: what changes from now on is noticed."""
    name = slot.plan.config.get("model", "")
    slot.files = await asyncio.to_thread(files, name)
    slot.contents = await asyncio.to_thread(contents, name)


async def has_moved(slot: Slot) -> bool:
    """By names, sizes, times and inodes. One whose plan names no folder never has."""
    return slot.files != await asyncio.to_thread(files, slot.plan.config.get("model", ""))


async def is_stale(slot: Slot) -> bool:
    """By their contents as well."""
    if await has_moved(slot):
        return True
    return slot.contents != await asyncio.to_thread(contents, slot.plan.config.get("model", ""))


async def watch(
    slot: Slot, outdated: Callable[[Slot], None], close: Callable[[Slot, Reason], None]
) -> None:
    """Until its files are others: then nobody new gets it, and it goes when who has it is done.
    Cancelled with its slot."""
    while not (await has_moved(slot) and slot.life in (Life.RESIDENT, Life.ASLEEP)):
        await asyncio.sleep(LOOK_S)
    logger.warning("%s: its files were replaced; it is loaded anew", slot.ticket)
    outdated(slot)
    while slot.inflight:
        slot.emptied.clear()
        await slot.emptied.wait()
    close(slot, Reason.MANUAL)
