"""GPUs on a machine that has none: the real pynvml, over a library of ours in place of NVIDIA's.

A test says in a folder what NVML answers (libnvidia-ml.c names the format); an engine under test
says there what it holds, and holds it until its process dies. Everything above the library is the
product's: `arbiter.node.nvml.find_gpus` and what uses it.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pynvml

from arbiter.node.nvml import Gpus, find_gpus
from arbiter.protocol import ray_internals
from arbiter.units import GIB

SOURCE = Path(__file__).with_name("libnvidia-ml.c")
LIBRARY = "libnvidia-ml.so.1"  # the name that pynvml loads
FOLDER = "FAKE_NVML"  # the environment variable that the library reads
ANY = -1

# Return codes of nvml.h.
NOT_SUPPORTED, NO_PERMISSION, TIMEOUT, FUNCTION_NOT_FOUND, GPU_IS_LOST = 3, 4, 10, 13, 15
DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, VERSION_MISMATCH, UNKNOWN = 9, 12, 18, 999


def build(folder: Path) -> Path:
    """Compile the library into `folder`. Fails where there is no C compiler, which vLLM's CPU
    build needs as well."""
    compiler = shutil.which("cc")
    assert compiler, (
        "the fake NVML library needs a C compiler: install gcc, so that there is a `cc`"
    )
    made = folder / LIBRARY
    strict = ["-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC"]
    command = [compiler, *strict, "-o", str(made), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return made


def opened(library: Path) -> dict[str, Any]:
    """Globals of the module pynvml once it has loaded this library."""
    return {"nvmlLib": ctypes.CDLL(str(library)), "_nvmlGetFunctionPointer_cache": {}}


@dataclass
class Gpu:
    name: str = "NVIDIA A10G"
    uuid: str = "GPU-0"
    total: int = 24 * GIB
    used: int = 0  # beyond what its processes hold: what is not listed
    reserved: int = 0  # the driver's own
    compute: dict[int, int | None] = field(default_factory=dict)  # bytes by pid; None: N/A
    graphics: dict[int, int | None] = field(default_factory=dict)
    mps: dict[int, int | None] = field(default_factory=dict)
    hidden: bool = False  # no process is listed

    def lines(self, index: int) -> list[str]:
        kinds = {"compute": self.compute, "graphics": self.graphics, "mps": self.mps}
        listed = [
            f"process {index} {kind} {pid} {'N/A' if size is None else size}"
            for kind, sizes in kinds.items()
            for pid, size in sizes.items()
        ]
        own = f"gpu {index} {self.total} {self.used} {self.uuid} {self.name}"
        kept = f"reserve {index} {self.reserved}"
        return [own, kept, *listed, *([f"hide {index}"] if self.hidden else [])]


class FakeNvml:
    """What NVML answers from the next `write` on; two GPUs unless a test says otherwise."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gpus = [Gpu(uuid="GPU-aaaa"), Gpu("NVIDIA H100 80GB HBM3", "GPU-bbbb", 80 * GIB)]
        self.faults: dict[tuple[str, int], int] = {}
        (folder / "held").mkdir(parents=True)
        self.write()

    def write(self) -> None:
        lines = [line for index, gpu in enumerate(self.gpus) for line in gpu.lines(index)]
        lines += [f"fail {call} {gpu} {code}" for (call, gpu), code in self.faults.items()]
        part = self.folder / "gpus.part"
        part.write_text("".join(f"{line}\n" for line in lines))
        part.rename(self.folder / "gpus")  # whole or not at all: it is read at any moment

    def fail(self, call: str, code: int, gpu: int = ANY) -> None:
        self.faults[call, gpu] = code
        self.write()

    def mend(self) -> None:
        self.faults.clear()
        self.write()


def hold(folder: Path, gpu: int, size: int, pid: int = 0) -> None:
    """This process, or another, holds as much on that GPU until it holds something else there or
    dies."""
    file = folder / "held" / f"{gpu}.{pid or os.getpid()}"
    part = file.with_name(f"part-{file.name}")
    part.write_text(str(size))
    part.rename(file)


# -- on a cluster --------------------------------------------------------------------------------


def of_session() -> Path:
    """Where a node agent of this Ray session finds the library and what it answers."""
    return Path(f"/tmp/fake-nvml-{ray_internals.session_name()}")


@contextlib.contextmanager
def gpus_of_session() -> Iterator[FakeNvml]:
    """For arbiters whose agents are told `gpus="tests.support.nvml:find"`."""
    folder = of_session()
    folder.mkdir()
    try:
        build(folder)
        yield FakeNvml(folder)
    finally:
        shutil.rmtree(folder)


def find() -> Gpus:
    """What the agent calls in its own process."""
    folder = of_session()
    os.environ[FOLDER] = str(folder)
    for name, value in opened(folder / LIBRARY).items():
        setattr(pynvml, name, value)
    return find_gpus()


def indexes(folder: Path, uuids: list[str]) -> list[int]:
    """Of these cards, as CUDA finds them."""
    rows = [line.split() for line in (folder / "gpus").read_text().splitlines()]
    cards = {row[4]: int(row[1]) for row in rows if row[0] == "gpu"}
    return [cards[uuid] for uuid in uuids]
