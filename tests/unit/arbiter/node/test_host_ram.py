"""Every byte of RAM is on one book, by the kernel's figures and with real processes (B1)."""

import contextlib
from collections.abc import Iterator

import pytest

from arbiter.core.events import DeviceReading
from arbiter.core.types import DeviceBytes
from arbiter.node.device_probe import NodeProbe, Readings, Tree
from arbiter.node.nvml import Gpus, NoGpus, find_gpus
from arbiter.units import MIB, Bytes, DeviceId, NodeId, TicketId
from tests.support.holding import holding, kernel_bytes
from tests.support.nvml import FakeNvml

N = NodeId("n")
CPU, HOST, GPU = DeviceId("n/cpu:0"), DeviceId("n/host"), DeviceId("n/gpu:0")
WITHIN = 0.05  # B1
HELD = {"private": 200, "scratch": 100, "host-copy-a": 150}  # MiB, by kind


@pytest.fixture(scope="module")
def pids() -> Iterator[dict[str, int]]:
    """One engine of each kind."""
    with contextlib.ExitStack() as living:
        yield {kind: living.enter_context(holding(kind, mib)) for kind, mib in HELD.items()}


def read(gpus: Gpus, device: DeviceId, pids: dict[str, int]) -> Readings:
    granted = (DeviceBytes(device, Bytes(100 * MIB)),)
    trees = [Tree(TicketId(kind), frozenset({pid}), granted) for kind, pid in pids.items()]
    return NodeProbe(N, gpus).read(trees)


def sizes(readings: Readings, device: DeviceId) -> dict[str, int]:
    return {
        e.ticket: d.size_bytes for e in readings.engines for d in e.measured if d.device == device
    }


def of(readings: Readings, device: DeviceId) -> DeviceReading:
    [found] = [r for r in readings.devices if r.device == device]
    return found


def total(gpus: Gpus) -> int:
    [host] = [d for d in NodeProbe(N, gpus).inventory() if d.device == HOST]
    return host.total_bytes


@pytest.mark.spec("B1")
def test_cpu_and_host_are_two_budgets_of_one_ram_and_match_what_the_kernel_counts(
    pids: dict[str, int],
) -> None:
    readings = read(NoGpus(), CPU, pids)
    cpu, host = sizes(readings, CPU), sizes(readings, HOST)
    counted = {kind: kernel_bytes(pid) for kind, pid in pids.items()}
    for kind, pid_bytes in counted.items():
        assert cpu[kind] + host.get(kind, 0) == pytest.approx(pid_bytes, rel=WITHIN)
    assert host == {"host-copy-a": 150 * MIB}
    assert sum(cpu.values()) == pytest.approx(sum(counted.values()) - 150 * MIB, rel=WITHIN)


@pytest.mark.spec("B1", "A16")
def test_what_no_engine_holds_is_foreign_and_nothing_is_on_no_book(pids: dict[str, int]) -> None:
    all_is_on_a_book(NoGpus(), CPU, pids)


@pytest.mark.spec("B1", "A16")
def test_on_a_node_with_gpus_as_well_nothing_is_on_no_book(
    fake: FakeNvml, pids: dict[str, int]
) -> None:
    all_is_on_a_book(find_gpus(), GPU, pids)


def all_is_on_a_book(gpus: Gpus, device: DeviceId, pids: dict[str, int]) -> None:
    readings = read(gpus, device, pids)
    ours = sum(d.size_bytes for e in readings.engines for d in e.measured)
    assert ours > 450 * MIB
    host = of(readings, HOST)
    assert host.free_bytes + host.foreign_bytes + ours == total(gpus)


@pytest.mark.spec("B1", "B4")
def test_on_a_node_with_gpus_the_whole_of_an_engines_ram_is_on_the_hosts_book(
    fake: FakeNvml, pids: dict[str, int]
) -> None:
    on_host = sizes(read(find_gpus(), GPU, pids), HOST)
    for kind, pid in pids.items():
        assert on_host[kind] == pytest.approx(kernel_bytes(pid), rel=WITHIN)
