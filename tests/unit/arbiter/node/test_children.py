"""What an agent opened: found again, killed whole, and nothing else ever killed."""

import contextlib
import errno
import json
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from arbiter.core.types import DeviceBytes
from arbiter.node import procfs
from arbiter.node.children import Child, Children, find_processes, kept_descriptors
from arbiter.units import Bytes, DeviceId, TicketId

T = TicketId("t")
GRANTED = (DeviceBytes(DeviceId("n/cpu:0"), Bytes(5)),)


def ignore(ticket: str, log: Path) -> None:
    """For logs nobody wants."""


@contextlib.contextmanager
def engine(helpers: int = 0) -> Iterator[int]:
    """A session of its own, as an engine's processes have."""
    ready, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        for _ in range(helpers):
            if os.fork() == 0:
                break
        os.write(done, b"x")
        signal.pause()
    for _ in range(helpers + 1):
        os.read(ready, 1)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def living(pids: set[int]) -> set[int]:
    return {pid for pid in pids if (p := procfs.process(pid)) and p.alive}


@pytest.mark.spec("A19", "L4")
def test_a_kill_takes_the_whole_tree(tmp_path: Path) -> None:
    opened = Children(tmp_path)
    with engine(helpers=2) as pid:
        child = opened.open(T, pid, GRANTED)
        assert child is not None
        opened.refresh()
        members = set(child.members)
        assert len(members) == 3
        opened.kill(child)
        while living(members):
            os.sched_yield()
        opened.refresh()
        assert not child.members


@pytest.mark.spec("A10")
def test_processes_that_nvml_may_list_yet_are_known_after_the_last_of_them_died(
    tmp_path: Path,
) -> None:
    """vLLM's GPU memory is held by a process that its root started."""
    opened = Children(tmp_path)
    with engine(helpers=2) as pid:
        child = opened.open(T, pid, GRANTED)
        assert child is not None and child.last_members == {pid}
        opened.refresh()
        members = set(child.members)
        os.killpg(pid, signal.SIGKILL)
        while living(members):
            os.sched_yield()
        opened.refresh()
        assert not child.members and len(members) == 3
        assert child.last_members == members


@pytest.mark.spec("A19")
def test_helpers_that_outlive_their_root_are_still_its_members(tmp_path: Path) -> None:
    opened = Children(tmp_path)
    with engine(helpers=1) as pid:
        child = opened.open(T, pid, GRANTED)
        assert child is not None
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        opened.refresh()
        assert len(child.members) == 1 and pid not in child.members
        opened.kill(child)
        while living(set(child.members)):
            os.sched_yield()


@pytest.mark.spec("A19")
def test_process_scan_begun_before_an_engine_was_opened_says_nothing_of_it(
    tmp_path: Path,
) -> None:
    opened = Children(tmp_path)
    before = find_processes()
    with engine() as pid:
        child = opened.open(T, pid, GRANTED)
        assert child is not None
        assert opened.note(*before) == []
        assert child.members == {pid: child.start_ticks}
        assert opened.refresh() == [child]


@pytest.mark.spec("A18")
def test_restarted_agent_finds_its_engines_by_their_notes(tmp_path: Path) -> None:
    with engine() as pid:
        assert Children(tmp_path).open(T, pid, GRANTED)
        again = Children(tmp_path)
        assert again.recover(ignore) == ()
        assert (again.by_ticket[T].pid, again.by_ticket[T].granted) == (pid, GRANTED)


@contextlib.contextmanager
def descriptors_all_taken() -> Iterator[None]:
    """All that this process may open is open: as under a leak, or with very many clients."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 20, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in taken:
            os.close(fd)


@pytest.mark.spec("A18", "A19")
def test_process_forked_just_before_the_descriptors_run_out_is_known(tmp_path: Path) -> None:
    opened = Children(tmp_path)
    with engine() as pid, contextlib.ExitStack() as until_known:
        with kept_descriptors():
            until_known.enter_context(descriptors_all_taken())
            with pytest.raises(OSError, match="Too many open files"), kept_descriptors():
                raise AssertionError("a fork would follow")
        child = opened.open(T, pid, GRANTED)
        until_known.close()
        assert child is not None and (tmp_path / "t.child").exists()


@pytest.mark.spec("A18", "A19")
def test_full_disk_costs_the_note_of_an_engine_and_neither_the_engine_nor_the_agents_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with engine() as pid, engine() as other:
        Children(tmp_path).open(T, pid, GRANTED)
        monkeypatch.setattr(Path, "write_text", full)
        again = Children(tmp_path)
        assert again.recover(ignore) == ()
        assert (again.by_ticket[T].pid, again.by_ticket[T].granted) == (pid, GRANTED)
        assert again.open(TicketId("u"), other, GRANTED) is again.by_ticket[TicketId("u")]
    assert "No space left" in caplog.text and "u" in caplog.messages[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["t.child"]


@pytest.mark.spec("A18")
def test_note_of_a_dead_process_forbids_a_new_start_of_its_ticket(tmp_path: Path) -> None:
    with engine() as pid:
        Children(tmp_path).open(T, pid, GRANTED)
    again = Children(tmp_path)
    assert again.recover(ignore) == (T,)
    assert again.may_not_start(T) and not list(tmp_path.glob("*.child"))


@pytest.mark.spec("A18", "A19")
def test_a_helper_whose_root_died_while_no_agent_lived_is_killed(tmp_path: Path) -> None:
    with engine(helpers=1) as pid:
        child = Children(tmp_path).open(T, pid, GRANTED)
        assert child is not None
        helpers = {p.pid for p in procfs.processes().values() if p.session == pid} - {pid}
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert Children(tmp_path).recover(ignore) == (T,)
        while living(helpers):
            os.sched_yield()


@pytest.mark.spec("L4")
def test_reused_pid_is_never_taken_for_an_engine(tmp_path: Path) -> None:
    note = {"ticket": T, "pid": os.getpid(), "start_ticks": 1, "granted": []}
    (tmp_path / "t.child").write_text(json.dumps(note))
    opened = Children(tmp_path)
    assert opened.recover(ignore) == (T,)
    assert opened.by_ticket == {}


def test_files_of_an_ended_engine_are_removed(tmp_path: Path) -> None:
    opened = Children(tmp_path)
    with engine() as pid:
        child = opened.open(T, pid, GRANTED)
        assert child is not None
        for suffix in (".sock", ".core"):
            child.socket.with_suffix(suffix).touch()
        opened.forget(child)
        opened.unlink(T)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.spec("L4")
def test_process_that_reuses_the_pid_of_a_dead_root_is_never_a_member(tmp_path: Path) -> None:
    """The root died, a helper that left its session lives, and the kernel used the pid again."""
    opened = Children(tmp_path)
    root, helper, stranger = 100, 200, 101
    child = Child(T, root, 5, tmp_path, (), -1, 0, {root: 5, helper: 6})
    opened.by_ticket[T] = child
    seen = [
        procfs.Process(root, 1, root, root, 999, "S"),
        procfs.Process(stranger, root, root, root, 1000, "S"),
        procfs.Process(helper, 1, helper, helper, 6, "S"),
    ]
    opened.note(1, {p.pid: p for p in seen})
    assert child.members == {helper: 6}
    opened.note(2, {p.pid: p for p in seen[1:]})
    assert child.members == {helper: 6}


def test_files_of_a_dead_ticket_are_removed_and_its_log_is_kept(tmp_path: Path) -> None:
    with engine() as pid:
        Children(tmp_path).open(T, pid, GRANTED)
    for name in ("t.sock", "t.core", "t.log", "t2.sock"):
        (tmp_path / name).touch()
    kept: list[Path] = []
    assert Children(tmp_path).recover(lambda ticket, log: kept.append(log)) == (T,)
    assert kept == [tmp_path / "t.log"]
    assert [p.name for p in tmp_path.iterdir()] == ["t2.sock"]


def test_restarted_agent_knows_which_zygote_forked_an_engine(tmp_path: Path) -> None:
    with engine() as pid:
        assert Children(tmp_path).open(T, pid, GRANTED, zygote=(7, 8))
        again = Children(tmp_path)
        again.recover(ignore)
        assert again.by_ticket[T].zygote == (7, 8)


@pytest.mark.spec("A10")
def test_process_tree_is_final_once_a_scan_after_its_kill_finds_nothing_new(tmp_path: Path) -> None:
    opened = Children(tmp_path)
    with engine(helpers=1) as pid:
        child = opened.open(T, pid, GRANTED)
        assert child is not None
        before = find_processes()
        opened.kill(child)  # knows of the root alone
        opened.note(*before)
        assert not child.tree_is_final  # that look began before the kill
        opened.refresh()
        assert not child.tree_is_final  # it found the helper
        assert len(set(child.members) - {pid}) == 1
        opened.kill(child)
        opened.refresh()
        assert child.tree_is_final
        while child.members:
            opened.drop_dead_members(child)


@pytest.mark.spec("A10")
def test_a_zombie_with_threads_that_still_end_has_not_given_its_memory_back() -> None:
    assert not procfs.Process(1, 1, 1, 1, 5, "Z").alive
    assert procfs.Process(1, 1, 1, 1, 5, "Z", threads_count=2).alive
