"""Room in a folder of folders that several processes of a node fill: one at a time, the longest
unused folders go first.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """No other thread or process is in here for this folder. Blocks, for renames and removals."""
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of this open file, so threads exclude each other too
        yield
    finally:
        os.close(lock)


def make_room(folder: Path, size_bytes: int, max_bytes: int) -> None:
    """Remove the folders with the oldest times until `size_bytes` more fit. Only inside `alone`."""
    rows = [(p.stat().st_mtime_ns, p) for p in folder.iterdir() if p.name[0] != "."]
    sizes = {path: sum(f.stat().st_size for f in path.iterdir()) for _, path in rows}
    excess = sum(sizes.values()) + size_bytes - max_bytes
    for _, path in sorted(rows):
        if excess <= 0:
            return
        shutil.rmtree(path, ignore_errors=True)
        excess -= sizes[path]
