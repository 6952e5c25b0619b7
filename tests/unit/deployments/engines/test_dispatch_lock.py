"""Turns of the engines of a node."""

import shutil
from pathlib import Path

import pytest

from deployments.engines import dispatch_lock
from deployments.engines.dispatch_lock import DispatchLock


@pytest.mark.spec("B2")
def test_dispatch_lock_is_taken_though_its_folder_was_removed_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "dispatch" / "torch.lock"
    monkeypatch.setattr(dispatch_lock, "lock_path", lambda _: path)
    lock = DispatchLock("torch")
    with lock.one():
        assert path.exists()
    shutil.rmtree(path.parent)
    with lock.one():
        assert path.exists()
