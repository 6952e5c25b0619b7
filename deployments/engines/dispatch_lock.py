"""Dispatch locks: engines of a node that take turns to compute, so that they need room for one
scratch and not for one each (B2).

The lock is a file that the kernel lets one process hold; it is given back when its holder dies,
however that happens. Scratch goes back before the lock does: a reading that sees more of it than
the reserve covers charges the rest as foreign.
"""

import ctypes
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_libc = ctypes.CDLL(None)


def lock_path(name: str) -> Path:
    """In memory or on a local disk: one lock for each node, not for each home directory."""
    folder = Path(f"/tmp/arbiter-{os.getuid()}") / "dispatch"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder / f"{name}.lock"


class DispatchLock:
    """Without a name everybody computes at once."""

    def __init__(self, name: str | None) -> None:
        self._path = lock_path(name) if name else None

    @contextmanager
    def one(self) -> Iterator[None]:
        """Waits for this process's turn. Blocks: for the thread that computes."""
        if self._path is None:
            yield
            return
        with os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                give_back()


def give_back() -> None:
    """What the allocators keep for the next time, to the device and the kernel."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    _libc.malloc_trim(0)
