"""Memory that gets its pages late, and stays as it is written meanwhile."""

import ctypes
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deployments.engines import linux
from tests.support.engine_host import until

SIZE = 64 << 20


@pytest.fixture
def span() -> Iterator[tuple[int, int]]:
    memory = mmap.mmap(-1, SIZE)
    view = ctypes.c_char.from_buffer(memory)
    yield ctypes.addressof(view), SIZE
    del view
    memory.close()


def resident(span: tuple[int, int]) -> int:
    """Bytes of `span` that have pages, from the kernel's own map of this process."""
    start, size = span
    first, count = start // mmap.PAGESIZE, size // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb") as pages:
        pages.seek(first * 8)
        entries = pages.read(count * 8)
    return sum(entry >> 7 for entry in entries[7::8]) * mmap.PAGESIZE


def test_untouched_memory_is_filled_and_keeps_what_was_written(span: tuple[int, int]) -> None:
    ctypes.memmove(span[0] + 5, b"kept", 4)
    assert resident(span) == mmap.PAGESIZE
    filling = linux.Prefault()
    filling.start([span])
    until(lambda: resident(span) == SIZE, 10)
    filling.stop()
    assert ctypes.string_at(span[0], 12) == b"\0" * 5 + b"kept" + b"\0" * 3


def test_stopped_filling_fills_nothing(span: tuple[int, int]) -> None:
    filling = linux.Prefault()
    filling.stop()  # before it began, as a sleep right after a load may
    filling.start([span])
    filling.stop()  # waits for its thread
    assert resident(span) == 0


def test_filling_never_raises_its_scheduling_priority() -> None:
    """Ray runs its workers at nice 15, and only root may go back from there."""

    def after_filling() -> int:
        os.setpriority(os.PRIO_PROCESS, 0, 15)  # of this thread
        linux.Prefault()._fill([])
        return os.getpriority(os.PRIO_PROCESS, 0)

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(after_filling).result() == 15
