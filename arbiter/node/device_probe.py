"""Readings of one node's devices and engines: RAM by /proc, GPUs by NVML. Reads, decides nothing.

A node without a GPU offers `cpu:0`, a budget of RAM that stands in for a device, beside `host`,
the budget for sleeping weights. Foreign bytes are whatever the kernel counts as used and no engine
of this node holds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from arbiter.core.events import DeviceReading, EngineReading
from arbiter.core.types import DeviceBytes, DeviceKind, DeviceSpec
from arbiter.node import procfs
from arbiter.node.rollup_cache import Rollups
from arbiter.units import Bytes, DeviceId, NodeId, TicketId


@dataclass(frozen=True, slots=True)
class Tree:
    """One engine: its living processes and where its ticket lets it be."""

    ticket: TicketId
    pids: frozenset[int]
    granted: tuple[DeviceBytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Readings:
    devices: tuple[DeviceReading, ...]
    engines: tuple[EngineReading, ...]


class Gpus(Protocol):
    """What is asked of NVML; `Nvml` below is the real one."""

    def totals(self) -> tuple[Bytes, ...]: ...
    def free(self, index: int) -> Bytes: ...
    def used_by_pid(self, index: int) -> dict[int, Bytes | None]: ...


class NodeProbe:
    """All devices of one node. Without GPUs, `cpu:0` stands in."""

    def __init__(self, node: NodeId, gpus: Gpus) -> None:
        self._node = node
        self._gpus = gpus
        self._totals = gpus.totals()
        self._rollups = Rollups()
        self._baseline: dict[int, int] = {}  # last used bytes of a GPU while no engine was on it

    def inventory(self) -> tuple[DeviceSpec, ...]:
        total_bytes, _ = procfs.ram()
        host = DeviceSpec(self._id("host"), DeviceKind.HOST, total_bytes)
        if not self._totals:
            return DeviceSpec(self._id("cpu:0"), DeviceKind.CPU, total_bytes), host
        gpus = (
            DeviceSpec(self._id(f"gpu:{i}"), DeviceKind.GPU, size)
            for i, size in enumerate(self._totals)
        )
        return *gpus, host

    def read(self, trees: list[Tree]) -> Readings:
        """Takes milliseconds per engine: call it from a thread."""
        memories = {tree.ticket: procfs.memory(tree.pids, self._rollups.of) for tree in trees}
        self._rollups.keep(pid for tree in trees for pid in tree.pids)
        measured = {ticket: self._ram_part(m) for ticket, m in memories.items()}
        devices = [self._ram(memories)] if self._totals else self._ram_pair(memories)
        for index in range(len(self._totals)):
            reading, parts = self._gpu(index, trees)
            devices.append(reading)
            for ticket, size in parts.items():
                measured[ticket].append(DeviceBytes(reading.device, size))
        engines = tuple(EngineReading(t, tuple(parts)) for t, parts in measured.items())
        return Readings(tuple(devices), engines)

    def gpu_pids(self) -> set[int]:
        """Every pid that NVML still lists on any GPU."""
        return {pid for i in range(len(self._totals)) for pid in self._gpus.used_by_pid(i)}

    def _id(self, name: str) -> DeviceId:
        return DeviceId(f"{self._node}/{name}")

    def _ram_part(self, memory: procfs.Memory) -> list[DeviceBytes]:
        """On a GPU node the whole of an engine's RAM is host RAM."""
        host = self._id("host")
        if self._totals:
            return [DeviceBytes(host, memory.host_bytes)]
        cpu = DeviceBytes(self._id("cpu:0"), memory.device_bytes)
        return [cpu, DeviceBytes(host, memory.host_bytes)] if memory.host_bytes else [cpu]

    def _ram(self, memories: Mapping[TicketId, procfs.Memory]) -> DeviceReading:
        total_bytes, free_bytes = procfs.ram()
        ours_bytes = sum(m.device_bytes + m.host_bytes for m in memories.values())
        foreign_bytes = max(0, total_bytes - free_bytes - ours_bytes)
        return DeviceReading(self._id("host"), free_bytes, Bytes(foreign_bytes))

    def _ram_pair(self, memories: Mapping[TicketId, procfs.Memory]) -> list[DeviceReading]:
        """Two budgets of one RAM: both see the same free and foreign bytes."""
        host = self._ram(memories)
        return [DeviceReading(self._id("cpu:0"), host.free_bytes, host.foreign_bytes), host]

    def _gpu(self, index: int, trees: list[Tree]) -> tuple[DeviceReading, dict[TicketId, Bytes]]:
        device = self._id(f"gpu:{index}")
        free_bytes = self._gpus.free(index)
        used_bytes = self._totals[index] - free_bytes
        here = [t for t in trees if any(d.device == device for d in t.granted)]
        if not here:
            self._baseline[index] = used_bytes
        by_pid = self._gpus.used_by_pid(index)
        if _is_exact(by_pid, here):
            parts = {t.ticket: _sum(by_pid, t.pids) for t in trees}
            parts = {ticket: size for ticket, size in parts.items() if size}
            foreign_bytes = max(0, used_bytes - sum(parts.values()))
            return DeviceReading(device, free_bytes, Bytes(foreign_bytes)), parts
        foreign_bytes = min(used_bytes, self._baseline.get(index, 0))
        parts = _share(used_bytes - foreign_bytes, device, here)
        return DeviceReading(device, free_bytes, Bytes(foreign_bytes), exact=False), parts


def _is_exact(by_pid: dict[int, Bytes | None], here: list[Tree]) -> bool:
    """NVML names bytes and pids as this process knows them. In some containers it gives neither:
    a size is missing, or engines on the device show up under pids of another namespace."""
    if any(size is None for size in by_pid.values()):
        return False
    strangers = [pid for pid in by_pid if procfs.process(pid) is None]
    return not (here and strangers)


def _sum(by_pid: dict[int, Bytes | None], pids: frozenset[int]) -> Bytes:
    return Bytes(sum(size or 0 for pid, size in by_pid.items() if pid in pids))


def _share(size_bytes: int, device: DeviceId, here: list[Tree]) -> dict[TicketId, Bytes]:
    """The device's delta, split as granted: the best there is without a reading per process."""
    granted = {t.ticket: sum(d.size_bytes for d in t.granted if d.device == device) for t in here}
    total = sum(granted.values())
    return {ticket: Bytes(size_bytes * g // total) for ticket, g in granted.items() if total}


class NoGpus:
    """A node without NVIDIA's driver."""

    def totals(self) -> tuple[Bytes, ...]:
        return ()

    def free(self, index: int) -> Bytes:
        raise IndexError(index)

    def used_by_pid(self, index: int) -> dict[int, Bytes | None]:
        raise IndexError(index)


class Nvml:
    """NVIDIA's own counters."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        count = nvml.nvmlDeviceGetCount()
        self._handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]

    def totals(self) -> tuple[Bytes, ...]:
        return tuple(Bytes(self._nvml.nvmlDeviceGetMemoryInfo(h).total) for h in self._handles)

    def free(self, index: int) -> Bytes:
        return Bytes(self._nvml.nvmlDeviceGetMemoryInfo(self._handles[index]).free)

    def used_by_pid(self, index: int) -> dict[int, Bytes | None]:
        handle = self._handles[index]
        listed = (
            *self._nvml.nvmlDeviceGetComputeRunningProcesses(handle),
            *self._nvml.nvmlDeviceGetGraphicsRunningProcesses(handle),
        )
        return {p.pid: p.usedGpuMemory for p in listed}


def find_gpus() -> Gpus:
    """NVML's devices, or none where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return NoGpus()
    return Nvml(pynvml)
