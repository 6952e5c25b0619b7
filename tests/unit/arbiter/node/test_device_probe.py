"""Devices and readings of a node without GPUs; of one with GPUs see test_nvml."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from arbiter.core.types import DeviceKind
from arbiter.node.device_probe import NodeProbe
from arbiter.node.nvml import Card, GpuUnreadable, NoGpus
from arbiter.units import Bytes, NodeId

N = NodeId("n")


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


class LostGpu(NoGpus):
    """One GPU, which fell off the bus."""

    def count(self) -> int:
        return 1

    def card(self, index: int) -> Card:
        return Card("A10G", "GPU-a", Bytes(5))


class SilentGpu(LostGpu):
    """One GPU, which answers nothing at first."""

    answers = False

    def card(self, index: int) -> Card:
        if not self.answers:
            raise GpuUnreadable(index, "nvmlDeviceGetHandleByIndex", "Timeout", 10)
        return super().card(index)


class Watched(dict[int, GpuUnreadable]):
    """Lets another thread look after each change."""

    def __init__(self, probe: NodeProbe) -> None:
        super().__init__()
        self.probe, self.seen = probe, list[list[str]]()

    def look(self) -> None:
        self.seen.append([spec.device for spec in self.probe.inventory()])

    def pop(self, *args: Any) -> Any:
        found = super().pop(*args)
        self.look()
        return found

    def __setitem__(self, index: int, fault: GpuUnreadable) -> None:
        super().__setitem__(index, fault)
        self.look()


@pytest.mark.spec("B1")
def test_lost_gpu_is_offered_at_no_moment_of_a_reading() -> None:
    probe = NodeProbe(N, LostGpu())
    probe._faults = faults = Watched(probe)
    for _ in range(2):
        probe._note_fault(0, GpuUnreadable(0, "nvmlDeviceGetMemoryInfo", "lost", 15))
    assert faults.seen == [["n/host"]] * 2
    probe._note_fault(0, None)
    assert faults.seen[-1] == ["n/gpu:0", "n/host"]


@pytest.mark.spec("B1", "B6")
def test_gpu_that_first_answers_during_an_introduction_is_not_left_out_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node without a GPU, and without one to come, refuses all that waits there."""
    gpus = SilentGpu()
    probe = NodeProbe(N, gpus)

    def then_read(look: Callable[[], Any]) -> Any:
        found = look()
        gpus.answers = True
        probe._card(0)
        probe._note_fault(0, None)
        return found

    for name in ("inventory", "unreadable"):
        monkeypatch.setattr(probe, name, partial(then_read, getattr(probe, name)))
    seen = probe.introduction()
    assert "n/gpu:0" in {d.device for d in (*seen.devices, *seen.unreadable)}
