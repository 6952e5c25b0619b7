"""Processes outside Serve that hold a lease: the agent measures their trees and sees their end. It
never kills them, because it did not start them.

A process is named by pid and start time, as engines are. What it held before its lease began is the
floor: its bytes are back once it holds no more than that, or is dead.
"""

import os
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from arbiter.core.events import EngineReading
from arbiter.core.tickets.budget import fraction_of
from arbiter.core.types import DeviceBytes
from arbiter.errors import LeaseRefused
from arbiter.node import procfs
from arbiter.node.device_probe import Tree
from arbiter.units import Bytes, TicketId

# Of the lease, above the floor: what a process keeps of freed memory and still counts as given
# back. The same share as of a model that sleeps (D1).
LEFT_FRACTION = 0.1


@dataclass(slots=True)
class LeasedProcess:
    """Holds one leased process tree. `members`: its processes as last seen, pid to start time."""

    ticket: TicketId
    pid: int
    start_ticks: int
    granted: tuple[DeviceBytes, ...]
    fd: int  # pidfd of the root
    opened_ns: int
    floor_bytes: Bytes
    members: dict[int, int] = field(default_factory=dict)
    # Those before the end, which a driver may still list.
    last_members: set[int] = field(default_factory=set)
    leaving: bool = False  # the lease is over; watched until its bytes are back

    def tree(self) -> Tree:
        return Tree(self.ticket, frozenset(self.members), self.granted)

    def held_of(self, measured: tuple[DeviceBytes, ...]) -> Bytes:
        lent = {d.device for d in self.granted}
        return Bytes(sum(d.size_bytes for d in measured if d.device in lent))

    @property
    def enough_bytes(self) -> Bytes:
        """Returns the bytes at or below which the process counts as having given its lease back."""
        lent = Bytes(sum(d.size_bytes for d in self.granted))
        return Bytes(self.floor_bytes + fraction_of(lent, LEFT_FRACTION))


class LeasedProcesses:
    """Keeps the leased processes by ticket. They are not kept on disk, because heartbeats of a
    lease name its process again."""

    def __init__(self) -> None:
        self.by_ticket: dict[TicketId, LeasedProcess] = {}

    def open(
        self, ticket: TicketId, pid: int, granted: tuple[DeviceBytes, ...], not_these: set[int]
    ) -> LeasedProcess | None:
        """Watches a process; None when it is watched for this ticket already. Raises LeaseRefused
        for a process that is dead, is not this user's, or belongs to another ticket: its bytes
        would be counted twice."""
        process_of_lease = self.by_ticket.get(ticket)
        if process_of_lease and process_of_lease.pid == pid:
            return None
        taken = not_these | {p for o in self.by_ticket.values() for p in o.members}
        if process_of_lease or pid in taken:
            raise LeaseRefused(
                "pid", f"{pid} has another lease, or this lease another process; take one for each"
            )
        try:
            fd = os.pidfd_open(pid)
        except (OSError, OverflowError) as error:
            raise LeaseRefused("pid", f"{pid} is no process on this node: {error}") from error
        process = procfs.process(pid)
        if process is None or not process.alive or not _is_ours(pid):
            os.close(fd)
            raise LeaseRefused("pid", f"{pid} is not a living process of this user")
        in_ram = any("/cpu:" in d.device for d in granted)
        floor = procfs.memory({pid}).device_bytes if in_ram else Bytes(0)
        leased = LeasedProcess(
            ticket, pid, process.start_ticks, granted, fd, time.monotonic_ns(), floor
        )
        leased.members[pid] = process.start_ticks
        leased.last_members = {pid}
        self.by_ticket[ticket] = leased
        return leased

    def note(
        self, looked_ns: int, all_processes: dict[int, procfs.Process], not_through: Collection[int]
    ) -> list[LeasedProcess]:
        """Notes what was seen at `looked_ns`; returns the leased processes of which nothing is
        left. Processes behind the pids `not_through` do not count: a driver that started Ray is the
        parent of all of Ray."""
        processes = {pid: p for pid, p in all_processes.items() if pid not in not_through}
        noted = [o for o in self.by_ticket.values() if o.opened_ns < looked_ns]
        for leased in noted:
            known = {
                pid
                for pid, ticks in leased.members.items()
                if pid in processes and processes[pid].start_ticks == ticks
            }
            pids = {
                pid for pid in procfs.descend(known, processes) if pid in known or _is_ours(pid)
            }
            leased.members = {pid: processes[pid].start_ticks for pid in pids}
            leased.last_members = set(pids) or leased.last_members
        return [o for o in noted if not o.members]

    def forget(self, leased: LeasedProcess) -> None:
        del self.by_ticket[leased.ticket]
        os.close(leased.fd)

    def trees(self) -> list[Tree]:
        return [leased.tree() for leased in self.by_ticket.values()]

    def given_back(self, engines: tuple[EngineReading, ...]) -> list[LeasedProcess]:
        """Returns the leaving processes that hold no more than before their lease, by a reading
        just taken."""
        read = {e.ticket: e.measured for e in engines}
        return [
            o
            for o in self.by_ticket.values()
            if o.leaving and o.ticket in read and o.held_of(read[o.ticket]) <= o.enough_bytes
        ]


def _is_ours(pid: int) -> bool:
    """Says whether a process belongs to this user. Another user's memory cannot be read, so it
    stays foreign."""
    try:
        return os.stat(procfs.PROC / str(pid)).st_uid == os.getuid()
    except FileNotFoundError:
        return False
