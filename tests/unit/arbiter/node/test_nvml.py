"""The node's path to NVIDIA's driver, through the real pynvml over a library of ours."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from arbiter.core.events import DeviceReading, ForeignProcess
from arbiter.core.types import DeviceBytes, DeviceKind
from arbiter.node.device_probe import NodeProbe, Readings, Tree
from arbiter.node.nvml import Card, GpuUnreadable, NvmlFailed, find_gpus
from arbiter.units import GIB, Bytes, DeviceId, NodeId, TicketId
from tests.support import nvml
from tests.support.nvml import FakeNvml

N = NodeId("n")
FIRST, SECOND = DeviceId("n/gpu:0"), DeviceId("n/gpu:1")
ME, STRANGER = os.getpid(), os.getppid()
CARDS = (
    Card("NVIDIA A10G", "GPU-aaaa", Bytes(24 * GIB)),
    Card("NVIDIA H100 80GB HBM3", "GPU-bbbb", Bytes(80 * GIB)),
)


def tree(pid: int, gib: float, device: DeviceId = FIRST, ticket: str = "t") -> Tree:
    granted = (DeviceBytes(device, Bytes(round(gib * GIB))),)
    return Tree(TicketId(ticket), frozenset({pid}), granted)


def of(readings: Readings, device: DeviceId) -> DeviceReading:
    [found] = [r for r in readings.devices if r.device == device]
    return found


def held(readings: Readings, device: DeviceId) -> dict[str, int]:
    return {
        e.ticket: d.size_bytes for e in readings.engines for d in e.measured if d.device == device
    }


# Calls about one GPU: what it is, and what is on it.
OF_ONE = ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetName", "nvmlDeviceGetUUID"]
OF_READING = [
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
]


@pytest.mark.spec("B1")
def test_pynvml_finds_the_library_by_its_name(library: Path, tmp_path: Path) -> None:
    """As it finds NVIDIA's: on the loader's path."""
    FakeNvml(tmp_path)
    ask = "from arbiter.node.nvml import find_gpus; print(find_gpus().card(1))"
    on_path = {"LD_LIBRARY_PATH": str(library.parent), nvml.FOLDER: str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", ask], env=os.environ | on_path, capture_output=True, check=True
    )
    assert done.stdout.decode().strip() == str(CARDS[1])


@pytest.mark.spec("B1")
def test_the_inventory_names_each_gpu_its_card_and_its_total(fake: FakeNvml) -> None:
    *gpus, host = NodeProbe(N, find_gpus()).inventory()
    assert [(g.device, g.kind, g.name, g.uuid, g.total_bytes) for g in gpus] == [
        (FIRST, DeviceKind.GPU, "NVIDIA A10G", "GPU-aaaa", 24 * GIB),
        (SECOND, DeviceKind.GPU, "NVIDIA H100 80GB HBM3", "GPU-bbbb", 80 * GIB),
    ]
    assert (host.kind, host.name, host.uuid) == (DeviceKind.HOST, "", "")


@pytest.mark.spec("B1", "A16")
def test_each_process_is_told_apart_and_the_rest_is_foreign(fake: FakeNvml) -> None:
    fake.gpus[0].compute = {ME: 10 * GIB, STRANGER: 3 * GIB}
    fake.gpus[0].used = GIB  # not listed
    fake.gpus[1].compute = {ME: 2 * GIB}
    fake.write()
    readings = NodeProbe(N, find_gpus()).read([tree(ME, 10)])
    first, second = of(readings, FIRST), of(readings, SECOND)
    assert (first.free_bytes, first.foreign_bytes, first.exact) == (10 * GIB, 4 * GIB, True)
    assert (second.free_bytes, second.foreign_bytes) == (78 * GIB, 0)
    assert held(readings, FIRST) == {"t": 10 * GIB}
    assert held(readings, SECOND) == {"t": 2 * GIB}  # though nothing was granted to it there


@pytest.mark.spec("B1", "B3", "A16")
def test_what_the_driver_keeps_is_not_foreign(fake: FakeNvml) -> None:
    fake.gpus[0].compute = {ME: 10 * GIB, STRANGER: 3 * GIB}
    fake.gpus[0].reserved = GIB
    fake.write()
    first = of(NodeProbe(N, find_gpus()).read([tree(ME, 10)]), FIRST)
    assert (first.free_bytes, first.foreign_bytes) == (10 * GIB, 3 * GIB)
    fake.fail("nvmlDeviceGetMemoryInfo", nvml.FUNCTION_NOT_FOUND)
    assert find_gpus().reserved(0) == 0, "an older driver does not say"


@pytest.mark.spec("B1", "A16")
def test_engines_that_share_a_gpu_by_mps_are_told_apart(fake: FakeNvml) -> None:
    fake.gpus[0].compute = {STRANGER: GIB}  # the server
    fake.gpus[0].mps = {ME: 10 * GIB}
    fake.write()
    readings = NodeProbe(N, find_gpus()).read([tree(ME, 10)])
    assert held(readings, FIRST) == {"t": 10 * GIB}
    assert of(readings, FIRST).foreign_bytes == GIB


@pytest.mark.spec("B1", "A16")
def test_foreign_processes_are_named_the_largest_first(fake: FakeNvml) -> None:
    fake.gpus[0].compute = {ME: 10 * GIB, STRANGER: 3 * GIB, 1: 4 * GIB}
    fake.write()
    found = of(NodeProbe(N, find_gpus()).read([tree(ME, 10)]), FIRST).foreign_processes
    names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in (1, STRANGER)}
    assert found == (
        ForeignProcess(1, names[1], Bytes(4 * GIB)),
        ForeignProcess(STRANGER, names[STRANGER], Bytes(3 * GIB)),
    )


@pytest.mark.spec("B1")
def test_a_process_that_computes_and_draws_counts_once(fake: FakeNvml) -> None:
    fake.gpus[0].used = 10 * GIB
    fake.gpus[0].compute, fake.gpus[0].graphics = {ME: 0}, {ME: 0}
    fake.write()
    gpus = find_gpus()
    assert gpus.used_by_pid(0) == {ME: 0}
    fake.gpus[0].compute, fake.gpus[0].graphics = {ME: 2 * GIB}, {ME: None}
    fake.write()
    assert gpus.used_by_pid(0) == {ME: 2 * GIB}


# -- without sizes per process --------------------------------------------------------------------


def hide_sizes(fake: FakeNvml) -> None:
    fake.gpus[0].compute = {ME: None, STRANGER: None}


def hide_processes(fake: FakeNvml) -> None:
    """As in a container: memory is used, and NVML lists no process."""
    fake.gpus[0].compute, fake.gpus[0].hidden = {ME: 0, STRANGER: 0}, True


def name_others(fake: FakeNvml) -> None:
    """As in other containers: pids of the host, which mean nothing here."""
    fake.gpus[0].compute = {2**22 + 1: 0}


def refuse_listing(fake: FakeNvml) -> None:
    fake.fail("nvmlDeviceGetComputeRunningProcesses", nvml.NOT_SUPPORTED)


def forbid_listing(fake: FakeNvml) -> None:
    fake.fail("nvmlDeviceGetComputeRunningProcesses", nvml.NO_PERMISSION)


def lack_listing(fake: FakeNvml) -> None:
    """A driver older than the call."""
    fake.fail("nvmlDeviceGetComputeRunningProcesses", nvml.FUNCTION_NOT_FOUND)


@pytest.mark.spec("A16")
@pytest.mark.parametrize(
    "conceal",
    [hide_sizes, hide_processes, name_others, refuse_listing, forbid_listing, lack_listing],
)
def test_without_sizes_per_process_the_devices_delta_is_taken_and_marked_inexact(
    fake: FakeNvml, conceal: Callable[[FakeNvml], None]
) -> None:
    fake.gpus[0].used = 2 * GIB
    fake.write()
    probe = NodeProbe(N, find_gpus())
    before = of(probe.read([]), FIRST)  # with nothing of ours on it: two are foreign
    assert (before.foreign_bytes, before.exact) == (2 * GIB, True)
    fake.gpus[0].used = 11 * GIB
    conceal(fake)
    fake.write()
    readings = probe.read([tree(ME, 10, ticket="a"), tree(STRANGER, 5, ticket="b")])
    first = of(readings, FIRST)
    assert (first.free_bytes, first.foreign_bytes, first.exact) == (13 * GIB, 2 * GIB, False)
    assert held(readings, FIRST) == {"a": 6 * GIB, "b": 3 * GIB}  # as granted


@pytest.mark.spec("A16")
@pytest.mark.parametrize("call", OF_READING[2:])
def test_a_device_that_cannot_list_what_shares_or_draws_still_tells_who_computes(
    fake: FakeNvml, call: str
) -> None:
    """GPUs without a display, in some modes."""
    fake.gpus[0].compute = {ME: 10 * GIB}
    fake.fail(call, nvml.NOT_SUPPORTED)
    readings = NodeProbe(N, find_gpus()).read([tree(ME, 10)])
    assert of(readings, FIRST).exact
    assert held(readings, FIRST) == {"t": 10 * GIB}


@pytest.mark.spec("A16")
def test_an_engine_that_has_not_allocated_yet_is_no_reason_to_doubt_the_listing(
    fake: FakeNvml,
) -> None:
    fake.gpus[0].used = GIB
    fake.write()
    probe = NodeProbe(N, find_gpus())
    probe.read([])
    readings = probe.read([tree(ME, 10)])
    assert of(readings, FIRST).exact
    assert of(readings, FIRST).foreign_bytes == GIB


@pytest.mark.spec("A10", "A16")
def test_what_nvml_lists_of_an_engine_that_died_is_still_its_own(fake: FakeNvml) -> None:
    dead = 2**22 + 1  # beyond the kernel's highest pid
    fake.gpus[0].compute = {dead: 10 * GIB, ME: 5 * GIB}
    fake.write()
    trees = [Tree(TicketId("died"), frozenset({dead})), tree(ME, 5, ticket="b")]
    readings = NodeProbe(N, find_gpus()).read(trees)
    assert held(readings, FIRST) == {"died": 10 * GIB, "b": 5 * GIB}
    assert (of(readings, FIRST).exact, of(readings, FIRST).foreign_bytes) == (True, 0)


# -- failures -------------------------------------------------------------------------------------


@pytest.mark.spec("B1")
@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetCount"])
@pytest.mark.parametrize("code", [nvml.VERSION_MISMATCH, nvml.UNKNOWN, nvml.NO_PERMISSION])
def test_a_driver_that_does_not_answer_is_a_typed_error_and_no_node_without_gpus(
    fake: FakeNvml, call: str, code: int
) -> None:
    fake.fail(call, code)
    with pytest.raises(NvmlFailed, match=call) as caught:
        NodeProbe(N, find_gpus())
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.spec("B1")
@pytest.mark.parametrize("code", [nvml.DRIVER_NOT_LOADED, nvml.LIBRARY_NOT_FOUND])
def test_without_a_driver_there_are_no_gpus_and_ram_stands_in(fake: FakeNvml, code: int) -> None:
    fake.fail("nvmlInit", code)
    cpu, _ = NodeProbe(N, find_gpus()).inventory()
    assert cpu.kind is DeviceKind.CPU


@pytest.mark.spec("B1")
@pytest.mark.parametrize("call", [*OF_ONE, *OF_READING])
@pytest.mark.parametrize("code", [nvml.TIMEOUT, nvml.UNKNOWN])
def test_a_gpu_that_does_not_answer_is_unreadable_and_its_neighbour_is_read(
    fake: FakeNvml, call: str, code: int
) -> None:
    fake.gpus[0].compute = {ME: 10 * GIB}
    fake.fail(call, code, gpu=1)
    probe = NodeProbe(N, find_gpus())
    readings = probe.read([tree(ME, 10)])
    assert [r.device for r in readings.devices] == ["n/host", FIRST]
    [fault] = readings.unreadable
    assert fault.device == SECOND
    assert fault.cause.startswith(f"{call}: ") and str(code) in fault.cause
    assert held(readings, FIRST) == {"t": 10 * GIB}
    assert held(readings, SECOND) == {}
    assert probe.introduction().unreadable == readings.unreadable
    fake.mend()
    readings = probe.read([])
    assert of(readings, SECOND).free_bytes == 80 * GIB
    assert readings.unreadable == probe.unreadable() == ()
    assert [d.uuid for d in probe.inventory()] == ["GPU-aaaa", "GPU-bbbb", ""]


@pytest.mark.spec("B1")
@pytest.mark.parametrize("call", OF_ONE)
def test_what_a_gpu_is_called_is_asked_once(fake: FakeNvml, call: str) -> None:
    probe = NodeProbe(N, find_gpus())
    fake.fail(call, nvml.UNKNOWN)
    assert probe.read([]).unreadable == ()


@pytest.mark.spec("B1")
def test_where_no_gpu_answers_ram_does_not_stand_in_for_them(fake: FakeNvml) -> None:
    fake.fail("nvmlDeviceGetMemoryInfo", nvml.UNKNOWN)
    probe = NodeProbe(N, find_gpus())
    assert [d.device for d in probe.inventory()] == ["n/host"]
    readings = probe.read([tree(ME, 10)])
    assert [r.device for r in readings.devices] == ["n/host"]
    assert len(readings.unreadable) == 2


@pytest.mark.spec("B1")
def test_a_gpu_that_falls_off_the_bus_leaves_the_inventory_and_comes_back(fake: FakeNvml) -> None:
    probe = NodeProbe(N, find_gpus())
    for call in OF_READING:
        fake.fail(call, nvml.GPU_IS_LOST, gpu=1)
    readings = probe.read([tree(ME, 10, SECOND)])
    assert readings.unreadable == ()  # it is not there to be read
    assert [d.device for d in probe.inventory()] == [FIRST, "n/host"]
    assert probe.introduction().lost == (SECOND,)
    fake.mend()
    probe.read([])
    assert [d.device for d in probe.inventory()] == [FIRST, SECOND, "n/host"]
    assert probe.introduction().lost == ()


@pytest.mark.spec("A10")
def test_of_a_gpu_that_cannot_be_read_the_processes_seen_last_are_still_listed(
    fake: FakeNvml,
) -> None:
    fake.gpus[0].compute, fake.gpus[1].compute = {11: GIB}, {12: GIB}
    fake.write()
    probe = NodeProbe(N, find_gpus())
    assert probe.gpu_pids() == {11, 12}
    fake.gpus[0].compute = {}
    fake.fail("nvmlDeviceGetComputeRunningProcesses", nvml.UNKNOWN, gpu=1)
    assert probe.gpu_pids() == {12}
    fake.fail("nvmlDeviceGetComputeRunningProcesses", nvml.GPU_IS_LOST, gpu=1)
    assert probe.gpu_pids() == set()


def test_an_unreadable_gpu_says_which_call_failed_and_survives_pickling(fake: FakeNvml) -> None:
    fake.fail("nvmlDeviceGetMemoryInfo", nvml.GPU_IS_LOST, gpu=0)
    with pytest.raises(GpuUnreadable) as caught:
        find_gpus().free(0)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.index, error.call, error.is_lost) == (0, "nvmlDeviceGetMemoryInfo", True)
    assert "GPU is lost" in str(error)
