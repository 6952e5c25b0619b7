"""Reads NVIDIA's counters through NVML: a node's GPUs, and the processes that hold their memory.

Each failure is a typed error, because a node with a broken driver is not a node without GPUs, and
an unreadable GPU is not an empty GPU.
"""

import logging
from dataclasses import dataclass
from typing import Any, Protocol

from arbiter.errors import ArbiterError, error_fields
from arbiter.units import Bytes

logger = logging.getLogger("arbiter.agent")

# Return codes of nvml.h.
_NOT_SUPPORTED, _NO_PERMISSION, _FUNCTION_NOT_FOUND, _GPU_IS_LOST = 3, 4, 13, 15
# Answers to a request for the list of processes by a driver or container that never gives it.
_NEVER_LISTED = frozenset({_NOT_SUPPORTED, _NO_PERMISSION, _FUNCTION_NOT_FOUND})


@error_fields
class NvmlFailed(ArbiterError):
    """Says that a node has a driver which does not answer for the node as a whole."""

    call: str
    cause: str

    def __str__(self) -> str:
        return (
            f"NVML does not answer ({self.call}: {self.cause}), so this node's GPUs cannot be read;"
            " see `nvidia-smi`. After an update of the driver reboot the node or reload its modules"
        )


@error_fields
class GpuUnreadable(ArbiterError):
    """Says that NVML does not answer for one GPU."""

    index: int
    call: str
    cause: str
    code: int  # as nvml.h has it

    @property
    def is_lost(self) -> bool:
        """Says whether the GPU fell off the bus, and its memory with it."""
        return self.code == _GPU_IS_LOST

    def __str__(self) -> str:
        return f"{self.call}: {self.cause} (NVML code {self.code})"


@dataclass(frozen=True, slots=True)
class Card:
    """Describes one GPU."""

    name: str  # of the kind, such as NVIDIA H100 80GB HBM3
    uuid: str  # of this card, whatever its index
    total_bytes: Bytes


class Gpus(Protocol):
    """Questions to NVML by its index of a GPU; `Nvml` below asks the real library. All methods but
    `count` raise GpuUnreadable."""

    def count(self) -> int: ...
    def card(self, index: int) -> Card: ...
    def free(self, index: int) -> Bytes: ...
    def reserved(self, index: int) -> Bytes:
        """Returns the bytes that the driver keeps to itself; 0 where it does not say."""
        ...

    def used_by_pid(self, index: int) -> dict[int, Bytes | None] | None:
        """Returns the bytes of each process on a GPU; None if the driver lists no processes, and a
        size of None if it does not say this size."""
        ...


class NoGpus:
    """Stands for a node without NVIDIA's driver."""

    def count(self) -> int:
        return 0

    def card(self, index: int) -> Card:
        raise IndexError(index)

    def free(self, index: int) -> Bytes:
        raise IndexError(index)

    def reserved(self, index: int) -> Bytes:
        raise IndexError(index)

    def used_by_pid(self, index: int) -> dict[int, Bytes | None] | None:
        raise IndexError(index)


class Nvml:
    """Asks the real library through the module pynvml, which the caller has initialised."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        # pynvml raises the second, outside its own tree, if the library lacks a function.
        self._errors = (nvml.NVMLError, nvml.NVMLLibraryMismatchError)
        self._handles: dict[int, Any] = {}

    def count(self) -> int:
        """Returns how many GPUs there are. Raises NvmlFailed."""
        try:
            return int(self._nvml.nvmlDeviceGetCount())
        except self._errors as error:
            raise NvmlFailed("nvmlDeviceGetCount", str(error)) from error

    def card(self, index: int) -> Card:
        name = self._ask(index, "nvmlDeviceGetName")
        uuid = self._ask(index, "nvmlDeviceGetUUID")
        total = self._ask(index, "nvmlDeviceGetMemoryInfo").total
        return Card(str(name), str(uuid), Bytes(total))

    def free(self, index: int) -> Bytes:
        return Bytes(self._ask(index, "nvmlDeviceGetMemoryInfo").free)

    def reserved(self, index: int) -> Bytes:
        handle = self._handle(index)
        second = self._nvml.nvmlMemory_v2  # the first form counts it as used
        try:
            return Bytes(self._nvml.nvmlDeviceGetMemoryInfo(handle, version=second).reserved)
        except self._errors:
            return Bytes(0)  # an older driver; of a failure `free` tells

    def used_by_pid(self, index: int) -> dict[int, Bytes | None] | None:
        """Returns the bytes of each process on a GPU. NVML lists a process that computes and draws
        twice, with all its bytes each time, and those that share a GPU by MPS apart from all
        others."""
        compute = self._listed(index, "nvmlDeviceGetComputeRunningProcesses")
        sharing = self._listed(index, "nvmlDeviceGetMPSComputeRunningProcesses")
        graphics = self._listed(index, "nvmlDeviceGetGraphicsRunningProcesses")
        if compute is None:
            return None
        used_bytes: dict[int, Bytes | None] = {}
        for process in (*compute, *(sharing or ()), *(graphics or ())):
            if used_bytes.get(process.pid) is None:
                used_bytes[process.pid] = process.usedGpuMemory
        return used_bytes

    def _listed(self, index: int, call: str) -> list[Any] | None:
        """Returns the processes of one kind; None if this driver lists none of this kind, or not to
        this user."""
        try:
            return list(self._ask(index, call))
        except GpuUnreadable as error:
            if error.code in _NEVER_LISTED:
                return None
            raise

    def _ask(self, index: int, call: str) -> Any:
        return self._call(index, call, self._handle(index))

    def _handle(self, index: int) -> Any:
        if index not in self._handles:
            self._handles[index] = self._call(index, "nvmlDeviceGetHandleByIndex", index)
        return self._handles[index]

    def _call(self, index: int, call: str, argument: Any) -> Any:
        try:
            return getattr(self._nvml, call)(argument)
        except self._errors as error:
            code = getattr(error, "value", _FUNCTION_NOT_FOUND)
            raise GpuUnreadable(index, call, str(error), code) from error


def find_gpus() -> Gpus:
    """Returns NVML's devices, or none if the node has no driver. Raises NvmlFailed if the driver
    does not answer."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded) as error:
        logger.info("no GPUs on this node: %s", error)
        return NoGpus()
    except pynvml.NVMLError as error:
        raise NvmlFailed("nvmlInit", str(error)) from error
    return Nvml(pynvml)
