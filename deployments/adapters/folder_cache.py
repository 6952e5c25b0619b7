"""A bound on a folder of folders that several processes of a node fill: they change it in turn, and
remove the longest unused folders first. Folders of a tenant lie in one named `@TENANT`.
"""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Excludes every other thread and process that calls this for the folder. Blocks, so only
    around renames and removals."""
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of this open file, so threads exclude each other too
        yield
    finally:
        os.close(lock)


def make_room(folder: Path, size_bytes: int, max_bytes: int) -> None:
    """Removes the folders with the oldest times until `size_bytes` more fit. Only inside
    `alone`."""
    paths = [p for p in (*folder.iterdir(), *folder.glob("@*/*")) if p.name[0] not in ".@"]
    rows = []
    for path in paths:
        # It is no folder, or it leaves now with its tenant, which the agent removes.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            used_ns, size = path.stat().st_mtime_ns, sum(f.stat().st_size for f in path.iterdir())
            rows.append((used_ns, path, size))
    excess = sum(size for _, _, size in rows) + size_bytes - max_bytes
    for _, path, size in sorted(rows):
        if excess <= 0:
            return
        shutil.rmtree(path, ignore_errors=True)
        excess -= size


def remove_abandoned(folder: Path, prefix: str, after_s: float) -> None:
    """Removes scratch folders of processes that were killed while they filled them: those that were
    begun so long ago. Only inside `alone`."""
    for path in folder.glob(f"{prefix}*"):
        with contextlib.suppress(FileNotFoundError):  # it has just been filled
            if time.time() - path.stat().st_mtime > after_s:
                shutil.rmtree(path, ignore_errors=True)
