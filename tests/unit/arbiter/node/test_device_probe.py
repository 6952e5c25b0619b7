"""Devices and readings of a node, with and without GPUs."""

import os
from dataclasses import dataclass, field

import pytest

from arbiter.core.types import DeviceBytes, DeviceKind
from arbiter.node.device_probe import NodeProbe, NoGpus, Nvml, Tree
from arbiter.units import GIB, Bytes, DeviceId, NodeId, TicketId

N = NodeId("n")
GPU = DeviceId("n/gpu:0")


@dataclass
class FakeGpus:
    used: int = 0
    pids: dict[int, Bytes | None] = field(default_factory=dict)

    def totals(self) -> tuple[Bytes, ...]:
        return (Bytes(24 * GIB),)

    def free(self, index: int) -> Bytes:
        return Bytes(24 * GIB - self.used)

    def used_by_pid(self, index: int) -> dict[int, Bytes | None]:
        return self.pids


def engine(pid: int, ticket: str = "t", gib: int = 10) -> Tree:
    return Tree(TicketId(ticket), frozenset({pid}), (DeviceBytes(GPU, Bytes(gib * GIB)),))


@pytest.mark.spec("B1")
def test_a_node_without_gpu_offers_ram_as_a_device_and_as_host() -> None:
    cpu, host = NodeProbe(N, NoGpus()).inventory()
    assert (cpu.device, cpu.kind) == ("n/cpu:0", DeviceKind.CPU)
    assert (host.device, host.kind) == ("n/host", DeviceKind.HOST)
    assert cpu.total_bytes == host.total_bytes > 0


@pytest.mark.spec("B1", "A16")
def test_used_bytes_without_engines_are_foreign() -> None:
    cpu, host = NodeProbe(N, NoGpus()).read([]).devices
    assert cpu.foreign_bytes == host.foreign_bytes > 0
    assert cpu.exact


@pytest.mark.spec("B1")
def test_a_gpu_node_offers_its_gpus_and_host() -> None:
    gpu, host = NodeProbe(N, FakeGpus()).inventory()
    assert (gpu.device, gpu.kind, gpu.total_bytes) == (GPU, DeviceKind.GPU, 24 * GIB)
    assert host.kind is DeviceKind.HOST


@pytest.mark.spec("B1", "A16")
def test_nvml_bytes_of_engine_processes_are_their_tickets_and_the_rest_is_foreign() -> None:
    me, stranger = os.getpid(), os.getppid()
    gpus = FakeGpus(14 * GIB, {me: Bytes(10 * GIB), stranger: Bytes(3 * GIB)})
    readings = NodeProbe(N, gpus).read([engine(me)])
    (on_gpu,) = [r for r in readings.devices if r.device == GPU]
    assert on_gpu.exact
    assert on_gpu.foreign_bytes == 4 * GIB  # the stranger, and what NVML gives to nobody
    assert DeviceBytes(GPU, Bytes(10 * GIB)) in readings.engines[0].measured


@pytest.mark.spec("A16")
def test_device_delta_without_sizes_per_process_is_split_as_granted() -> None:
    gpus = FakeGpus(2 * GIB, {})
    probe = NodeProbe(N, gpus)
    probe.read([])  # nothing of ours: 2 GiB are foreign
    gpus.used, gpus.pids = 11 * GIB, {os.getpid(): None}
    readings = probe.read([engine(os.getpid(), "a", 10), engine(os.getppid(), "b", 5)])
    (on_gpu,) = [r for r in readings.devices if r.device == GPU]
    assert not on_gpu.exact
    assert on_gpu.foreign_bytes == 2 * GIB
    sizes = {e.ticket: dict((d.device, d.size_bytes) for d in e.measured) for e in readings.engines}
    assert (sizes[TicketId("a")][GPU], sizes[TicketId("b")][GPU]) == (6 * GIB, 3 * GIB)


@pytest.mark.spec("A16")
def test_pids_of_another_namespace_make_a_reading_inexact() -> None:
    gpus = FakeGpus(10 * GIB, {2**22 + 1: Bytes(10 * GIB)})  # beyond the kernel's highest pid
    readings = NodeProbe(N, gpus).read([engine(os.getpid())])
    assert not next(r for r in readings.devices if r.device == GPU).exact


def test_nvml_is_asked_for_compute_and_graphics_processes() -> None:
    @dataclass
    class Info:
        total: int = 24 * GIB
        free: int = 20 * GIB

    @dataclass
    class Process:
        pid: int
        usedGpuMemory: int | None  # noqa: N815

    class Library:
        def nvmlDeviceGetCount(self) -> int:  # noqa: N802
            return 1

        def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
            return index

        def nvmlDeviceGetMemoryInfo(self, handle: int) -> Info:  # noqa: N802
            return Info()

        def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Process]:  # noqa: N802
            return [Process(7, 3 * GIB)]

        def nvmlDeviceGetGraphicsRunningProcesses(self, handle: int) -> list[Process]:  # noqa: N802
            return [Process(8, None)]

    gpus = Nvml(Library())
    assert gpus.totals() == (24 * GIB,)
    assert gpus.free(0) == 20 * GIB
    assert gpus.used_by_pid(0) == {7: 3 * GIB, 8: None}
