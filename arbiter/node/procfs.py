"""Processes and their memory, as the kernel tells them through /proc. Nothing here trusts what a
process says of itself.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from arbiter.pool import slab
from arbiter.units import KIB, Bytes

PROC = Path("/proc")

# Weights of a sleeping model: a memory file of this name prefix is host RAM, not device memory.
HOST_COPY = "host-copy"

# A copy of a model's files that engines share: it is on the account of no engine, but of the
# lease under which the node agent holds it.
SHARED_COPY = "host-shared"
_OF_NO_PROCESS = (slab.NAME, SHARED_COPY)

# Paths of the kernel for shared memory: without a file (mmap(2), shmget(2)), and with one.
_SHARED_MEMORY = ("/dev/zero", "/SYSV", "/dev/shm/", "/memfd:")
_SECTOR_BYTES = 512  # the unit of st_blocks, whatever the file system (stat(2))
_STAT_MOST_BYTES = 4096  # 52 numbers of at most 20 digits and a name of 64 bytes
_DEAD = frozenset("ZXx")  # zombie or dead: its memory is back, only its exit status is left


Name = tuple[int, int]  # pid and start time: means one process for ever


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    parent: int
    group: int
    session: int
    start_ticks: int  # since boot; with the pid it names one process for ever
    state: str
    threads_count: int = 1
    busy_ticks: int = 0  # processor time of all its threads

    @property
    def alive(self) -> bool:
        """Says whether the process lives. A zombie whose other threads still end counts as alive:
        it may still be giving its memory back."""
        return self.state not in _DEAD or self.threads_count > 1


@dataclass(frozen=True, slots=True)
class Memory:
    """Holds what a process tree holds on its own account."""

    device_bytes: Bytes
    host_bytes: Bytes


def process(pid: int) -> Process | None:
    """Returns the process of this pid; None when there is none, or when /proc shows only their own
    processes to users (hidepid, proc(5)) and it is another user's."""
    try:
        # The bare calls: this is asked of every process each time an engine dies, and a queued
        # ticket waits for the answer. Path.read_text takes five times as long.
        fd = os.open(f"{PROC}/{pid}/stat", os.O_RDONLY)
        try:
            text = os.read(fd, _STAT_MOST_BYTES).decode(errors="replace")
        finally:
            os.close(fd)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The name may hold spaces and brackets, so fields are counted after its last bracket (proc(5)).
    state, parent, group, session, *rest = text[text.rindex(")") + 2 :].split()
    names = int(parent), int(group), int(session)
    busy = int(rest[7]) + int(rest[8])
    return Process(pid, *names, int(rest[15]), state, int(rest[13]), busy)


def processes() -> dict[int, Process]:
    """Returns every process that runs now, by pid."""
    entries = (process(int(name)) for name in os.listdir(PROC) if name.isdigit())
    return {p.pid: p for p in entries if p is not None}


def started_with(argument: str, variable: str) -> set[int]:
    """Returns the living pids of this user that have `argument` on their command line and
    `variable`, as NAME=value, in the environment they began with, and forks of such processes."""
    pids = set()
    for p in processes().values():
        folder = PROC / str(p.pid)
        try:
            is_ours = p.alive and folder.stat().st_uid == os.getuid()
            if not is_ours or argument.encode() not in _words(folder / "cmdline"):
                continue
            if variable.encode() in _words(folder / "environ"):
                pids.add(p.pid)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return pids


def _words(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\0")


def command(pid: int) -> bytes:
    """Returns the process's command line, or the name it gave itself since; empty when it is
    gone."""
    try:
        return (PROC / str(pid) / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def name(pid: int) -> str:
    """Returns the name that `ps` shows; empty if no process of this namespace has that pid."""
    try:
        return (PROC / str(pid) / "comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def led_by(leader: int, all_processes: dict[int, Process]) -> set[int]:
    """Returns the leader, if it is there, and the members of the group and session of its
    number."""
    return {p.pid for p in all_processes.values() if leader in (p.pid, p.group, p.session)}


def descend(leads: Iterable[int], all_processes: dict[int, Process]) -> set[int]:
    """Returns the living pids among `leads` and their descendants."""
    children: dict[int, list[int]] = {}
    for p in all_processes.values():
        children.setdefault(p.parent, []).append(p.pid)
    pids: set[int] = set()
    waiting = [pid for pid in leads if pid in all_processes]
    while waiting:
        pid = waiting.pop()
        if pid not in pids:
            pids.add(pid)
            waiting.extend(children.get(pid, ()))
    return {pid for pid in pids if all_processes[pid].alive}


def rollup(pid: int) -> dict[str, int]:
    """Sums over all mappings of one process, in bytes; empty when it just went, or when
    it is another user's (a setuid helper): what cannot be read stays foreign."""
    pairs = (line.split(":", 1) for line in _text(pid, "smaps_rollup").splitlines()[1:])
    return {key: int(value.split()[0]) * KIB for key, value in pairs}


def mapped_aside(pid: int) -> int:
    """Returns a process's part of the slabs and host copies that it has mapped, in bytes."""
    text, total = _text(pid, "smaps"), 0
    for name in (HOST_COPY, *_OF_NO_PROCESS):
        for match in re.finditer(rf"/memfd:{name}.*\n(?:.*\n)*?Pss: *(\d+) kB", text):
            total += int(match[1]) * KIB
    return total


def shared_files(pid: int) -> frozenset[tuple[int, int]]:
    """Returns device and inode of the files of shared memory that a process has mapped, whether or
    not it has them open."""
    files = set()
    for line in _text(pid, "maps").splitlines():
        if not any(name in line for name in _SHARED_MEMORY):  # of thousands, nearly all
            continue
        _, flags, _, device, inode, *path = line.split(maxsplit=5)
        if path and path[0].startswith(_SHARED_MEMORY) and flags.endswith("s"):
            files.add((_device(device), int(inode)))
    return frozenset(files)


def memory(
    pids: Iterable[int],
    read: Callable[[int], dict[str, int]] = rollup,
    aside: Callable[[int], int] = mapped_aside,
    shared: Callable[[int], frozenset[tuple[int, int]]] = shared_files,
) -> Memory:
    """Returns the private pages of the processes, plus the shared memory they hold. Pages shared
    with the process they were forked from count for neither, so a fork costs what it writes. Slabs
    of the pool, and copies that engines share, are on no process's account. `read` may know a
    rollup already, `aside` what is mapped of slabs and host copies, and `shared` which files of
    shared memory are mapped."""
    pids = list(pids)
    private_bytes = shared_bytes = 0
    files: dict[tuple[int, int], tuple[str, int]] = {}
    for pid in pids:
        sums = read(pid)
        shmem_bytes = sums.get("Pss_Shmem", 0)
        private = sum(v for k, v in sums.items() if k.startswith("Private_"))
        private_bytes += max(0, private - shmem_bytes)
        shared_bytes += shmem_bytes
        files |= {key: (name, size) for key, name, size in _memory_files(pid)}
    host_bytes = sum(size for name, size in files.values() if name.startswith(HOST_COPY))
    lent_bytes = sum(size for name, size in files.values() if name.startswith(_OF_NO_PROCESS))
    file_bytes = sum(size for _, size in files.values()) - host_bytes - lent_bytes
    aside_bytes = host_bytes + lent_bytes
    if aside_bytes and any(shared(pid) - files.keys() for pid in pids):
        # What is held of these files need not be mapped, and would hide what is only mapped.
        aside_bytes = sum(aside(pid) for pid in pids)
    # Shared pages are seen mapped (Pss) or held open (blocks), often both: the larger counts.
    held_bytes = max(file_bytes, shared_bytes - aside_bytes)
    return Memory(Bytes(private_bytes + held_bytes), Bytes(host_bytes))


def _memory_files(pid: int) -> Iterator[tuple[tuple[int, int], str, int]]:
    """Returns identity, name and allocated bytes of each memfd and /dev/shm file that a process
    holds open."""
    folder = PROC / str(pid) / "fd"
    try:
        numbers = os.listdir(folder)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return
    for number in numbers:
        try:
            target = os.readlink(folder / number)
            if target.startswith(("/memfd:", "/dev/shm/")):
                status = os.stat(folder / number)
                name = target.removeprefix("/memfd:").removeprefix("/dev/shm/")
                yield (status.st_dev, status.st_ino), name, status.st_blocks * _SECTOR_BYTES
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # closed between listing and reading, or it has become another user's


def _device(text: str) -> int:
    """Returns the number that stat(2) has for `major:minor` of /proc/PID/maps."""
    major, minor = text.split(":")
    return os.makedev(int(major, 16), int(minor, 16))


def _text(pid: int, file: str) -> str:
    """Returns the text of a file of a process; empty where it cannot be read, as for `rollup`."""
    try:
        return (PROC / str(pid) / file).read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def stalled_fraction() -> float:
    """Returns the share of the last 10 s in which some task waited for memory; 0 where the kernel
    keeps no account of it (PSI, Documentation/accounting/psi.rst)."""
    try:
        line = (PROC / "pressure" / "memory").read_text().splitlines()[0]
    except OSError:
        return 0.0
    return float(line.split("avg10=")[1].split()[0]) / 100


def ram() -> tuple[Bytes, Bytes]:
    """Returns total and available RAM, in bytes."""
    pairs = (line.split(":", 1) for line in (PROC / "meminfo").read_text().splitlines())
    lines = {key: int(value.split()[0]) * KIB for key, value in pairs}
    return Bytes(lines["MemTotal"]), Bytes(lines["MemAvailable"])
