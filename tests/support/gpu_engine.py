"""An engine that holds its bytes on the GPUs it is given, as NVML is told to say, and RAM beside
them. In `engine_args`, beside those of the fake engine: nvml (the folder of FakeNvml) and ram
(bytes of its process).
"""

import mmap
import os
from pathlib import Path

from arbiter.units import MIB
from deployments.engines.protocol import Config
from tests.support import nvml
from tests.support.fake_engine import FakeEngine

KEPT = 8 * MIB  # of each GPU while it sleeps: its context


class GpuEngine(FakeEngine):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.folder = Path(self.args["nvml"])
        self.gpus = nvml.indexes(self.folder, os.environ["CUDA_VISIBLE_DEVICES"].split(","))

    def _allocate(self) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        self.ram = mmap.mmap(-1, max(64, int(self.args.get("ram", 0))), flags)
        for index in self.gpus:
            nvml.hold(self.folder, index, self.size // len(self.gpus))

    async def sleep(self) -> None:
        self.copy = os.memfd_create("host-copy-fake")
        os.posix_fallocate(self.copy, 0, self.size)
        for index in self.gpus:
            nvml.hold(self.folder, index, KEPT)

    async def wake(self) -> None:
        for index in self.gpus:
            nvml.hold(self.folder, index, self.size // len(self.gpus))
        os.close(self.copy)
        self.wakes += 1

    async def probe(self) -> str:
        return "as before"


def build(config: Config) -> FakeEngine:
    return GpuEngine(config)
