"""Clean-ups of the adapter store run one after the other."""

import os
import threading
from pathlib import Path

import pytest

from arbiter.node import tenant_folders
from deployments.adapters import folder_cache
from tests.support.engine_host import until, waits_for_a_lock


@pytest.mark.spec("F2")
def test_concurrent_cleanups_of_the_store_run_one_after_the_other(tmp_path: Path) -> None:
    """Each sees the store as the other left it; a lock of a file, so processes too."""
    entered = threading.Event()

    def enter() -> None:
        with folder_cache.alone(tmp_path):
            entered.set()

    other = threading.Thread(target=enter)
    with folder_cache.alone(tmp_path):
        other.start()
        until(lambda: waits_for_a_lock(os.getpid()) or entered.is_set(), 10)
        assert not entered.is_set()
    other.join(60)
    assert entered.is_set()


@pytest.mark.spec("F2", "E6")
def test_what_leaves_meanwhile_with_its_tenant_and_what_is_no_folder_are_in_no_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent removes a tenant's copies without the lock, between any two looks."""
    for number, name in enumerate(("old", "new", "@acme/law")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "weights").write_bytes(b"x" * 100)
        os.utime(tmp_path / name, ns=(number, number))
    (tmp_path / "notes.txt").write_text("an operator's")
    stat = Path.stat

    def removed_by_then(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if path == tmp_path / "@acme" / "law":
            tenant_folders.remove((str(tmp_path),), "acme", float("inf"))
        return stat(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", removed_by_then)
    folder_cache.make_room(tmp_path, 100, 200)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "notes.txt"]
