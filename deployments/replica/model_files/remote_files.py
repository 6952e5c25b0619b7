"""Files that change without this machine's kernel knowing: those of a file server, and those of a
program behind FUSE. They are looked at before each request, past what the kernel remembers.
"""

import asyncio
import ctypes
import logging
import os
from collections.abc import Callable
from pathlib import Path

from deployments.config.file_threads import in_thread
from deployments.replica.background import detached_task

logger = logging.getLogger("arbiter.residency")

# statfs(2) and linux/magic.h; virtiofs and most cloud storage are FUSE.
_REMOTE = {
    0x6969: "nfs", 0x6573_5546: "fuse", 0x517B: "smb", 0xFF53_4D42: "cifs", 0xFE53_4D42: "smb2",
    0x00C3_6400: "ceph", 0x0102_1997: "9p", 0x5346_414F: "afs", 0x6B41_4653: "kafs",
    0x7375_7245: "coda", 0x0BD0_0BD0: "lustre", 0x4750_4653: "gpfs", 0x7461_636F: "ocfs2",
    0x0116_1970: "gfs2", 0xAAD7_AAEA: "panfs", 0x1983_0326: "beegfs", 0x2003_0528: "orangefs",
}  # fmt: skip
# linux/fcntl.h: ask the server now, though the kernel has an answer that it would still give.
_AT_FDCWD, _AT_STATX_FORCE_SYNC, _STATX_BASIC_STATS = -100, 0x2000, 0x07FF
_BUFFER_BYTES = 256  # of struct statx, and enough for struct statfs, whose first word is the type
# A server that is away keeps a call for minutes. A model is served on then, as it was loaded.
LOOK_MOST_S = 1.0

_libc = ctypes.CDLL(None, use_errno=True)


def is_remote(path: str) -> bool:
    """Whether a path lies on a file server or behind FUSE. False for what cannot be asked, such as
    a hub id."""
    buffer = ctypes.create_string_buffer(_BUFFER_BYTES)
    if _libc.statfs(os.fsencode(path), buffer) != 0:
        return False
    return ctypes.c_ulong.from_buffer(buffer).value & 0xFFFF_FFFF in _REMOTE


def fresh_stat(path: Path) -> os.stat_result:
    """Returns `path.stat()` as the server has it now. Raises OSError."""
    buffer = ctypes.create_string_buffer(_BUFFER_BYTES)
    arguments = os.fsencode(path), _AT_STATX_FORCE_SYNC, _STATX_BASIC_STATS, buffer
    if _libc.statx(_AT_FDCWD, *arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), str(path))
    return path.stat()


class SharedLooks:
    """Runs one look at a time, in a thread. Each caller gets the answer of a look that began after
    it asked; those that ask while a look is under way share the next."""

    def __init__(self) -> None:
        self._running: asyncio.Task[bool] | None = None
        self._next: asyncio.Task[bool] | None = None

    async def ask(self, model: str, look: Callable[[], bool]) -> bool:
        """Returns what the look finds. False where it takes longer than LOOK_MOST_S, or gets no
        thread. `model`: whose files are looked at."""
        if self._next is None:
            self._next = detached_task(self._look(model, look, self._running))
        mine = self._next
        await asyncio.wait({mine}, timeout=LOOK_MOST_S)
        return mine.done() and mine.result()

    async def _look(
        self, model: str, look: Callable[[], bool], former: asyncio.Task[bool] | None
    ) -> bool:
        if former is not None:
            await asyncio.wait({former})
        self._running, self._next = self._next, None
        try:
            return await in_thread(model, look)
        except OSError as error:  # no thread for the look
            logger.warning("%s: its files are not looked at now: %s", model, error)
            return False
