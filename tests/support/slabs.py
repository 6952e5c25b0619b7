"""Slabs of a test: made, closed, and filled with bytes that follow from their keys."""

import contextlib
import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from random import Random

from arbiter.pool import Rows, Slab, SlabView, create
from arbiter.units import KIB, MIB, Bytes, Content

NAMESPACE, OTHER = b"n" * 32, b"o" * 32
ROW = Bytes(64 * KIB)
EXTENT = Bytes(4 * ROW)  # the real one would make a test write 32 MiB
TERM_S = 100.0


class Clock:
    """A wall clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


@contextlib.contextmanager
def slab_file(extents: int = 4, rows: int = 64) -> Iterator[int]:
    """A new slab with room for so many rows, of which so many extents may be allocated."""
    fd = create("test", Bytes(2 * MIB + rows * ROW))
    try:
        set_limit(fd, extents)
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def lent_slab(limit_bytes: int) -> Iterator[int]:
    """A new slab that may be filled up to that limit, as an agent lends it to an engine. Its
    descriptor; `path_of` says where an engine opens it."""
    fd = create("test", Bytes(2 * limit_bytes))
    try:
        with contextlib.closing(SlabView(fd)) as view:
            view.limit_bytes = Bytes(limit_bytes)
        yield fd
    finally:
        os.close(fd)


def path_of(fd: int) -> str:
    return f"/proc/{os.getpid()}/fd/{fd}"


def run_and_kill(work: Callable[[int], object], seed: int, within_ns: int) -> None:
    """Has a fork of this process work without an end, and kills it at a random moment of so many
    nanoseconds. `work` is given a pipe to which it writes a byte when it begins."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work(write)
        finally:
            os._exit(1)
    os.close(write)
    assert os.read(read, 1) == b"."
    os.close(read)
    until = time.perf_counter_ns() + Random(seed).randrange(within_ns)
    while time.perf_counter_ns() < until:
        os.sched_yield()
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def set_limit(fd: int, extents: int) -> None:
    """Permits so many extents of rows beside the table."""
    with contextlib.closing(SlabView(fd)) as view:
        view.limit_bytes = Bytes(64 * KIB + extents * EXTENT)


def writer(fd: int, namespace: bytes = NAMESPACE, row_bytes: Bytes = ROW) -> Slab:
    return Slab(fd, Content.KV, namespace, row_bytes, extent_bytes=EXTENT)


@contextlib.contextmanager
def rows_of(fd: int, clock: Clock, namespace: bytes = NAMESPACE) -> Iterator[Rows]:
    """What the next writer of a slab finds."""
    with contextlib.closing(writer(fd, namespace)) as slab:
        yield Rows(slab, TERM_S, clock)


def content_of(key: bytes, size: int = ROW) -> bytes:
    """The bytes of a row, different for each key at every place."""
    seed = hashlib.sha256(key).digest()
    return seed * (size // len(seed))


def store(rows: Rows, *keys: bytes) -> list[bytes]:
    """Writes rows as an engine does. Returns those that found room."""
    reserved = rows.reserve(keys).rows
    for key, row in reserved.items():
        rows.slab.row(row)[:] = content_of(key)
        rows.mark_ready(key)
    return list(reserved)


def has_its_bytes(rows: Rows, key: bytes) -> bool:
    row = rows.lookup(key)
    return row is not None and bytes(rows.slab.row(row)) == content_of(key)


def keys(count: int, prefix: str = "k") -> list[bytes]:
    return [f"{prefix}{number}".encode() for number in range(count)]
