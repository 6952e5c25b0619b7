"""Readings of one node's devices and engines: RAM by /proc, GPUs by NVML. Reads, decides nothing.

A node without a GPU offers `cpu:0`, a budget of RAM that stands in for a device, beside `host`,
the budget for sleeping weights. Foreign bytes are whatever the kernel counts as used and no engine
of this node holds.
"""

import logging
from dataclasses import dataclass

from arbiter.core.events import (
    DeviceReading,
    DeviceUnreadable,
    EngineReading,
    ForeignProcess,
    NodeSeen,
)
from arbiter.core.types import DeviceBytes, DeviceKind, DeviceSpec
from arbiter.node import procfs
from arbiter.node.nvml import Card, Gpus, GpuUnreadable
from arbiter.node.rollup_cache import Rollups
from arbiter.units import Bytes, DeviceId, NodeId, TicketId

logger = logging.getLogger("arbiter.agent")

NAMED_COUNT = 16  # a reading names the largest foreign processes; a desktop has about ten


@dataclass(frozen=True, slots=True)
class Tree:
    """Describes the processes of one ticket, alive or still listed by a driver, and its granted
    devices."""

    ticket: TicketId
    pids: frozenset[int]
    granted: tuple[DeviceBytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Readings:
    """Holds what one look at a node's devices and engines has found."""

    devices: tuple[DeviceReading, ...]
    engines: tuple[EngineReading, ...]
    unreadable: tuple[DeviceUnreadable, ...] = ()  # devices without a reading this time


class NodeProbe:
    """Reads all devices of one node. Without GPUs, `cpu:0` stands in for a device."""

    def __init__(self, node: NodeId, gpus: Gpus) -> None:
        """Looks which GPUs there are. Raises NvmlFailed."""
        self._node = node
        self._gpus = gpus
        self._indexes = range(gpus.count())
        self._cards: dict[int, Card] = {}
        self._faults: dict[int, GpuUnreadable] = {}  # of GPUs that could not be read last time
        self._pids: dict[int, set[int]] = {}  # that NVML listed last
        self._rollups = Rollups()
        self._baseline: dict[int, int] = {}  # last used bytes of a GPU while no engine was on it
        for index in self._indexes:
            try:
                self._card(index)
            except GpuUnreadable as fault:
                self._note_fault(index, fault)

    def uuids(self) -> dict[DeviceId, str]:
        """Returns the UUIDs of this node's GPUs, as far as NVML gives them."""
        cards = ((i, card) for i in self._indexes if (card := self._cards.get(i)))
        return {self._gpu_id(i): card.uuid for i, card in cards}

    def introduction(self) -> NodeSeen:
        """Returns what the arbiter is told of this node's devices."""
        unreadable = self.unreadable()  # first: what answers in between is in both, not in neither
        lost = tuple(self._gpu_id(i) for i in self._indexes if self._is_lost(i))
        return NodeSeen(self._node, self.inventory(), unreadable, lost)

    def inventory(self) -> tuple[DeviceSpec, ...]:
        """Returns the devices of this node, without GPUs that fell off the bus or have never
        answered."""
        total_bytes, _ = procfs.ram()
        host = DeviceSpec(self._id("host"), DeviceKind.HOST, total_bytes)
        if not self._indexes:
            return DeviceSpec(self._id("cpu:0"), DeviceKind.CPU, total_bytes), host
        cards = ((i, card) for i in self._indexes if (card := self._cards.get(i)))
        gpus = (
            DeviceSpec(self._gpu_id(i), DeviceKind.GPU, card.total_bytes, card.name, card.uuid)
            for i, card in cards
            if not self._is_lost(i)
        )
        return *gpus, host

    def unreadable(self) -> tuple[DeviceUnreadable, ...]:
        """Returns the GPUs of this node for which NVML gives no answer at the moment."""
        faults = ((i, fault) for i in self._indexes if (fault := self._faults.get(i)))
        return tuple(
            DeviceUnreadable(self._gpu_id(i), str(fault))
            for i, fault in faults
            if not fault.is_lost
        )

    def read(self, trees: list[Tree], shared_bytes: int = 0) -> Readings:
        """Reads every device and the bytes of each of `trees`. Takes milliseconds per engine, so it
        is called from a thread. `shared_bytes`: RAM of slabs and host copies, which is no engine's
        and not foreign."""
        rollups = self._rollups
        readers = rollups.of, rollups.aside_of, rollups.shared_of
        memories = {tree.ticket: procfs.memory(tree.pids, *readers) for tree in trees}
        self._rollups.keep(pid for tree in trees for pid in tree.pids)
        measured = {ticket: self._ram_part(m) for ticket, m in memories.items()}
        ours_bytes = sum(m.device_bytes + m.host_bytes for m in memories.values()) + shared_bytes
        devices = [self._ram(ours_bytes)] if self._indexes else self._ram_of_cpu_node(ours_bytes)
        for index in self._indexes:
            try:
                reading, parts = self._gpu(index, trees)
            except GpuUnreadable as fault:
                self._note_fault(index, fault)
                continue
            self._note_fault(index, None)
            devices.append(reading)
            for ticket, size in parts.items():
                measured[ticket].append(DeviceBytes(reading.device, size))
        engines = tuple(EngineReading(t, tuple(parts)) for t, parts in measured.items())
        return Readings(tuple(devices), engines, self.unreadable())

    def gpu_pids(self) -> set[int]:
        """Returns every pid that NVML lists on any GPU; for an unreadable GPU, the pids it listed
        last."""
        for index in self._indexes:
            try:
                self._pids[index] = set(self._gpus.used_by_pid(index) or ())
            except GpuUnreadable as fault:
                if fault.is_lost:
                    self._pids[index] = set()
        return {pid for pids in self._pids.values() for pid in pids}

    def _id(self, name: str) -> DeviceId:
        return DeviceId(f"{self._node}/{name}")

    def _gpu_id(self, index: int) -> DeviceId:
        return self._id(f"gpu:{index}")

    def _card(self, index: int) -> Card:
        """Returns what does not change of a GPU. Raises GpuUnreadable."""
        if index not in self._cards:
            self._cards[index] = self._gpus.card(index)
        return self._cards[index]

    def _is_lost(self, index: int) -> bool:
        """Says whether a GPU fell off the bus."""
        fault = self._faults.get(index)
        return fault is not None and fault.is_lost

    def _note_fault(self, index: int, fault: GpuUnreadable | None) -> None:
        """Logs the fault when it changes, because readings come each second. A fault that stays is
        never taken out in between: another thread may ask for the inventory."""
        before = self._faults.get(index)
        if fault is None:
            self._faults.pop(index, None)
        else:
            self._faults[index] = fault
        if str(before) != str(fault):
            message = f"cannot be read: {fault}" if fault else "answers again"
            logger.warning("%s %s", self._gpu_id(index), message)

    def _ram_part(self, memory: procfs.Memory) -> list[DeviceBytes]:
        """Divides an engine's RAM over devices: on a GPU node all of it is host RAM."""
        host = self._id("host")
        if self._indexes:
            return [DeviceBytes(host, Bytes(memory.device_bytes + memory.host_bytes))]
        cpu = DeviceBytes(self._id("cpu:0"), memory.device_bytes)
        return [cpu, DeviceBytes(host, memory.host_bytes)] if memory.host_bytes else [cpu]

    def _ram(self, ours_bytes: int) -> DeviceReading:
        """Returns the reading of host RAM, of which engines and shared memory of this node hold
        `ours_bytes`."""
        total_bytes, free_bytes = procfs.ram()
        foreign_bytes = max(0, total_bytes - free_bytes - ours_bytes)
        return DeviceReading(self._id("host"), free_bytes, Bytes(foreign_bytes))

    def _ram_of_cpu_node(self, ours_bytes: int) -> list[DeviceReading]:
        """Returns the readings of `cpu:0` and `host`: two budgets of one RAM, which see the same
        free and foreign bytes."""
        host = self._ram(ours_bytes)
        return [DeviceReading(self._id("cpu:0"), host.free_bytes, host.foreign_bytes), host]

    def _gpu(self, index: int, trees: list[Tree]) -> tuple[DeviceReading, dict[TicketId, Bytes]]:
        """Returns the reading of one GPU, and the bytes of each ticket there. Raises
        GpuUnreadable."""
        device, total_bytes = self._gpu_id(index), self._card(index).total_bytes
        free_bytes = self._gpus.free(index)
        # The margin of a GPU covers what its driver keeps (B3).
        used_bytes = total_bytes - free_bytes - self._gpus.reserved(index)
        on_device = [t for t in trees if any(d.device == device for d in t.granted)]
        if not on_device:
            self._baseline[index] = used_bytes
        by_pid = self._gpus.used_by_pid(index)
        self._pids[index] = set(by_pid or ())
        grown_bytes = used_bytes - self._baseline.get(index, 0)
        ours = {pid for t in trees for pid in t.pids}
        if by_pid is not None and _is_exact(by_pid, ours, on_device, grown_bytes):
            parts = {t.ticket: _sum(by_pid, t.pids) for t in trees}
            parts = {ticket: size for ticket, size in parts.items() if size}
            foreign_bytes = max(0, used_bytes - sum(parts.values()))
            named = _foreign(by_pid, ours)
            reading = DeviceReading(
                device, free_bytes, Bytes(foreign_bytes), foreign_processes=named
            )
            return reading, parts
        foreign_bytes = min(used_bytes, self._baseline.get(index, 0))
        parts = _split_by_grant(used_bytes - foreign_bytes, device, on_device)
        return DeviceReading(device, free_bytes, Bytes(foreign_bytes), exact=False), parts


def _is_exact(
    by_pid: dict[int, Bytes | None], ours: set[int], on_device: list[Tree], grown_bytes: int
) -> bool:
    """Says whether NVML names bytes and pids as this process knows them. In some containers NVML
    gives neither: a size is missing, engines on the device show up under pids of another namespace,
    or the device has filled since the engines came and NVML lists no process."""
    if any(size is None for size in by_pid.values()) or (
        on_device and not by_pid and grown_bytes > 0
    ):
        return False
    strangers = [pid for pid in by_pid if pid not in ours and procfs.process(pid) is None]
    return not (on_device and strangers)


def _sum(by_pid: dict[int, Bytes | None], pids: frozenset[int]) -> Bytes:
    """Returns the bytes that NVML lists for these processes."""
    return Bytes(sum(size or 0 for pid, size in by_pid.items() if pid in pids))


def _split_by_grant(
    size_bytes: int, device: DeviceId, on_device: list[Tree]
) -> dict[TicketId, Bytes]:
    """Splits `size_bytes`, by which a device has filled since no engine was there, over the tickets
    in proportion to what each was granted there: the best there is without a reading per
    process."""
    granted = {
        t.ticket: sum(d.size_bytes for d in t.granted if d.device == device) for t in on_device
    }
    total = sum(granted.values())
    return {ticket: Bytes(size_bytes * g // total) for ticket, g in granted.items() if total}


def _foreign(by_pid: dict[int, Bytes | None], ours: set[int]) -> tuple[ForeignProcess, ...]:
    """Returns the largest processes that belong to no engine, with their names, at most
    NAMED_COUNT."""
    sizes = [(size or Bytes(0), pid) for pid, size in by_pid.items() if pid not in ours]
    largest = sorted(sizes, reverse=True)[:NAMED_COUNT]
    return tuple(ForeignProcess(pid, procfs.name(pid), size) for size, pid in largest)
