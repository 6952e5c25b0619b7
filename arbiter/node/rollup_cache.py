"""Private pages of processes, without asking the kernel each second for what has not changed.

It walks all page tables of a process for `smaps_rollup`: 15 to 25 ms for each of an engine's two
(benchmarks.md), a core for twenty sleeping engines. But a process gets a page of its own by a
fault and loses one from its resident set, and both are counted where asking costs 20 us. Only
whether another process still maps the same page is not, so nothing is believed for long.
"""

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from arbiter.node import procfs
from arbiter.units import MIB

# What a process may have gained or lost unseen: a hundredth of the smallest engine here.
SLACK_BYTES = 1 * MIB
# Pages of a fork become a process's own when the process they were forked from dies or writes to
# its own: a zygote does neither but when it ends.
BELIEVED_S = 5.0

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Mark:
    """Counters of one process that move with its pages."""

    start_ticks: int  # with its pid, which process it is
    faults_count: int
    resident_bytes: int

    def is_near(self, other: "Mark") -> bool:
        """Whether no more than the slack can lie between the two."""
        faulted = abs(self.faults_count - other.faults_count) * _PAGE_BYTES
        moved = faulted + abs(self.resident_bytes - other.resident_bytes)
        return self.start_ticks == other.start_ticks and moved <= SLACK_BYTES


def mark_of(pid: int) -> Mark | None:
    """None when there is none of that pid."""
    folder = procfs.PROC / str(pid)
    try:
        # The name may hold spaces and brackets, so fields are counted after its last bracket.
        fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        resident = (folder / "statm").read_text().split()[1]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Mark(int(fields[19]), int(fields[7]) + int(fields[9]), int(resident) * _PAGE_BYTES)


@dataclass(frozen=True, slots=True)
class _Known:
    mark: Mark
    read_s: float
    rollup: dict[str, int]


class Rollups:
    """Of the processes that are asked for again and again."""

    def __init__(
        self,
        mark: Callable[[int], Mark | None] = mark_of,
        rollup: Callable[[int], dict[str, int]] = procfs.rollup,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mark, self._rollup, self._clock = mark, rollup, clock
        self._known: dict[int, _Known] = {}

    def of(self, pid: int) -> dict[str, int]:
        """As procfs.rollup."""
        mark, now_s = self._mark(pid), self._clock()
        known = self._known.get(pid)
        if mark and known and known.mark.is_near(mark) and now_s - known.read_s < BELIEVED_S:
            return known.rollup
        # The mark was taken before: what changes in between makes the next look a reading.
        rollup = self._rollup(pid)
        if mark and rollup:
            self._known[pid] = _Known(mark, now_s, rollup)
        return rollup

    def keep(self, pids: Iterable[int]) -> None:
        """Forget all others."""
        kept = set(pids)
        self._known = {pid: known for pid, known in self._known.items() if pid in kept}
