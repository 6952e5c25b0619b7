"""Private pages of processes, without asking the kernel each second for what has not changed.

The kernel walks all page tables of a process for `smaps_rollup`: 15 to 25 ms for each of an
engine's two processes (docs/benchmarks.md), which is a whole core for twenty sleeping engines. It
walks them again for `smaps`, which has each mapping, and writes thousands of lines for `maps`,
which names them. But a process gets a page of its own by a fault and loses one from its resident
set, and the kernel counts both where asking costs 20 us. It does not count whether another process
still maps the same page, so a reading is kept for a short time only.
"""

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from arbiter.node import procfs
from arbiter.units import MIB

T = TypeVar("T")

# What a process may have gained or lost unseen: a hundredth of the smallest engine here.
SLACK_BYTES = 1 * MIB
# Pages of a fork become a process's own when the process they were forked from dies or writes to
# its own: a zygote does neither but when it ends. A reading that found what was known already, but
# for the slack, is believed twice as long as the one before, up to the most.
BELIEVED_S, BELIEVED_MOST_S = 5.0, 40.0

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class PageCounters:
    """Holds counters of one process that move with its pages."""

    start_ticks: int  # with its pid, which process it is
    faults_count: int
    resident_bytes: int

    def is_near(self, other: "PageCounters") -> bool:
        """Says whether no more than the slack can lie between two readings."""
        faulted = abs(self.faults_count - other.faults_count) * _PAGE_BYTES
        moved = faulted + abs(self.resident_bytes - other.resident_bytes)
        return self.start_ticks == other.start_ticks and moved <= SLACK_BYTES


def mark_of(pid: int) -> PageCounters | None:
    """Returns the counters of a process; None when there is none of that pid."""
    folder = procfs.PROC / str(pid)
    try:
        # The name may hold spaces and brackets, so fields are counted after its last bracket.
        fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        resident = (folder / "statm").read_text().split()[1]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return PageCounters(
        int(fields[19]), int(fields[7]) + int(fields[9]), int(resident) * _PAGE_BYTES
    )


def _moved(current: dict[str, int], before: dict[str, int]) -> int:
    """Returns by how many bytes the counts of two readings differ at most."""
    keys = current.keys() | before.keys()
    return max((abs(current.get(key, 0) - before.get(key, 0)) for key in keys), default=0)


def _files_moved(current: frozenset[tuple[int, int]], before: frozenset[tuple[int, int]]) -> int:
    """Returns by how many bytes mapped files differ: more than the slack where another file is
    mapped than before, whatever its size."""
    return 0 if current == before else SLACK_BYTES + 1


@dataclass(frozen=True, slots=True)
class _CachedReading(Generic[T]):
    mark: PageCounters
    read_s: float
    value: T
    believed_s: float = BELIEVED_S


class _ReadingCache(Generic[T]):
    """Keeps one reading of each process, until its mark has moved or the reading is old."""

    def __init__(
        self,
        mark: Callable[[int], PageCounters | None],
        read: Callable[[int], T],
        moved: Callable[[T, T], int],
        clock: Callable[[], float],
    ) -> None:
        self._mark, self._read, self._moved, self._clock = mark, read, moved, clock
        self._known: dict[int, _CachedReading[T]] = {}

    def of(self, pid: int) -> T:
        mark, now_s = self._mark(pid), self._clock()
        cached = self._known.get(pid)
        is_near = bool(mark and cached and cached.mark.is_near(mark))
        if cached and is_near and now_s - cached.read_s < cached.believed_s:
            return cached.value
        # The mark was taken before: what changes in between makes the next look a reading.
        value = self._read(pid)
        if mark:
            believed_s = BELIEVED_S
            if cached and is_near and self._moved(value, cached.value) <= SLACK_BYTES:
                believed_s = min(2 * cached.believed_s, BELIEVED_MOST_S)
            self._known[pid] = _CachedReading(mark, now_s, value, believed_s)
        return value

    def keep(self, pids: set[int]) -> None:
        self._known = {pid: cached for pid, cached in self._known.items() if pid in pids}


class Rollups:
    """Keeps readings of the processes that are asked for again and again."""

    def __init__(
        self,
        mark: Callable[[int], PageCounters | None] = mark_of,
        rollup: Callable[[int], dict[str, int]] = procfs.rollup,
        clock: Callable[[], float] = time.monotonic,
        aside: Callable[[int], int] = procfs.mapped_aside,
        shared: Callable[[int], frozenset[tuple[int, int]]] = procfs.shared_files,
    ) -> None:
        self._rollups = _ReadingCache(mark, rollup, _moved, clock)
        self._asides = _ReadingCache(mark, aside, lambda value, known: abs(value - known), clock)
        self._shared = _ReadingCache(mark, shared, _files_moved, clock)

    def of(self, pid: int) -> dict[str, int]:
        """Returns the reading of procfs.rollup, perhaps from the cache."""
        return self._rollups.of(pid)

    def aside_of(self, pid: int) -> int:
        """Returns the reading of procfs.mapped_aside, perhaps from the cache."""
        return self._asides.of(pid)

    def shared_of(self, pid: int) -> frozenset[tuple[int, int]]:
        """Returns the reading of procfs.shared_files, perhaps from the cache. A file that is mapped
        and holds no page yet may be missing."""
        return self._shared.of(pid)

    def keep(self, pids: Iterable[int]) -> None:
        """Forgets the readings of all other processes."""
        living = set(pids)
        self._rollups.keep(living)
        self._asides.keep(living)
        self._shared.keep(living)
