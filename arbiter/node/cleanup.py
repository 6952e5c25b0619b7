"""What engines and agents leave on disk: logs that people read, and folders of no further use."""

import contextlib
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from arbiter.units import MIB

logger = logging.getLogger("arbiter.agent")

# Of each node. A model that breaks at each load is tried again after 2 s to 5 min, so this is at
# least an hour of one and a day of most; a log is some kB, so a few MB.
LOGS_KEPT = 200
# Of an engine that lives: an hour of 100 requests a second with a line of 200 bytes each. It is cut
# to its end, some 20,000 lines.
LOG_MOST_BYTES, LOG_END_BYTES = 64 * MIB, 4 * MIB
# A zygote that is being replaced leaves its lock free for seconds, and its folder fresh.
ABANDONED_AFTER_S = 3_600.0


class EngineLogs:
    """Keeps the logs of engines under Ray's log folder, where the dashboard shows them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _place(self, ticket: str) -> Path:
        return self._folder / f"engine-{ticket}.log"

    def link(self, ticket: str, written: Path) -> None:
        """Links an engine's log here while it is written. What an earlier process of the ticket
        wrote stays beside it."""
        place = self._place(ticket)
        with _warns(ticket):
            if place.is_symlink():
                return
            if place.exists():
                place.rename(place.with_suffix(".before.log"))
            place.symlink_to(written)

    def keep(self, ticket: str, written: Path) -> None:
        """Moves the log of an engine that is gone here; the newest LOGS_KEPT of a node stay."""
        place = self._place(ticket)
        with _warns(ticket):
            if not written.exists():
                return
            place.unlink(missing_ok=True)
            shutil.move(written, place)
            self._drop_oldest()

    def shorten(self, tickets: Iterable[str]) -> None:
        """Cuts logs of living engines to their ends where they are longer than LOG_MOST_BYTES."""
        for ticket in tickets:
            place = self._place(ticket)
            with _warns(ticket):
                if place.exists() and place.stat().st_size > LOG_MOST_BYTES:
                    _cut(place)

    def _drop_oldest(self) -> None:
        ended = [p for p in self._folder.glob("engine-*.log") if not p.is_symlink()]
        ended.sort(key=lambda p: p.stat().st_mtime_ns, reverse=True)
        for path in ended[LOGS_KEPT:]:
            path.unlink(missing_ok=True)


def _cut(path: Path) -> None:
    """Leaves the last lines of a file, in LOG_END_BYTES. Its writer has it open to append, and a
    line that comes meanwhile is lost or stands before them. Raises OSError."""
    with path.open("r+b") as file:
        size = file.seek(-LOG_END_BYTES, os.SEEK_END) + LOG_END_BYTES
        end = file.read(LOG_END_BYTES)
        file.truncate(0)
    with path.open("ab") as file:
        file.write(b"-- %d bytes of this log were cut\n" % (size - len(end)))
        file.write(end[end.find(b"\n") + 1 :])


@contextlib.contextmanager
def _warns(ticket: str) -> Iterator[None]:
    """Logs what fails within it: a disk that is full costs a log, and neither a load nor the agent;
    nor does a file that the agent of another node of this machine removed first."""
    try:
        yield
    except OSError as error:
        logger.warning("the log of engine %s may be lost: %s", ticket, error)


def sweep(own: Path) -> None:
    """Removes the folders beside `own` of nodes that are gone: old, and no zygote holds the lock.
    Others are none of an agent's: one of them has the dispatch locks of living engines."""
    for folder in own.parent.iterdir():
        if folder != own and folder.is_dir() and not folder.is_symlink() and _is_abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    try:
        if time.time() - folder.stat().st_mtime < ABANDONED_AFTER_S:
            return False
        lock = os.open(folder / "zygote.lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:  # the lock, or the whole folder
        return any(folder.glob("*.child"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
