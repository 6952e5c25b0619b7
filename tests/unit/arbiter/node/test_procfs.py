"""Bytes as the kernel tells them, on real processes."""

import contextlib
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from arbiter.node import procfs, zygote_client
from arbiter.pool import slab
from arbiter.units import MIB, Bytes

SLACK = 16 * MIB  # of a child forked from a whole test run; the files here are 10 MiB or more


@contextlib.contextmanager
def child(act: Callable[[], object]) -> Iterator[int]:
    """A forked process that has done `act` and holds what it returned."""
    ready, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.closerange(3, done)  # memory files of other tests, which a child would hold as well
        os.closerange(done + 1, os.sysconf("SC_OPEN_MAX"))
        held = act()
        os.write(done, b"x")
        signal.pause()
        os._exit(held is None)
    assert os.read(ready, 1) == b"x"
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(done)


def private(mib: int) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    return mmap.mmap(-1, mib * MIB, flags)


def memory_file(name: str, mib: int) -> int:
    fd = os.memfd_create(name)
    for _ in range(mib):
        os.write(fd, b"x" * MIB)
    return fd


def tree(root: int) -> set[int]:
    """Living pids: the root's group and session, and what descends from them."""
    everything = procfs.processes()
    return procfs.descend(procfs.led_by(root, everything), everything)


def measure(pid: int) -> procfs.Memory:
    return procfs.memory(tree(pid))


@pytest.mark.spec("B1")
def test_private_pages_of_a_process_are_measured() -> None:
    with child(lambda: private(50)) as pid:
        assert 50 * MIB <= measure(pid).device_bytes <= 50 * MIB + SLACK


@pytest.mark.spec("B1")
def test_pages_shared_with_the_parent_process_are_not_counted() -> None:
    held = private(50)
    held[:] = bytes(50 * MIB)
    with child(lambda: None) as pid:
        assert measure(pid).device_bytes <= SLACK
    held.close()


@pytest.mark.spec("B1", "B4")
def test_host_copies_are_host_ram_and_other_memory_files_are_not() -> None:
    with child(lambda: (memory_file("host-copy-a", 20), memory_file("scratch", 10))) as pid:
        found = measure(pid)
        assert found.host_bytes == 20 * MIB
        assert 10 * MIB <= found.device_bytes <= 10 * MIB + SLACK


@pytest.mark.spec("B1")
def test_a_memory_file_held_by_several_processes_of_one_tree_counts_once() -> None:
    def two() -> int:
        fd = memory_file("scratch", 64)
        if os.fork() == 0:
            signal.pause()
        return fd

    with child(two) as pid:
        others, seen = tree(pid) - {pid}, measure(pid).device_bytes
        for member in others:
            os.kill(member, signal.SIGKILL)
    assert len(others) == 1 and 64 * MIB <= seen <= 64 * MIB + 2 * SLACK


@pytest.mark.spec("B1")
def test_shared_memory_without_a_file_is_measured() -> None:
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    with child(lambda: mmap.mmap(-1, 30 * MIB, flags)) as pid:
        assert 30 * MIB <= measure(pid).device_bytes <= 30 * MIB + SLACK


@pytest.mark.spec("B1", "B4")
@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize("name", [f"{slab.NAME}-kv", procfs.HOST_COPY])
def test_file_of_another_account_hides_no_shared_memory(name: str, is_mapped: bool) -> None:
    def both() -> list[object]:
        fd = memory_file(name, 40)
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        unnamed = mmap.mmap(-1, 30 * MIB, flags | mmap.MAP_ANONYMOUS)
        return [unnamed, mmap.mmap(fd, 40 * MIB, flags) if is_mapped else fd]

    with child(both) as pid:
        assert 30 * MIB <= measure(pid).device_bytes <= 30 * MIB + SLACK


def test_memory_of_another_device_with_the_same_inode_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each memory file system numbers its files from one."""
    monkeypatch.setattr(procfs, "PROC", tmp_path)
    (tmp_path / "7").mkdir()
    line = "7f0000000000-7f0000a00000 rw-s 00000000 00:1a 5    /dev/shm/mine (deleted)\n"
    (tmp_path / "7" / "maps").write_text(line)
    assert procfs.shared_files(7) == {(os.makedev(0, 0x1A), 5)}


@pytest.mark.parametrize("call", ["read_text", "listdir", "readlink"])
def test_unreadable_files_of_another_user_are_skipped(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept(*_: object, **__: object) -> str:
        raise PermissionError("another user's")

    with child(lambda: memory_file("scratch", 20)) as pid:
        monkeypatch.setattr(Path if call == "read_text" else os, call, kept)
        found = procfs.memory({pid})
        monkeypatch.undo()
    assert found.device_bytes < 20 * MIB + SLACK


def as_another_user(mount: Path) -> int:
    """Reads every process as a user without rights of root; returns an exit status."""
    os.chdir(mount)  # whose parents are root's
    procfs.PROC = Path()
    os.setgroups([])
    os.setgid(12_345)
    os.setuid(12_345)
    found = procfs.processes()
    return 0 if os.getpid() in found and 1 not in found else 1


@pytest.mark.skipif(os.getuid() != 0, reason="only root mounts, and becomes another user")
def test_processes_that_proc_keeps_from_this_user_are_none(tmp_path: Path) -> None:
    mounting = ["mount", "-t", "proc", "-o", "hidepid=1", "proc", str(tmp_path)]
    if subprocess.run(mounting, capture_output=True, check=False).returncode:
        pytest.skip("this machine lets no process mount")
    try:
        if (pid := os.fork()) == 0:
            status = 2
            try:
                status = as_another_user(tmp_path)
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_the_tree_keeps_members_whose_parent_died() -> None:
    def orphaning() -> int:
        os.setsid()
        if os.fork() == 0:
            if os.fork() == 0:
                signal.pause()
            os._exit(0)
        os.wait()
        return 1

    with child(orphaning) as pid:
        members = tree(pid)
        assert len(members) == 2
        for member in members - {pid}:
            os.kill(member, signal.SIGKILL)


def test_a_zombie_holds_nothing_and_is_no_member() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    found = procfs.process(pid)
    assert found is not None and not found.alive
    assert tree(pid) == set()
    os.waitpid(pid, 0)


def test_a_process_that_is_gone_is_none() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert procfs.process(pid) is None
    assert procfs.memory([pid]) == procfs.Memory(Bytes(0), Bytes(0))


@pytest.mark.spec("L4")
def test_only_processes_with_the_zygote_mark_are_orphans() -> None:
    def start(**env: str) -> subprocess.Popen[bytes]:
        code = "import signal; print(flush=True); signal.pause()"
        began = subprocess.Popen(
            [sys.executable, "-c", code, "/the/path"], stdout=subprocess.PIPE, env=env
        )
        assert began.stdout is not None
        began.stdout.readline()
        return began

    marked, plain = start(ARBITER_ZYGOTE="1"), start()
    try:
        assert procfs.started_with("/the/path", zygote_client.MARK) == {marked.pid}
    finally:
        for process in (marked, plain):
            process.kill()
            process.communicate()


@pytest.mark.spec("L4")
@pytest.mark.skipif(os.getuid() != 0, reason="only root can start another user's process")
def test_process_of_another_user_is_no_orphan() -> None:
    code = "import os, signal; os.setuid(65534); print(flush=True); signal.pause()"
    other = subprocess.Popen(
        [sys.executable, "-c", code, "/the/path"],
        stdout=subprocess.PIPE,
        env={"ARBITER_ZYGOTE": "1"},
    )
    assert other.stdout is not None
    other.stdout.readline()
    try:
        assert procfs.started_with("/the/path", zygote_client.MARK) == set()
    finally:
        other.kill()
        other.communicate()
