"""Keeps the state file to one life of a cluster at a time: keys, jobs and results lie beside it,
and two systems would run each other's jobs.

The arbiters of one life share a lock (flock) on a file beside it, in which each writes whose it is:
an arbiter that is started again may find the process of the last still there. The kernel drops the
lock with its process, however that ends.
"""

import fcntl
import json
import logging
import os
import time
from pathlib import Path

from arbiter.errors import StateFileInUse

logger = logging.getLogger("arbiter")

# A cluster that is stopped just now ends its processes within: Ray kills what is left after ten
# seconds.
HELD_S = 10.0
LOOK_EVERY_S = 0.05
SIGNED_BYTES = 256  # a session's name has 60


def hold(state_file: Path, session: str, wait_s: float | None = None) -> int | None:
    """Returns the descriptor that holds the lock for as long as it is open; None where the file
    system has no locks, or nothing can be written. Raises StateFileInUse when another life of a
    cluster still holds it after `wait_s`, by default HELD_S."""
    path = Path(f"{state_file.absolute()}.lock")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:  # the store says so as well, and goes on without a file
        logger.error("%s is not locked: %s", state_file, error)
        return None
    end = time.monotonic() + (HELD_S if wait_s is None else wait_s)
    try:
        while (other := _take(fd, session)) is not None:
            if time.monotonic() > end:
                raise StateFileInUse(str(state_file), *other)
            time.sleep(LOOK_EVERY_S)
    except OSError as error:
        logger.error("%s is not locked: %s", state_file, error)
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _take(fd: int, session: str) -> tuple[str, int] | None:
    """Takes the lock; else returns the life that has it, and its arbiter's process. Raises
    OSError."""
    if _locks(fd, fcntl.LOCK_EX):
        _sign(fd, session)
    if not _locks(fd, fcntl.LOCK_SH):
        return _owner(fd)
    other, pid = _owner(fd)
    if other == session:
        _sign(fd, session)
        return None
    fcntl.flock(fd, fcntl.LOCK_UN)
    return other, pid


def _locks(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sign(fd: int, session: str) -> None:
    """Writes all of one length, so that no reader sees parts of two."""
    os.pwrite(fd, json.dumps([session, os.getpid()]).ljust(SIGNED_BYTES).encode(), 0)


def _owner(fd: int) -> tuple[str, int]:
    try:
        session, pid = json.loads(os.pread(fd, SIGNED_BYTES, 0))
    except ValueError:  # another is just signing for the first time, or found no room for it
        return "not known", 0
    return str(session), int(pid)
