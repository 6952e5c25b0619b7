"""Leased processes: whose bytes are read, when they count as back, and that none is killed."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from arbiter.core.events import EngineReading
from arbiter.core.types import DeviceBytes
from arbiter.errors import LeaseRefused
from arbiter.node import children, procfs
from arbiter.node.leased_processes import LeasedProcess, LeasedProcesses
from arbiter.units import MIB, Bytes, DeviceId, TicketId
from tests.support.engine_host import until

JOB, CPU = TicketId("job"), DeviceId("n/cpu:0")
LENT = (DeviceBytes(CPU, Bytes(100 * MIB)),)
PARENT = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'input()']); input()"
pytestmark = pytest.mark.spec("A15")


@pytest.fixture
def job() -> Iterator[subprocess.Popen[bytes]]:
    """A process with a child; both wait for their input to close."""
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def look(outsiders: LeasedProcesses, *not_through: int) -> list[LeasedProcess]:
    looked_ns, everything = children.find_processes()
    return outsiders.note(looked_ns, everything, not_through)


def test_process_tree_of_a_lease_is_read_except_below_excluded_processes(
    job: subprocess.Popen[bytes],
) -> None:
    outsiders = LeasedProcesses()
    opened = outsiders.open(JOB, job.pid, LENT, set())
    assert opened
    until(lambda: look(outsiders) == [] and len(opened.members) == 2, 60)
    [child] = opened.members.keys() - {job.pid}
    look(outsiders, child)
    assert opened.members.keys() == {job.pid}
    [tree] = outsiders.trees()
    assert (tree.ticket, tree.pids, tree.granted) == (JOB, frozenset({job.pid}), LENT)


def test_process_scan_begun_before_a_lease_says_nothing_of_it(job: subprocess.Popen[bytes]) -> None:
    outsiders = LeasedProcesses()
    looked_ns, everything = children.find_processes()
    others = {pid: process for pid, process in everything.items() if pid != job.pid}
    opened = outsiders.open(JOB, job.pid, LENT, set())
    assert opened
    assert outsiders.note(looked_ns, others, ()) == [] and opened.members.keys() == {job.pid}
    assert outsiders.note(opened.opened_ns + 1, others, ()) == [opened]


def test_one_process_has_one_lease_and_no_engine_is_leased(job: subprocess.Popen[bytes]) -> None:
    outsiders = LeasedProcesses()
    with pytest.raises(LeaseRefused):
        outsiders.open(JOB, job.pid, LENT, {job.pid})
    outsiders.open(JOB, job.pid, LENT, set())
    assert outsiders.open(JOB, job.pid, LENT, set()) is None
    with pytest.raises(LeaseRefused):
        outsiders.open(TicketId("other"), job.pid, LENT, set())
    with pytest.raises(LeaseRefused):
        outsiders.open(JOB, os.getpid(), LENT, set())


def test_lease_of_a_dead_process_or_of_another_user_is_refused(
    job: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    with pytest.raises(LeaseRefused):
        LeasedProcesses().open(JOB, gone.pid, LENT, set())
    monkeypatch.setattr(os, "getuid", lambda: 12_345)
    with pytest.raises(LeaseRefused):
        LeasedProcesses().open(JOB, job.pid, LENT, set())


def test_helper_of_another_user_is_not_counted_for_a_lease(
    job: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    outsiders = LeasedProcesses()
    opened = outsiders.open(JOB, job.pid, LENT, set())
    assert opened
    ours = {job.pid, os.getpid()}
    monkeypatch.setattr("arbiter.node.leased_processes._is_ours", lambda pid: pid in ours)
    until(lambda: len(procfs.descend({job.pid}, procfs.processes())) == 2, 60)
    assert look(outsiders) == [] and opened.members.keys() == {job.pid}


@pytest.mark.parametrize("pid", [99_999_999_999, 1 << 70])
def test_a_number_that_can_be_no_pid_is_refused(pid: int) -> None:
    with pytest.raises(LeaseRefused):
        LeasedProcesses().open(JOB, pid, LENT, set())


def test_helpers_of_a_leased_process_outlive_their_root_on_the_books(
    job: subprocess.Popen[bytes],
) -> None:
    outsiders = LeasedProcesses()
    opened = outsiders.open(JOB, job.pid, LENT, set())
    assert opened
    until(lambda: look(outsiders) == [] and len(opened.members) == 2, 60)
    [helper] = opened.members.keys() - {job.pid}
    job.kill()
    job.wait()
    assert look(outsiders) == [] and opened.members.keys() == {helper}
    os.kill(helper, 9)
    until(lambda: look(outsiders) == [opened], 60)
    outsiders.forget(opened)
    assert not outsiders.by_ticket


def test_leased_bytes_are_back_when_the_process_holds_what_it_held_before(
    job: subprocess.Popen[bytes],
) -> None:
    outsiders = LeasedProcesses()
    until(lambda: procfs.memory({job.pid}).device_bytes > 2 * MIB, 60)  # an interpreter, not a fork
    opened = outsiders.open(JOB, job.pid, LENT, set())
    assert opened and opened.floor_bytes > MIB

    def reading(mib: int) -> tuple[EngineReading, ...]:
        held = DeviceBytes(CPU, Bytes(opened.floor_bytes + mib * MIB))
        other = DeviceBytes(DeviceId("n/host"), Bytes(900 * MIB))
        return (EngineReading(JOB, (held, other)),)

    assert outsiders.given_back(reading(0)) == []  # it is not leaving
    opened.leaving = True
    assert outsiders.given_back(reading(50)) == []
    assert outsiders.given_back(()) == []  # opened after that reading
    assert outsiders.given_back(reading(9)) == [opened]
    assert job.poll() is None
