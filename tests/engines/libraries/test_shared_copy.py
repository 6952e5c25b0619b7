"""What an engine does with a host copy of its model's files."""

import ctypes
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deployments.engines import host_copy
from deployments.engines.protocol import CannotSleep
from deployments.engines.shared_copy import SharedCopy, linked, received

pytestmark = pytest.mark.spec("D4")


def module() -> torch.nn.Module:
    """With a tied weight, equal weights, and a buffer that lies in no file."""
    torch.manual_seed(0)
    made = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
    made[1].weight.data = made[0].weight.data.clone()
    made[3].weight = made[2].weight
    made.register_buffer("angles", torch.arange(100.0))
    return made


def values(of: torch.nn.Module) -> list[torch.Tensor]:
    return [t.detach().clone() for t in (*of.parameters(), *of.buffers())]


def copied(folder: Path, of: torch.nn.Module, own_bytes: int = 1 << 20) -> SharedCopy:
    tensors = {name: p.detach().clone() for name, p in of.named_parameters()}
    save_file(tensors, folder / "a.safetensors")
    fd = os.memfd_create("host-shared-test")
    os.write(fd, (folder / "a.safetensors").read_bytes())
    return SharedCopy("key", {"a.safetensors": fd}, own_bytes)


def test_sleeping_module_writes_only_what_lies_in_no_file(tmp_path: Path) -> None:
    net = module()
    before = values(net)
    config = {"host_copy": {}, "shared_copy": copied(tmp_path, net)}
    parked = host_copy.offload(net, "m", config)
    assert all(t.numel() == 0 for t in (*net.parameters(), *net.buffers()))
    assert 400 <= os.fstat(parked.fd).st_size < 500  # the buffer
    host_copy.restore(parked)
    assert all(torch.equal(a, b) for a, b in zip(before, values(net), strict=True))
    assert net[3].weight.data_ptr() == net[2].weight.data_ptr(), "still tied"
    net[0].weight.data += 1  # the copy is not what it computes with
    assert torch.equal(load_file(tmp_path / "a.safetensors")["0.weight"], before[0])


def test_weight_that_differs_from_its_file_is_kept_beside_the_copy(tmp_path: Path) -> None:
    net = module()
    copy = copied(tmp_path, net)
    net[0].weight.data[31, 31] += 1  # far behind what is looked up
    before = values(net)
    parked = host_copy.offload(net, "m", {"host_copy": {}, "shared_copy": copy})
    assert os.fstat(parked.fd).st_size >= 32 * 32 * 4
    host_copy.restore(parked)
    assert all(torch.equal(a, b) for a, b in zip(before, values(net), strict=True))


def test_module_without_its_copy_or_unlike_it_does_not_sleep(tmp_path: Path) -> None:
    net = module()
    before = values(net)
    with pytest.raises(CannotSleep, match="no host copy"):
        host_copy.offload(net, "m", {"host_copy": {}})
    copy = copied(tmp_path, net, own_bytes=100)
    with pytest.raises(CannotSleep, match="`host_copy: private`"):
        host_copy.offload(net, "m", {"host_copy": {}, "shared_copy": copy})
    assert all(torch.equal(a, b) for a, b in zip(before, values(net), strict=True))


def test_private_copy_has_everything(tmp_path: Path) -> None:
    net = module()
    before = values(net)
    parked = host_copy.offload(net, "m", {})
    assert os.fstat(parked.fd).st_size >= sum(t.nbytes for t in before[:2])
    host_copy.restore(parked)
    assert all(torch.equal(a, b) for a, b in zip(before, values(net), strict=True))


def test_library_finds_the_copy_in_the_place_of_the_files(tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "deep").mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "deep" / "w.safetensors").write_bytes(b"on disk")
    fd = os.memfd_create("host-shared-test")
    os.write(fd, b"in RAM")
    view = linked(model, tmp_path / "view", {"deep/w.safetensors": fd})
    assert (view / "config.json").read_text() == "{}"
    assert (view / "deep" / "w.safetensors").read_bytes() == b"in RAM"
    one = linked(model / "config.json", tmp_path / "one", {"config.json": fd})
    assert one.read_bytes() == b"in RAM" and one.name == "config.json"


def test_engine_that_is_handed_nothing_reads_its_files(tmp_path: Path) -> None:
    assert received({"model": "m"}) == {"model": "m"}
    lent = {"socket": str(tmp_path / "none.sock"), "ticket": "t", "key": "k"}
    config = {"model": "m", "copy": lent, "host_copy": {"own_bytes": 1}}
    assert received(config)["model"] == "m" and "shared_copy" not in received(config)


class Driver:
    """Stands in for CUDA's runtime: notes what is pinned. `code`: what it answers."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.calls = code, list[tuple[str, int, int]]()
        self.awaited: list[torch.device] = []

    def cudaHostRegister(  # noqa: N802
        self, address: int, size: int, flags: int
    ) -> int:
        self.calls.append(("pin", address, size))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.calls.append(("unpin", address, 0))
        return 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Modules of a CPU are taken for those of two GPUs."""
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    gpus = {torch.device("cuda", index) for index in range(2)}
    monkeypatch.setattr(torch.cuda, "synchronize", driver.awaited.append)
    monkeypatch.setattr(host_copy, "_gpus", lambda places: gpus)
    return driver


@pytest.mark.spec("D3")
def test_copy_that_a_gpu_reads_is_pinned_for_as_long_as_the_module_sleeps(gpu: Driver) -> None:
    net = module()
    before = values(net)
    parked = host_copy.offload(net, "m", {})
    ((call, address, size),) = gpu.calls
    assert (call, size) == ("pin", parked.total)
    host_copy.restore(parked)
    assert [device.index for device in gpu.awaited].count(1) == 2, "each GPU, both ways"
    for thread in threading.enumerate():
        if thread.name == "unpin":
            thread.join()
    assert gpu.calls[1:] == [("unpin", address, 0)]
    assert all(torch.equal(a, b) for a, b in zip(before, values(net), strict=True))


@pytest.mark.spec("D3")
@pytest.mark.parametrize("is_found", [True, False])
def test_module_sleeps_and_wakes_where_the_driver_pins_nothing_and_its_error_is_forgotten(
    gpu: Driver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, is_found: bool
) -> None:
    gpu.code = 2
    forgotten: list[str] = []

    def library(name: str) -> Any:
        if not is_found:
            raise OSError(f"{name}: not found")
        return SimpleNamespace(cudaGetLastError=lambda: forgotten.append(name))

    monkeypatch.setattr(ctypes, "CDLL", library)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    net = module()
    before = values(net)
    parked = host_copy.offload(net, "m", {})
    assert f"{parked.total} bytes are not pinned (CUDA error 2)" in caplog.text
    assert forgotten == (["libcudart.so.13"] if is_found else [])
    assert is_found or "because libcudart.so.13: not found" in caplog.text
    host_copy.restore(parked)
    assert [name for name, _, _ in gpu.calls] == ["pin"]
    assert all(torch.equal(a, b) for a, b in zip(before, values(net), strict=True))
