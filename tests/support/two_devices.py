"""Two devices on a node that has no GPU, for tickets over several of them.

What lies on device N are the memfds named `device-N`: real pages, counted by the kernel for the
process that holds them, as NVML counts a GPU's. Only how much there is of each is made up.
"""

import os
from contextlib import suppress
from pathlib import Path

from arbiter.units import GIB, Bytes
from deployments.engines.protocol import Config
from tests.support.fake_engine import FakeEngine

TOTAL = Bytes(4 * GIB)  # the table's arena is far below


class TwoDevices:
    def totals(self) -> tuple[Bytes, ...]:
        return TOTAL, TOTAL

    def free(self, index: int) -> Bytes:
        return Bytes(TOTAL - sum(size or 0 for size in self.used_by_pid(index).values()))

    def used_by_pid(self, index: int) -> dict[int, Bytes | None]:
        found: dict[int, Bytes | None] = {}
        for fd in Path("/proc").glob("[0-9]*/fd/*"):
            with suppress(OSError):  # it went, or it is another user's
                if os.readlink(fd).startswith(f"/memfd:device-{index} "):
                    pid = int(fd.parts[2])
                    found[pid] = Bytes((found.get(pid) or 0) + os.stat(fd).st_blocks * 512)
        return found


class SplitEngine(FakeEngine):
    """Holds an equal part on each device of its ticket."""

    def _allocate(self) -> None:
        devices = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        for device in devices:
            memory = os.memfd_create(f"device-{device}")  # closed by its end
            os.posix_fallocate(memory, 0, self.size // len(devices))


def build(config: Config) -> FakeEngine:
    return SplitEngine(config)
