"""Devices and readings of a node without GPUs; of one with GPUs see test_nvml."""

import pytest

from arbiter.core.types import DeviceKind
from arbiter.node.device_probe import NodeProbe
from arbiter.node.nvml import NoGpus
from arbiter.units import NodeId

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
