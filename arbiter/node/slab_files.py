"""The files of a node in which idle slabs outlive their memory, one file a slab (G4).

One thread writes, sweeps and erases, one after the other, so that the agent's loop never waits for
a disk. Agents of one machine may share the folder: names are those of contents, files appear whole,
and a file that another agent removed is no error.
"""

import contextlib
import hashlib
import logging
import math
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Self

from arbiter.node.zygote_client import private_folder
from arbiter.pool import Removal, SlabUnusable, SlabView, layout, slab_file
from arbiter.protocol.messages import SlabRequest
from arbiter.units import GIB, Bytes, human

logger = logging.getLogger("arbiter.agent")

MOST_BYTES = Bytes(8 * GIB)  # of all files, where no size is configured
FREE_FRACTION = 0.1  # of what the disk has free, if that is less
ABANDONED_S = 600.0  # since the last write to a temporary file; a save writes all the time
_NAME_BYTES = 16  # of each of the two digests in a file's name


@dataclass(slots=True)
class Save:
    """Describes a save that is under way, or done."""

    unwanted: Event  # once set, it makes no file
    file_was_made: Future[bool]
    ends_s: float = math.inf  # of the monotonic clock: until then rows are written

    @property
    def is_done(self) -> bool:
        return self.file_was_made.done()


class SlabFiles:
    """Keeps the files of slabs in one folder, which only this user may enter. `budget_bytes`: the
    most that all may take; while a save replaces a file, the old one comes on top. Raises OSError
    where the folder cannot be made, or is a stranger's."""

    def __init__(self, folder: Path, budget_bytes: Bytes) -> None:
        self.folder, self.budget_bytes = private_folder(folder), budget_bytes
        self._thread = ThreadPoolExecutor(1, "slab-files")

    @classmethod
    def in_folder(cls, folder: str | None, budget_bytes: Bytes | None) -> Self | None:
        """Returns the files of a folder; None where no folder is named, no byte may be kept, or the
        folder cannot be used."""
        if folder is None or budget_bytes == 0:
            return None
        try:
            files = cls(Path(folder), MOST_BYTES)
            if budget_bytes is None:
                free = shutil.disk_usage(folder).free + files.size_bytes
                budget_bytes = min(MOST_BYTES, Bytes(int(FREE_FRACTION * free)))
        except OSError as error:
            logger.warning("idle slabs are not saved to %s: %s", folder, error)
            return None
        files.budget_bytes = budget_bytes
        return files

    @property
    def size_bytes(self) -> Bytes:
        return Bytes(sum(size for _, size, _ in self._files()))

    def find(self, request: SlabRequest) -> str | None:
        """Returns the path of the file that was saved for slabs of this key, if there is one."""
        path = self._path(request)
        return str(path) if path.is_file() else None

    def save(self, fd: int, request: SlabRequest, within_s: float = math.inf) -> Save:
        """Begins to write what an idle slab holds, of that what was used last if the time from now
        does not suffice for all. `fd`: it keeps a copy until the end."""
        save = Save(Event(), Future(), time.monotonic() + within_s)
        try:
            own_fd = os.dup(fd)
        except OSError as error:
            logger.warning("the slab of %s is not saved: %s", request.owner, error)
            save.file_was_made.set_result(False)
        else:
            self._thread.submit(self._save, own_fd, request, save)
        return save

    def erase(self, owner: str) -> None:
        """Removes the files of a model, soon: once a save under way has ended."""
        self._thread.submit(self._erase, owner)

    def erase_tenant(self, removal: Removal) -> None:
        """Takes what leaves with a tenant out of all files, soon: as `erase`."""
        self._thread.submit(self._erase_tenant, removal)

    def sweep(self) -> None:
        """Removes, soon, the files whose last row has expired, and what killed agents left."""
        self._thread.submit(self._sweep)

    def close(self) -> None:
        """Waits until the thread has done what it was told."""
        self._thread.shutdown()

    # -- in the thread ---------------------------------------------------------------------------

    def _save(self, fd: int, request: SlabRequest, save: Save) -> None:
        rows_count = 0
        try:
            with contextlib.closing(SlabView(fd)) as view:
                rows_count = self._write(view, self._path(request), save)
        except (OSError, SlabUnusable) as error:
            logger.warning("the slab of %s is not saved: %s", request.owner, error)
        finally:
            os.close(fd)
            save.file_was_made.set_result(rows_count > 0)

    def _write(self, view: SlabView, path: Path, save: Save) -> int:
        began_s = time.monotonic()
        if save.unwanted.is_set() or not view.has_live_rows(time.time()):
            return 0  # before other files leave for it
        self._make_room(view.allocated_bytes, path)
        rows_count = slab_file.save(
            view,
            path,
            now_s=time.time(),
            most_bytes=self.budget_bytes,
            is_wanted=lambda: not save.unwanted.is_set(),
            has_time=lambda: time.monotonic() < save.ends_s,
        )
        if rows_count:
            size, took_s = human(Bytes(path.stat().st_size)), time.monotonic() - began_s
            logger.info("saved %d rows in %s: %s in %.1f s", rows_count, path, size, took_s)
            self._make_room(Bytes(0), None)
        return rows_count

    def _make_room(self, size_bytes: Bytes, path: Path | None) -> None:
        """Removes the files that were saved longest ago until the budget has room. `path`: the file
        that is to be replaced."""
        others = [file for file in sorted(self._files()) if file[2] != path]
        total_bytes = sum(size for _, size, _ in others)
        for _, size, other in others:
            if total_bytes + min(size_bytes, self.budget_bytes) <= self.budget_bytes:
                return
            _remove(other)
            total_bytes -= size

    def _erase(self, owner: str) -> None:
        for path in self.folder.glob(f"{_name(owner)}-*"):
            _remove(path)

    def _erase_tenant(self, removal: Removal) -> None:
        """Erases a tenant's rows in a file. A file that cannot be replaced is removed, because
        these rows must go."""
        for _, _, path in self._files():
            try:
                slab_file.erase_tenant(path, removal)
            except OSError as error:
                logger.warning("%s is removed with all its rows: %s", path, error)
                _remove(path)

    def _sweep(self) -> None:
        now_s = time.time()
        for _, _, path in self._files():
            if not layout.is_live(slab_file.last_expiry(path), now_s):
                _remove(path)
        for path in self.folder.glob(f"*{slab_file.TEMPORARY}"):
            with contextlib.suppress(OSError):  # it has just got its name
                if path.lstat().st_mtime < now_s - ABANDONED_S:
                    _remove(path)

    # -- names -----------------------------------------------------------------------------------

    def _path(self, request: SlabRequest) -> Path:
        """Returns the path for slabs of a key. Its name begins with the owner's, by which all files
        of the owner are found."""
        key = _name(f"{request.content} {request.key}")
        return self.folder / f"{_name(request.owner)}-{key}{slab_file.SUFFIX}"

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """Returns of each file when it was written, its bytes and its path."""
        for path in self.folder.glob(f"*{slab_file.SUFFIX}"):
            with contextlib.suppress(OSError):  # another agent has just removed it
                status = path.lstat()
                yield status.st_mtime, status.st_size, path


def _name(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=_NAME_BYTES).hexdigest()


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:  # a folder of that name
        logger.warning("%s cannot be removed: %s", path, error)
