"""The engine processes that a node agent has spawned. It finds them again after its restart, and
kills no others.

A process is named by pid and start time, so a pid used again is never mistaken for ours; signals
go through pidfds.
"""

import asyncio
import contextlib
import glob
import hashlib
import json
import logging
import os
import shutil
import signal
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from arbiter.core.types import DeviceBytes
from arbiter.node import procfs
from arbiter.node.device_probe import Tree
from arbiter.units import Bytes, DeviceId, TicketId

logger = logging.getLogger("arbiter.agent")

# Reaped tickets remembered, so that a late spawn cannot start one: a day of a swap every 10 s.
ENDED_KEPT = 10_000
# Its pidfd, and one at a time for what `open` reads and writes; other threads may take one each.
KEPT_DESCRIPTORS = 4
_SHARED_MEMORY = Path("/dev/shm")
_NAME_BYTES = 6  # of a scratch folder's name: ten thousand tickets share one at odds of 2e-7


@dataclass(slots=True)
class Child:
    """Describes one engine. `members` are its processes as last seen, by pid with their start
    times."""

    ticket: TicketId
    pid: int
    start_ticks: int
    socket: Path
    granted: tuple[DeviceBytes, ...]
    fd: int  # pidfd of the root
    opened_ns: int  # monotonic; an older look at the processes says nothing about it
    members: dict[int, int] = field(default_factory=dict)
    zygote: procfs.Name | None = None  # which forked it
    leads: bool = True  # its pid still names its session and group, even if it is dead
    killed: dict[int, int] = field(default_factory=dict)  # those of `members` that were
    killed_ns: int | None = None  # when the last of them was
    tree_is_final: bool = False  # `killed` is all there ever will be of it
    # Before the end; a driver may list them yet.
    last_members: set[int] = field(default_factory=set)

    def tree(self) -> Tree:
        """Returns the engine's processes as the probe reads them."""
        return Tree(self.ticket, frozenset(self.members), self.granted)


class Children:
    """Keeps the engine processes by ticket, and a small file of each in the socket folder, by which
    the next life of the agent finds them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ended: OrderedDict[TicketId, None] = OrderedDict()
        self.by_ticket: dict[TicketId, Child] = {}

    def socket(self, ticket: TicketId) -> Path:
        """Returns the path of the socket on which the engine of a ticket listens."""
        return self._folder / f"{ticket}.sock"

    def scratch(self, ticket: TicketId) -> Path:
        """Returns the folder that the engine may make for its temporary files. Libraries put
        sockets there, whose paths the kernel bounds (108 bytes), so its name has a fixed length."""
        name = hashlib.blake2b(ticket.encode(), digest_size=_NAME_BYTES).hexdigest()
        return self._folder / f"{name}.tmp"

    def open(
        self,
        ticket: TicketId,
        pid: int,
        granted: tuple[DeviceBytes, ...],
        start_ticks: int = 0,
        zygote: procfs.Name | None = None,
    ) -> Child | None:
        """Takes charge of a process under a ticket. `start_ticks`: when it started, or 0 where that
        is not known. None: the process is gone, or its pid belongs to another one."""
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return None
        process = procfs.process(pid)  # after the open, so that the descriptor is of this one
        if process is None or not process.alive or start_ticks not in (0, process.start_ticks):
            os.close(fd)
            return None
        child = Child(
            ticket, pid, process.start_ticks, self.socket(ticket), granted, fd, time.monotonic_ns()
        )
        child.members[pid] = process.start_ticks
        child.last_members = {pid}
        child.zygote = zygote
        self.by_ticket[ticket] = child
        self._write(child)
        return child

    def recover(self, keep_log: Callable[[str, Path], None]) -> tuple[TicketId, ...]:
        """Opens again what an earlier life of the agent had; returns tickets whose engine is gone.
        A helper that outlived its root is killed. `keep_log` gets the logs of the dead."""
        lost = []
        for path in sorted(self._folder.glob("*.child")):
            raw = json.loads(path.read_text())
            ticket = TicketId(raw["ticket"])
            granted = tuple(DeviceBytes(DeviceId(d), Bytes(b)) for d, b in raw["granted"])
            zygote = tuple(raw["zygote"]) if raw.get("zygote") else None
            if self.open(ticket, raw["pid"], granted, raw["start_ticks"], zygote) is None:
                _kill_session(raw["pid"], raw["start_ticks"])
                keep_log(ticket, self.socket(ticket).with_suffix(".log"))
                self.unlink(ticket)
                self.forbid_start(ticket)
                lost.append(ticket)
        return tuple(lost)

    def refresh(self) -> list[Child]:
        """Looks at all processes, and notes what it found."""
        return self.note(*find_processes())

    def note(self, looked_ns: int, all_processes: dict[int, procfs.Process]) -> list[Child]:
        """Notes what was seen at `looked_ns` of every engine opened before; returns those."""
        noted = [c for c in self.by_ticket.values() if c.opened_ns < looked_ns]
        for child in noted:
            known = {p for p, ticks in child.members.items() if _is_same(all_processes, p, ticks)}
            members = procfs.descend(known | _group_of(child, all_processes), all_processes)
            child.members = {pid: all_processes[pid].start_ticks for pid in members}
            child.last_members = set(members) or child.last_members
            # The kernel forks nothing for a process with a signal to die by (copy_process, fork.c).
            # So a look that began after all that is known was killed, and found no other, is the
            # last that is needed.
            was_killed = child.killed_ns is not None and child.killed_ns < looked_ns
            is_known = child.members.items() <= child.killed.items()
            child.tree_is_final = child.tree_is_final or (was_killed and is_known)
        return noted

    def kill(self, child: Child) -> None:
        """Sends SIGKILL to every known process of an engine. The caller repeats it until `members`
        stays empty, because processes may be forked meanwhile."""
        for pid, ticks in child.members.items():
            _kill(pid, ticks)
        if not child.members.items() <= child.killed.items():
            child.killed |= child.members
            child.killed_ns = time.monotonic_ns()

    def drop_dead_members(self, child: Child) -> None:
        """Drops the members of a final tree that have died. Nothing can be added to a final tree,
        so no other process is looked at."""
        assert child.tree_is_final
        child.members = {p: ticks for p, ticks in child.members.items() if lives(p, ticks)}

    def forbid_start(self, ticket: TicketId) -> None:
        """Lets no engine start under a ticket any more."""
        self._ended[ticket] = None
        while len(self._ended) > ENDED_KEPT:
            self._ended.popitem(last=False)

    def may_not_start(self, ticket: TicketId) -> bool:
        """Says whether a ticket has ended, so that no engine may start under it."""
        return ticket in self._ended

    def forget(self, child: Child) -> None:
        """Drops the descriptor of a process that is gone."""
        del self.by_ticket[child.ticket]
        os.close(child.fd)

    def unlink(self, ticket: TicketId) -> None:
        """Removes everything of that name: an engine has sockets of its own beside the one we gave
        it, and libraries leave files and shared memory."""
        for path in self._folder.glob(f"{glob.escape(ticket)}.*"):
            path.unlink(missing_ok=True)
        shutil.rmtree(scratch := self.scratch(ticket), ignore_errors=True)
        for path in _SHARED_MEMORY.glob(f"{scratch.stem}-*"):
            path.unlink(missing_ok=True)

    def trees(self) -> list[Tree]:
        """Returns the processes of every engine."""
        return [child.tree() for child in self.by_ticket.values()]

    def _write(self, child: Child) -> None:
        """Writes the file by which the next life of the agent finds an engine. A disk that is full
        costs the file, not the engine."""
        granted = [[d.device, d.size_bytes] for d in child.granted]
        raw = {
            "ticket": child.ticket,
            "pid": child.pid,
            "start_ticks": child.start_ticks,
            "granted": granted,
            "zygote": child.zygote,
        }
        path = self._folder / f"{child.ticket}.child"
        part = path.with_suffix(".part")
        try:
            part.write_text(json.dumps(raw))
            part.rename(path)  # whole or not at all, whenever this process is killed
        except OSError as error:
            # The next agent finds the engine without it, as long as its zygote lives.
            logger.warning(
                "no note is kept of engine %s, pid %d: %s", child.ticket, child.pid, error
            )
            with contextlib.suppress(OSError):
                part.unlink()


@contextlib.contextmanager
def kept_descriptors() -> Iterator[None]:
    """Keeps as many descriptors as `Children.open` needs until its process is forked: an engine
    that cannot be opened then holds memory unseen until it ends by itself. Raises OSError where
    there are too few, before anything is forked."""
    with contextlib.ExitStack() as kept:
        for _ in range(KEPT_DESCRIPTORS):
            kept.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        yield


def find_processes() -> tuple[int, dict[int, procfs.Process]]:
    """Returns when the look began, and every process by pid. Takes milliseconds: call it from a
    thread."""
    return time.monotonic_ns(), procfs.processes()


def _is_same(all_processes: dict[int, procfs.Process], pid: int, ticks: int) -> bool:
    """Says whether the process that was listed under a pid started at `ticks`."""
    process = all_processes.get(pid)
    return process is not None and process.start_ticks == ticks


def lives(pid: int, ticks: int) -> bool:
    """Says whether the process of this pid and start time lives."""
    process = procfs.process(pid)
    return process is not None and process.alive and process.start_ticks == ticks


def _group_of(child: Child, all_processes: dict[int, procfs.Process]) -> set[int]:
    """Returns the root and the processes of the session and group that it led. While one of them
    lives, the kernel gives the root's pid to no other process; later it may be a stranger's."""
    root = all_processes.get(child.pid)
    is_strangers = root is not None and root.start_ticks != child.start_ticks
    if is_strangers or not child.leads:
        child.leads = False
        return set()
    led = procfs.led_by(child.pid, all_processes)
    led = {pid for pid in led if all_processes[pid].start_ticks >= child.start_ticks}
    child.leads = root is not None or bool(led)
    return led


def _kill(pid: int, ticks: int) -> None:
    """Sends SIGKILL to the process of this pid and start time, if it lives."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        process = procfs.process(pid)
        if process is not None and process.start_ticks == ticks:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
    finally:
        os.close(fd)


def _kill_session(leader: int, ticks: int) -> None:
    """Kills what is left of a session whose leader died. While any of it lives the kernel gives the
    leader's number to no other process; if another has it, nothing is left."""
    holder = procfs.process(leader)
    if holder is not None and holder.start_ticks != ticks:
        return
    for p in procfs.processes().values():
        if p.session == leader and p.alive and p.start_ticks >= ticks:
            _kill(p.pid, p.start_ticks)


def kill_all(pids: Iterable[int]) -> None:
    """Sends SIGKILL to the processes that have these pids now."""
    kill_known((p.pid, p.start_ticks) for pid in pids if (p := procfs.process(pid)))


def kill_known(pids: Iterable[procfs.Name]) -> None:
    """Sends SIGKILL to processes named by pid and start time."""
    for pid, ticks in pids:
        _kill(pid, ticks)


# -------------------------------------------------------------------------------------------------
# Engines whose process goes so that another takes its place under the same ticket (A14).


class Restarts:
    """Keeps the tickets whose process is being replaced. The end of such a process is awaited here,
    and not reported to the arbiter."""

    def __init__(self) -> None:
        self._ends: dict[TicketId, asyncio.Future[None]] = {}

    def __contains__(self, ticket: TicketId) -> bool:
        return ticket in self._ends

    def begin(self, ticket: TicketId) -> asyncio.Future[None]:
        """Returns a future, done once nothing is left of the ticket's process. A repeated call
        returns the same future."""
        if ticket not in self._ends:
            self._ends[ticket] = asyncio.get_running_loop().create_future()
        return self._ends[ticket]

    def ended(self, ticket: TicketId) -> None:
        """Ends the wait: nothing is left of the ticket's process."""
        if (end := self._ends.pop(ticket, None)) and not end.done():
            end.set_result(None)
