"""A process whose pages have not moved is not walked again; one whose pages have, at once."""

import mmap
import os
import signal

import pytest

from arbiter.node import procfs
from arbiter.node.rollup_cache import BELIEVED_S, SLACK_BYTES, PageCounters, Rollups
from arbiter.units import MIB


class Kernel:
    """One process as a test says it is, and how often it was walked."""

    def __init__(self) -> None:
        self.now_s, self.mark, self.walks = 0.0, PageCounters(7, 1_000, 50 * MIB), 0
        self.looks = 0
        self.rollups = Rollups(lambda _: self.mark, self._walk, lambda: self.now_s, self._look)

    def _walk(self, pid: int) -> dict[str, int]:
        self.walks += 1
        return {"Private_Dirty": self.walks}

    def _look(self, pid: int) -> int:
        self.looks += 1
        return self.looks * MIB


SLACK_PAGES = SLACK_BYTES // os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("mark", "walks"),
    [
        (PageCounters(7, 1_000, 50 * MIB), 1),
        (PageCounters(7, 1_000 + SLACK_PAGES, 50 * MIB), 1),
        (PageCounters(7, 1_001 + SLACK_PAGES, 50 * MIB), 2),  # it wrote to pages it had shared
        (PageCounters(7, 1_000, 50 * MIB - SLACK_BYTES - 1), 2),  # it gave pages back
        (PageCounters(8, 1_000, 50 * MIB), 2),  # another process of that pid
    ],
)
@pytest.mark.spec("B1")
def test_a_process_is_walked_again_when_more_than_the_slack_has_moved(
    mark: PageCounters, walks: int
) -> None:
    kernel = Kernel()
    kernel.rollups.of(1)
    kernel.mark = mark
    assert kernel.rollups.of(1) == {"Private_Dirty": walks}


@pytest.mark.spec("N1")
def test_mappings_are_read_again_only_when_pages_have_moved() -> None:
    kernel = Kernel()
    assert [kernel.rollups.aside_of(1) for _ in range(3)] == [MIB] * 3
    kernel.mark = PageCounters(7, 1_001 + SLACK_PAGES, 50 * MIB)
    assert kernel.rollups.aside_of(1) == 2 * MIB
    kernel.now_s = BELIEVED_S
    assert kernel.rollups.aside_of(1) == 3 * MIB


@pytest.mark.spec("N1")
def test_names_of_mappings_are_read_again_only_when_pages_have_moved() -> None:
    """And soon again where another file is mapped than before."""
    mark, now_s, mapped, looks = PageCounters(7, 1_000, 50 * MIB), 0.0, frozenset({(1, 5)}), 0

    def look(pid: int) -> frozenset[tuple[int, int]]:
        nonlocal looks
        looks += 1
        return mapped

    rollups = Rollups(lambda _: mark, clock=lambda: now_s, shared=look)
    assert [rollups.shared_of(1) for _ in range(3)] == [mapped] * 3
    assert looks == 1
    mapped = frozenset({(1, 5), (1, 6)})
    mark = PageCounters(7, 1_001 + SLACK_PAGES, 50 * MIB)
    assert rollups.shared_of(1) == mapped
    now_s, mapped = BELIEVED_S, frozenset({(1, 6)})
    assert rollups.shared_of(1) == mapped
    now_s, mapped = 2 * BELIEVED_S, frozenset()
    assert rollups.shared_of(1) == mapped  # not believed for longer, because it had changed


@pytest.mark.spec("N1")
@pytest.mark.parametrize(
    ("grows", "expected"),
    [
        (0, [0, 5, 15, 35, 75, 115]),
        (SLACK_BYTES, [0, 5, 15, 35, 75, 115]),  # what a process at rest gains and loses
        (SLACK_BYTES + 1, list(range(0, 120, 5))),
    ],
)
def test_a_process_at_rest_is_walked_ever_more_rarely(grows: int, expected: list[float]) -> None:
    read_at_s = []
    now_s = 0.0

    def walk(pid: int) -> dict[str, int]:
        read_at_s.append(now_s)
        return {"Private_Dirty": MIB + grows * (len(read_at_s) % 2)}

    rollups = Rollups(lambda _: PageCounters(7, 1_000, 50 * MIB), walk, lambda: now_s)
    for second in range(120):
        now_s = float(second)
        rollups.of(1)
    assert read_at_s == expected


def test_cached_rollup_expires_and_is_dropped_with_its_process() -> None:
    kernel = Kernel()
    kernel.rollups.of(1)
    kernel.now_s = BELIEVED_S
    kernel.rollups.of(1)
    assert kernel.walks == 2
    kernel.rollups.keep([2])
    kernel.rollups.of(1)
    assert kernel.walks == 3


@pytest.mark.spec("B1")
def test_bytes_written_by_a_real_process_are_seen_at_the_next_reading() -> None:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    told, tell = os.pipe()
    ready, say = os.pipe()
    if (pid := os.fork()) == 0:
        try:  # else what goes wrong here would run the rest of the tests twice
            os.read(told, 1)
            held = mmap.mmap(-1, 20 * MIB, flags)
            held[:] = bytes(20 * MIB)
            os.write(say, b"x")
            signal.pause()
        finally:
            os._exit(1)
    os.close(say)  # it is the child's; its end is heard as well
    try:
        rollups = Rollups()
        before = procfs.memory([pid], rollups.of).device_bytes
        os.write(tell, b"x")
        assert os.read(ready, 1) == b"x"
        assert procfs.memory([pid], rollups.of).device_bytes - before >= 20 * MIB
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for fd in (told, tell, ready):
            os.close(fd)
