"""Dispatch locks: engines of a node compute in turn, so that they share one reserve of scratch and
do not each need their own (B2).

The lock is a file that the kernel lets one process lock, and unlocks when that process dies. An
engine frees its scratch before it unlocks: the node agent charges scratch beyond the reserve as
foreign.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from arbiter import heap


def lock_path(name: str) -> Path:
    """A file on the node's own disk: home directories may be shared between nodes."""
    path = Path(f"/tmp/arbiter-{os.getuid()}") / "dispatch" / f"{name}.lock"
    _make_folder(path)
    return path


def _make_folder(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)


class DispatchLock:
    """The lock of one name; without a name it excludes no engine."""

    def __init__(self, name: str | None) -> None:
        self._path = lock_path(name) if name else None

    @contextmanager
    def one(self) -> Iterator[None]:
        """Waits for this process's turn. Blocks, so only in the thread that computes."""
        if self._path is None:
            yield
            return
        _make_folder(self._path)  # what cleans /tmp may have removed it since the engine began
        with os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                give_back()


def give_back() -> None:
    """Returns memory that the allocators keep to the device and the kernel."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    heap.trim()
