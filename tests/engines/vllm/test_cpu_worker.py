"""What a worker without a GPU keeps of its checkpoint while it sleeps."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from arbiter.node import procfs
from deployments.engines.vllm.worker.cpu_worker import copy_to_memory, version

pytestmark = pytest.mark.spec("D1", "D5")
BYTES = bytes(range(256)) * 20


def test_copy_has_the_bytes_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.engines.vllm.worker.cpu_worker._SENDFILE_BYTES", 3_000)
    (path := tmp_path / "model.safetensors").write_bytes(BYTES)
    copy = copy_to_memory(path, version(path))
    assert os.pread(copy, 2 * len(BYTES), 0) == BYTES
    os.close(copy)


@pytest.mark.parametrize("name", ["w" * 255, "ü" * 127])  # as long as a file's may be
def test_file_of_the_longest_name_is_copied_and_its_copy_is_charged_to_the_host(
    tmp_path: Path, name: str
) -> None:
    (path := tmp_path / name).write_bytes(BYTES)
    copy = copy_to_memory(path, version(path))
    assert os.pread(copy, len(BYTES), 0) == BYTES
    assert os.readlink(f"/proc/self/fd/{copy}").startswith(
        f"/memfd:{procfs.HOST_COPY}-{name[:100]}"
    )
    os.close(copy)


def test_file_that_is_cut_while_it_is_copied_ends_the_sleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path := tmp_path / "model.safetensors").write_bytes(BYTES)
    loaded, send = version(path), os.sendfile

    def cut(*given: Any) -> int:
        os.truncate(path, 0)
        return send(*given)

    monkeypatch.setattr(os, "sendfile", cut)
    with pytest.raises(RuntimeError, match="changed on disk"):
        copy_to_memory(path, loaded)


def test_file_that_grows_while_it_is_copied_ends_the_sleep_and_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.engines.vllm.worker.cpu_worker._SENDFILE_BYTES", 3_000)
    (path := tmp_path / "model.safetensors").write_bytes(BYTES)
    loaded, send, sent = version(path), os.sendfile, list[int]()

    def append(*given: Any) -> int:
        if len(sent) < 10:
            with path.open("ab") as file:
                file.write(BYTES)
        sent.append(send(*given))
        return sent[-1]

    monkeypatch.setattr(os, "sendfile", append)
    with pytest.raises(RuntimeError, match="changed on disk"):
        copy_to_memory(path, loaded)
    assert sum(sent) == len(BYTES)


def test_copy_that_fails_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path := tmp_path / "model.safetensors").write_bytes(BYTES)
    copies: list[int] = []

    def fail(copy: int, *_: int) -> int:
        copies.append(copy)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "sendfile", fail)
    with pytest.raises(OSError, match="Input/output"):
        copy_to_memory(path, version(path))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(copies[0])
