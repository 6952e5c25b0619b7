"""The node agent, one actor per node: keeps the zygote alive, spawns engines, measures them, kills
them.

It counts bytes and decides nothing: holders with a granted ticket say what to spawn, the arbiter
says what to kill. It kills only processes that it spawned.
"""

import asyncio
import logging
import os
import pkgutil
import shutil
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from arbiter import heap
from arbiter.core import events as ev
from arbiter.core import types
from arbiter.node import children, cleanup, procfs, spare_workers, tenant_folders, zygote_client
from arbiter.node.device_probe import NodeProbe, Readings, Tree
from arbiter.node.engine_processes import LOOK_AGAIN_S, EngineProcesses
from arbiter.node.host_copies import HostCopies
from arbiter.node.leased_processes import LeasedProcess, LeasedProcesses
from arbiter.node.pool import Pool
from arbiter.node.reports import Reports
from arbiter.node.slab_files import SlabFiles
from arbiter.pool.layout import Removal, tenant_digest
from arbiter.protocol import ray_internals, rpc
from arbiter.protocol.messages import AgentSettings, Spawned, SpawnSpec
from arbiter.units import NodeId, Span, TicketId, in_seconds

logger = logging.getLogger("arbiter.agent")

REPORT_EVERY_S = 1.0  # B1: within 2 s on the books
REPORT_SOON_S = 0.25  # A10
LOGS_EVERY_S = 60.0  # a log that is to be cut has grown for an hour
READS_COUNT = 3  # at most for one report: engines may come and go without end


class NodeAgent:
    """Runs as a detached actor; plain enough to be driven without Ray in tests."""

    def __init__(self, node: NodeId, settings: AgentSettings, logs: str | None = None) -> None:
        self._node, self._settings = node, settings
        self._folder = zygote_client.folder(settings, node)
        log_folder = Path(logs) if logs else ray_internals.logs_folder()
        self._logs = cleanup.EngineLogs(log_folder)
        self._probe = NodeProbe(node, pkgutil.resolve_name(settings.gpus)())
        files = SlabFiles.in_folder(settings.slabs_folder, settings.disk_bytes)
        self._pool = Pool(settings.pool_bytes, files, settings.sweep_s)
        self._reports = Reports(node, self._probe.introduction, self._probe.gpu_pids)
        self._tasks: set[asyncio.Future[None]] = set()
        self._copies = HostCopies(node, self._folder, self._reports, self._start)
        zygote_log = log_folder / f"zygote-{node}.log"
        self._engines = EngineProcesses(
            settings,
            self._folder,
            zygote_log,
            self._logs,
            self._reports,
            self._start,
            self._probe.uuids,
            self._pool,
            self._copies,
        )
        self._leased = LeasedProcesses()
        self._returned: list[TicketId] = []  # leases given back, until what is left is foreign
        self._is_delivered = False  # the last reading, to the arbiter
        self._wakeup = asyncio.Event()
        if not settings.folder:  # else what lies beside is not ours to judge
            cleanup.sweep(self._folder)
        tenant_folders.sweep(settings.tenant_folders)
        self._engines.recover()
        spare_workers.end_from_before(settings.spares_since_unix_s)
        self._spares = spare_workers.SpareWorkers(settings.spares_count)
        keeps = (self._engines.supervisor.keep(), self._spares.keep(), heap.trim_forever())
        for work in (
            self._report_regularly(),
            self._watch_ends(),
            self._shorten_logs(),
            self._copies.keep_swept(),
            *keeps,
        ):
            self._start(work)
        calls = (self.spawn, self.respawn, self.kill, self.probe, self.drop_slabs, self.drop_tenant)
        offers = {call.__name__: call for call in calls}
        self._rpc = rpc.RpcServer(node, self._folder / "agent.sock", offers)

    def __repr__(self) -> str:
        return f"NodeAgent({self._node})"

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_crash)

    # -- called by holders and the arbiter -------------------------------------------------------

    async def spawn(self, ticket: TicketId, spec: SpawnSpec) -> Spawned:
        """Returns the ticket's engine process, started if need be. Raises TicketNotGranted unless
        the arbiter granted the ticket, TicketClosed after a kill, ZygoteError when no process could
        be started, ArbiterUnavailable."""
        return await self._engines.spawn(ticket, spec)

    async def respawn(self, ticket: TicketId, spec: SpawnSpec) -> Spawned:
        """Spawns as `spawn` does, in the place of the process that the ticket has (A14). A repeated
        call has another process. Raises what `spawn` raises; TicketClosed also when the ticket was
        killed meanwhile."""
        return await self._engines.respawn(ticket, spec)

    async def kill(self, ticket: TicketId) -> None:
        """Kills what there is of the ticket's engine, lets none start, and reports EngineGone. What
        runs under a lease is not killed, but watched until its bytes are back."""
        if leased := self._leased.by_ticket.get(ticket):
            leased.leaving = True
        elif self._copies.end(ticket):
            return  # engines have it open
        elif self._engines.kill(ticket):
            # Its death is news by itself; a reading now would hold its memory map while it dies.
            asyncio.get_running_loop().call_later(REPORT_SOON_S, self._wakeup.set)
            return
        self._wakeup.set()

    async def adopt(
        self, ticket: TicketId, pid: int, granted: tuple[types.DeviceBytes, ...]
    ) -> None:
        """Measures this outside process under its lease from now on. Raises LeaseRefused."""
        opened = self._leased.open(ticket, pid, granted, self._own_pids())
        if opened:
            self._watch_leased(opened)
            self._wakeup.set()

    async def probe(self) -> None:
        """Sends a reading now."""
        self._wakeup.set()

    async def drop_slabs(self, owner: str) -> None:
        """Erases what engines of a removed model left in the pool, and its host copy."""
        self._pool.drop_owner(owner)
        self._copies.drop_owner(owner)
        self._wakeup.set()

    async def drop_host_copy(self, key: str) -> bool:
        """Drops a copy of a model's files in host RAM. False: it leaves with the last engine that
        has it open. Raises UnknownHostCopy."""
        is_gone = self._copies.drop(key)
        self._wakeup.set()
        return is_gone

    async def drop_tenant(self, tenant: str, ago: Span = Span(0)) -> None:
        """Erases what requests of a tenant left in the pool before its removal, and what engines
        copied of the tenant. `ago`: how long ago that was, and no time of the clock, because the
        clocks of two machines may differ."""
        removal = Removal(tenant_digest(tenant), time.time() - in_seconds(ago))
        self._pool.drop_tenant(removal)
        self._wakeup.set()
        folders = self._settings.tenant_folders
        count = await asyncio.to_thread(tenant_folders.remove, folders, tenant, removal.until_s)
        logger.info("removed %d copies of adapters of the tenant %s", count, tenant)

    async def living(self, pids: list[int]) -> dict[int, int]:
        """Returns the start time of each of these processes that lives."""
        processes = (procfs.process(pid) for pid in pids)
        return {p.pid: p.start_ticks for p in processes if p is not None and p.alive}

    async def rpc_address(self) -> dict[str, str] | None:
        """Returns where callers on this node reach the same methods sooner than by Ray: a unix
        socket. None where it could not be opened."""
        return await self._rpc.address()

    async def readiness(self) -> dict[str, str]:
        """Says how ready this node is to start engines, under `state`: `ready` once its zygote has
        its imports done and a spare worker is at hand, so that the next replica and the next engine
        start as fast as any; `starting` before; `failed`, with the cause, where no zygote stays
        up."""
        supervisor = self._engines.supervisor
        if supervisor.is_up:
            return {"state": "ready" if self._spares.is_settled else "starting"}
        cause = supervisor.trouble
        return {"state": "failed", "cause": cause} if cause else {"state": "starting"}

    async def pids(self) -> dict[str, int]:
        """Returns the pids of zygote and agent, for status pages and fault tests."""
        zygote = self._engines.supervisor.process
        return {"agent": os.getpid(), "zygote": zygote[0] if zygote else 0}

    async def engines(self) -> dict[str, list[int]]:
        """Returns the living processes of each ticket, root first; those of leases as well."""
        every: list[children.Child | LeasedProcess] = list(
            self._engines.children.by_ticket.values()
        )
        every += self._leased.by_ticket.values()
        return {
            c.ticket: sorted(c.members, key=lambda pid, root=c.pid: pid != root)  # type: ignore[misc]
            for c in every
        }

    async def close(self) -> None:
        """Kills every engine and the zygote; leaves nothing behind but logs, and files of KV."""
        self._engines.is_closing = True
        for task in self._tasks:
            task.cancel()
        await self._engines.close()
        self._rpc.close()
        await asyncio.to_thread(self._pool.save_idle)
        await asyncio.to_thread(self._pool.close)
        self._copies.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- leased processes ------------------------------------------------------------------------

    def _own_pids(self) -> set[int]:
        """Returns the processes that no lease may cover: the agent, its zygote and engines, and the
        Ray node that started them."""
        return self._engines.own_pids() | {os.getpid(), os.getppid()}

    def _watch_leased(self, leased: LeasedProcess) -> None:
        """Has the end of a leased process noticed as soon as the kernel tells of it."""
        loop = asyncio.get_running_loop()

        def died() -> None:
            loop.remove_reader(leased.fd)
            leased.leaving = True
            self._reports.note_gone(leased.ticket, bytes_back=False)
            self._engines.died.set()

        loop.add_reader(leased.fd, died)

    def _collect_dead(self, looked_ns: int, all_processes: dict[int, procfs.Process]) -> None:
        """Collects dead engines, and dead leased processes, which are not ours to kill."""
        self._engines.collect_dead(looked_ns, all_processes)
        for leased in self._leased.note(looked_ns, all_processes, self._own_pids()):
            self._forget_leased(leased)
            self._reports.note_ended(leased.ticket, leased.pid, *leased.last_members)

    def _forget_leased(self, leased: LeasedProcess) -> None:
        asyncio.get_running_loop().remove_reader(leased.fd)
        self._leased.forget(leased)

    # -- readings --------------------------------------------------------------------------------

    async def _report_regularly(self) -> None:
        """Collects what has ended and sends a reading: each REPORT_EVERY_S, each REPORT_SOON_S
        while engines end, and at once when woken."""
        while True:
            self._wakeup.clear()
            self._collect_dead(*await asyncio.to_thread(children.find_processes))
            self._reports.note_returned()
            await self._report()
            busy = self._engines.are_ending or self._reports.are_open or not self._is_delivered
            try:
                async with asyncio.timeout(REPORT_SOON_S if busy else REPORT_EVERY_S):
                    await self._wakeup.wait()
            except TimeoutError:
                continue

    async def _shorten_logs(self) -> None:
        """Apart from the readings, which no disk of logs that hangs may stop."""
        while True:
            await asyncio.sleep(LOGS_EVERY_S)
            tickets = tuple(self._engines.children.by_ticket)
            await asyncio.to_thread(self._logs.shorten, tickets)

    async def _watch_ends(self) -> None:
        """Collects ended engines as soon as one died, also while a reading is taken: a request may
        wait for the bytes."""
        died = self._engines.died
        while True:
            await died.wait()
            died.clear()
            turn_ends_s = time.monotonic() + REPORT_SOON_S
            await self._check_killed()
            while self._engines.are_ending and time.monotonic() < turn_ends_s:
                await asyncio.sleep(LOOK_AGAIN_S)
                await self._check_killed()
            # A reading can wait: the next engine may be starting on what this one gave back.
            asyncio.get_running_loop().call_later(REPORT_SOON_S, self._wakeup.set)

    async def _check_killed(self) -> None:
        """Looks which killed engines have ended, and reports these ends."""
        if self._leased.by_ticket or not self._engines.check_killed():
            self._collect_dead(*await asyncio.to_thread(children.find_processes))
        await self._reports.send_ends()

    async def _report(self) -> None:
        """Sends the ends of engines at once, because a request may wait for their bytes; then a
        reading."""
        await self._reports.send_ends()
        self._pool.enforce_budget(self._copies.idle())
        if not self._is_delivered and not await self._reports.send(()):
            return  # a reading that waits for the arbiter would be of before
        readings, returned = await self._read(), self._returned
        engines = [self._with_exactness(e) for e in readings.engines] + [
            *self._copies.engine_readings()
        ]
        stalls = procfs.stalled_fraction()
        slabs, dropped = self._pool.readings(), self._pool.dropped()
        reading = ev.Measured(
            self._node,
            readings.devices,
            tuple(engines),
            stalls,
            readings.unreadable,
            slabs,
            dropped,
            self._pool.contents() + self._copies.contents(),
            self._copies.readings(),
        )
        self._is_delivered = await self._reports.send((reading,))
        if self._is_delivered:
            self._pool.forget_dropped(dropped)
            self._release_leased(readings.engines, returned)

    async def _read(self) -> Readings:
        """Reads all devices and engines, again until no engine came or went meanwhile, at most
        READS_COUNT times: what an engine gave back after it was read would be missing from what is
        foreign, and what a new one took would be foreign. Processes are asked themselves, because
        an end is heard of later.

        Where engines come and go without end, the reading leaves out engines that have ended: their
        end is reported during a reading, and if their bytes are lent again by then, these would
        count twice, and have another model leave."""
        for _ in range(READS_COUNT):
            trees = self._trees()
            living = _living(trees)
            # What dropped slabs have not given back is in no slab's reading, so it is foreign.
            shared_bytes = self._pool.allocated_bytes + self._copies.held_bytes
            readings = await asyncio.to_thread(self._probe.read, trees, shared_bytes)
            present = self._trees()
            if trees == present and living == _living(present):
                break
        tickets = {tree.ticket for tree in present}
        return replace(readings, engines=tuple(e for e in readings.engines if e.ticket in tickets))

    def _trees(self) -> list[Tree]:
        """Returns the processes of every engine and lease that has bytes on the books."""
        return self._engines.children.trees() + self._leased.trees() + self._reports.trees()

    def _release_leased(
        self, engines: tuple[ev.EngineReading, ...], returned: list[TicketId]
    ) -> None:
        """Forgets the leased processes that gave their lease back. `engines`: what a reading, which
        the arbiter has received, found of them; `returned`: the tickets of those whose remaining
        bytes that reading has counted as foreign, so that their bytes are reported to be back."""
        for ticket in returned:
            self._reports.note_gone(ticket, bytes_back=True)
        back = self._leased.given_back(engines)
        self._returned = [leased.ticket for leased in back]
        for leased in back:
            self._forget_leased(leased)
        if returned or back:
            self._wakeup.set()

    def _with_exactness(self, reading: ev.EngineReading) -> ev.EngineReading:
        """Returns a reading that says whether it is exact: pages shared with a zygote count as an
        engine's own once that zygote died. Asked after the reading, because the zygote may have
        died during it."""
        is_exact = self._engines.was_forked_by_living_zygote(reading.ticket)
        return replace(reading, exact=is_exact)


def _living(trees: list[Tree]) -> set[int]:
    """Returns the living processes of engines and leases. Each takes 13 us to ask."""
    processes = (procfs.process(pid) for tree in trees for pid in tree.pids)
    return {process.pid for process in processes if process is not None and process.alive}


def _crash(task: asyncio.Future[None]) -> None:
    """Ends the agent when one of its tasks failed. Ray starts it anew, and it finds its engines
    again."""
    if not task.cancelled() and (error := task.exception()):
        logger.critical("the agent ends itself, to start anew: %r", error, exc_info=error)
        logging.shutdown()
        os._exit(os.EX_SOFTWARE)
