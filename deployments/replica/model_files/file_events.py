"""What the kernel tells of changes of a model's files (inotify), on the event loop.

It tells nothing of a change that another machine makes on a network file system (`remote_files`),
and no more where the user's inotify instances or watches are spent, so its caller looks as well.
Source: man 7 inotify.
"""

import asyncio
import contextlib
import ctypes
import errno
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from deployments.config.file_threads import in_thread

# linux/inotify.h: a writer has closed the file; its links or times are others, as when its name is
# removed or given to another; a file came into the folder by a rename; it was itself renamed.
_CLOSE_WRITE, _ATTRIB, _MOVED_TO, _MOVE_SELF = 0x8, 0x4, 0x80, 0x800
_CHANGES = _CLOSE_WRITE | _ATTRIB | _MOVED_TO | _MOVE_SELF
_DONT_FOLLOW = 0x0200_0000
_READ_BYTES = 64 << 10  # of the kernel's queue at once; an event has 16 and a name
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.asynccontextmanager
async def watched(model: str, on_change: Callable[[], None]) -> AsyncIterator[bool]:
    """Yields whether the watches are set, for which the kernel may have no room. Calls `on_change`
    on the loop before a request that came in after the change has begun: a change of a file or
    folder in the model's folder, or of a model in one file."""
    loop, inotify = asyncio.get_running_loop(), _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if inotify < 0:
        yield False
        return

    def read() -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(inotify, _READ_BYTES)  # which it was does not matter
        on_change()

    has_room = False
    try:
        with contextlib.suppress(OSError):  # no thread to set the watches in
            has_room = await in_thread(model, _watch_all, inotify, Path(model))
        loop.add_reader(inotify, read)
        yield has_room
    finally:
        loop.remove_reader(inotify)
        os.close(inotify)


def _watch_all(inotify: int, root: Path) -> bool:
    """Watches all that lies in a model's folder; also the root itself where it is a symlink, which
    may be replaced by another, and whether a folder or symlink above it is renamed or removed.
    False: a watch found no room."""
    above = {*root.absolute().parents, *root.resolve().parents}
    watches = [_watch(inotify, path, _ATTRIB | _MOVE_SELF | _DONT_FOLLOW) for path in above]
    watches.append(_watch(inotify, root, _CHANGES | _DONT_FOLLOW))
    with contextlib.suppress(OSError):  # its server is away just now
        watches += [_watch(inotify, path, _CHANGES) for path in (root, *root.rglob("*"))]
    return all(watches)


def _watch(inotify: int, path: Path, changes: int) -> bool:
    """Watches one file or folder. False: the kernel has no room. What is not there, or closed to
    us, needs none."""
    if _libc.inotify_add_watch(inotify, os.fsencode(path), changes) >= 0:
        return True
    return ctypes.get_errno() != errno.ENOSPC
