"""One actor per node: keeps the zygote alive, opens engines, measures them, reaps them.

It speaks of bytes only, and decides nothing: what to open comes from holders with a granted ticket,
what to reap from the arbiter. It kills only what it opened.
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

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.errors import TicketClosed
from arbiter.node import children, cleanup, procfs, spare_workers, zygote_client
from arbiter.node.children import Restarts
from arbiter.node.device_probe import NodeProbe
from arbiter.node.leased_processes import LeasedProcess, LeasedProcesses
from arbiter.node.reports import Reports
from arbiter.node.zygote_supervisor import ZygoteSupervisor
from arbiter.protocol import ray_internals, rpc
from arbiter.protocol.messages import AgentSettings, SpawnSpec
from arbiter.units import NodeId, TicketId

logger = logging.getLogger("arbiter.agent")

TURN_S = 1.0  # B1: within 2 s on the books
REAP_TURN_S = 0.25  # A10
LOOK_AGAIN_S = 0.005  # while its helpers end: a look takes about as long
RETRY_S = 0.02  # until the zygote's death is noticed, which takes a turn of the event loop


class NodeAgent:
    """Runs as a detached actor; plain enough to be driven without Ray in tests."""

    def __init__(self, node: NodeId, settings: AgentSettings, logs: str | None = None) -> None:
        self._node, self._settings = node, settings
        self._folder = zygote_client.folder(settings, node)
        log_folder = Path(logs) if logs else ray_internals.logs_folder()
        self._logs = cleanup.EngineLogs(log_folder)
        self._probe = NodeProbe(node, pkgutil.resolve_name(settings.gpus)())
        self._reports = Reports(node, self._probe.introduction, self._probe.gpu_pids)
        self._children = children.Children(self._folder)
        self._keeper = ZygoteSupervisor(
            settings,
            self._folder / "zygote.sock",
            log_folder / f"zygote-{node}.log",
            found=self._adopt,
            strays=self._kill_strays,
        )
        self._outsiders = LeasedProcesses()
        self._returned: list[TicketId] = []  # leases given back; said once what is left is foreign
        self._spawning: dict[TicketId, asyncio.Task[str]] = {}
        self._reaping: set[TicketId] = set()
        self._replacing = Restarts()
        self._heard = False  # whether the arbiter got the last reading
        self._stir = asyncio.Event()
        self._died = asyncio.Event()  # an engine's root
        self._forking = asyncio.Lock()  # from asking for a fork until it is in our charge
        self._closing = False
        if not settings.folder:  # else what lies beside is not ours to judge
            cleanup.sweep(self._folder)
        for ticket in self._children.recover(self._logs.keep):
            self._reports.note_ended(ticket)
        for child in self._children.by_ticket.values():
            self._watch(child)
        self._tasks: set[asyncio.Future[None]] = set()
        keep_spares = spare_workers.keep(settings.spares_count)
        for work in (self._turns(), self._bury_dead(), self._keeper.keep(), keep_spares):
            self._start(work)
        offers = {f.__name__: f for f in (self.spawn, self.respawn, self.reap, self.probe)}
        self._door = rpc.RpcServer(node, self._folder / "agent.sock", offers)

    def __repr__(self) -> str:
        return f"NodeAgent({self._node})"

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_crash)

    # -- called by holders and the arbiter -------------------------------------------------------

    async def spawn(self, ticket: TicketId, spec: SpawnSpec) -> str:
        """Socket path of the ticket's engine process, started when there is none. Raises
        TicketClosed after a reap, ZygoteError when no process could be started."""
        if self._children.is_buried(ticket) or self._closing:
            raise TicketClosed(ticket)
        if ticket in self._children.by_ticket:
            return str(self._children.socket(ticket))
        if ticket not in self._spawning:
            self._spawning[ticket] = asyncio.ensure_future(self._spawn(ticket, spec))
        return await asyncio.shield(self._spawning[ticket])

    async def respawn(self, ticket: TicketId, spec: SpawnSpec) -> str:
        """As `spawn`, in the place of the process that the ticket has (A14). Who asks again
        has another one. Raises TicketClosed when the ticket was reaped meanwhile, ZygoteError."""
        if child := self._children.by_ticket.get(ticket):
            end = self._replacing.begin(ticket)
            self._reaping.add(ticket)
            self._children.kill(child)
            self._died.set()
            await asyncio.shield(end)
        return await self.spawn(ticket, spec)

    async def reap(self, ticket: TicketId) -> None:
        """Kill what there is of the ticket's engine, let none start, report EngineGone. What runs
        under a lease is not killed, but watched until its bytes are back."""
        if outsider := self._outsiders.by_ticket.get(ticket):
            outsider.leaving = True
            self._stir.set()
            return
        self._children.bury(ticket)
        if ticket in self._children.by_ticket:
            self._reaping.add(ticket)
            self._children.kill(self._children.by_ticket[ticket])
            self._died.set()  # look for what else is of it while it dies
            # Its death is news by itself; a reading now would hold its memory map while it dies.
            asyncio.get_running_loop().call_later(REAP_TURN_S, self._stir.set)
            return
        if ticket not in self._spawning:  # else the spawn finds the tombstone
            self._reports.note_ended(ticket)
        self._keeper.announce()  # a spawn that waits for a zygote looks at the tombstones
        self._stir.set()

    async def adopt(
        self, ticket: TicketId, pid: int, granted: tuple[types.DeviceBytes, ...]
    ) -> None:
        """Measure this outside process under its lease from now on. Raises LeaseRefused."""
        opened = self._outsiders.open(ticket, pid, granted, self._not_theirs())
        if opened:
            self._watch_outsider(opened)
            self._stir.set()

    async def probe(self) -> None:
        """Send a reading now."""
        self._stir.set()

    async def living(self, pids: list[int]) -> dict[int, int]:
        """Start time of each of these processes that lives."""
        found = (procfs.process(pid) for pid in pids)
        return {p.pid: p.start_ticks for p in found if p is not None and p.alive}

    async def door(self) -> dict[str, str] | None:
        """Where the same calls are heard sooner, by whoever is on this node."""
        return await self._door.where()

    async def pids(self) -> dict[str, int]:
        """The zygote's and the agent's own, for status pages and fault tests."""
        return {"agent": os.getpid(), "zygote": self._keeper.known[0] if self._keeper.known else 0}

    async def engines(self) -> dict[str, list[int]]:
        """Living processes by ticket, root first; those of leases as well."""
        every: list[children.Child | LeasedProcess] = list(self._children.by_ticket.values())
        every += self._outsiders.by_ticket.values()
        return {
            c.ticket: sorted(c.members, key=lambda pid, root=c.pid: pid != root)  # type: ignore[misc]
            for c in every
        }

    async def close(self) -> None:
        """Kill every engine and the zygote; leaves nothing behind but logs."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        while self._children.by_ticket:
            self._settle(*await asyncio.to_thread(children.find_processes), kill_all=True)
            await asyncio.sleep(0.01)
        self._keeper.end()
        self._door.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- engines ---------------------------------------------------------------------------------

    async def _spawn(self, ticket: TicketId, spec: SpawnSpec) -> str:
        try:
            path = self._children.socket(ticket)
            equipped = zygote_client.equipped(spec, self._children.scratch(ticket))
            child = await self._fork(ticket, equipped, path)
        finally:
            del self._spawning[ticket]
        if child is None:
            self._children.bury(ticket)
            self._reports.note_ended(ticket)
            raise TicketClosed(ticket)
        self._watch(child)
        self._logs.link(ticket, path.with_suffix(".log"))
        if self._children.is_buried(ticket):
            self._reaping.add(ticket)
            self._children.kill(child)
            raise TicketClosed(ticket)
        return str(path)

    async def _fork(self, ticket: TicketId, spec: SpawnSpec, path: Path) -> children.Child | None:
        """By the next zygote when this one dies over it; whoever waits bounds the wait. None: it
        died at once. Raises ZygoteError when no zygote will start."""
        while True:
            if self._children.is_buried(ticket):
                self._reports.note_ended(ticket)
                raise TicketClosed(ticket)
            if not self._keeper.is_up:
                if self._keeper.trouble:
                    raise zygote_client.ZygoteError(self._keeper.trouble)
                await self._keeper.news.wait()
                continue
            try:
                async with self._forking:
                    pid = await self._keeper.zygote.spawn(ticket, spec, path)
                    return self._take_charge(ticket, pid, spec)
            except zygote_client.ZygoteError as error:
                if not error.is_away:
                    raise
                await asyncio.sleep(RETRY_S)

    def _take_charge(self, ticket: TicketId, pid: int, spec: SpawnSpec) -> children.Child | None:
        """One that died and was collected may have left its pid to another process. But that is
        no child of the zygote, which has forked nothing since: only we ask it, one at a time."""
        zygote = self._keeper.known
        child = self._children.open(ticket, pid, spec.devices, zygote=zygote)
        found = procfs.process(pid) if child else None
        if child and found and zygote and found.parent == zygote[0]:
            return child
        if child:
            self._children.forget(child)  # not ours to kill
        self._tidy(ticket)
        return None

    def _watch(self, child: children.Child) -> None:
        loop, fd = asyncio.get_running_loop(), child.fd

        def died() -> None:
            loop.remove_reader(fd)
            if child.ticket not in self._replacing:
                self._children.bury(child.ticket)
            self._reaping.add(child.ticket)
            self._see_dead(child)
            self._died.set()

        loop.add_reader(fd, died)

    def _not_theirs(self) -> set[int]:
        """The agent, its zygote and engines, and the Ray node that started them."""
        ours = {pid for child in self._children.by_ticket.values() for pid in child.members}
        zygote = {self._keeper.known[0]} if self._keeper.known else set()
        return ours | zygote | {os.getpid(), os.getppid()}

    def _watch_outsider(self, outsider: LeasedProcess) -> None:
        loop = asyncio.get_running_loop()

        def died() -> None:
            loop.remove_reader(outsider.fd)
            outsider.leaving = True
            self._reports.note_gone(outsider.ticket, bytes_back=False)
            self._died.set()

        loop.add_reader(outsider.fd, died)

    def _settle(
        self, looked_ns: int, everything: dict[int, procfs.Process], *, kill_all: bool = False
    ) -> None:
        """Kill what is left of dead and reaped engines; report those with nothing left."""
        for child in self._children.note(looked_ns, everything):
            if not child.members:
                self._end(child)
            elif kill_all or child.ticket in self._reaping:
                self._children.kill(child)
        for outsider in self._outsiders.note(looked_ns, everything, self._not_theirs()):
            self._forget_outsider(outsider)
            self._reports.note_ended(outsider.ticket, outsider.pid, *outsider.last_members)

    def _forget_outsider(self, outsider: LeasedProcess) -> None:
        asyncio.get_running_loop().remove_reader(outsider.fd)
        self._outsiders.forget(outsider)

    def _see_dead(self, child: children.Child) -> None:
        """Nothing can have been added to a whole one, so no look at all processes is needed."""
        if child.is_whole:
            self._children.see_dead(child)
            if not child.members:
                self._end(child)

    def _end(self, child: children.Child) -> None:
        """Nothing of it is left. That is said first; somebody may wait for its bytes."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(child.fd)
        self._children.forget(child)
        self._reaping.discard(child.ticket)
        if child.ticket in self._replacing and not self._children.is_buried(child.ticket):
            self._tidy(child.ticket)  # before the next one has its socket there
            return self._replacing.ended(child.ticket)
        self._children.bury(child.ticket)
        self._replacing.ended(child.ticket)
        pids = {child.pid, *child.last_members, *child.killed}
        self._reports.note_ended(child.ticket, *pids)
        self._start(self._reports.say_all_gone())
        loop.call_soon(self._tidy, child.ticket)

    def _tidy(self, ticket: TicketId) -> None:
        self._logs.keep(ticket, self._children.socket(ticket).with_suffix(".log"))
        self._children.unlink(ticket)

    # -- readings --------------------------------------------------------------------------------

    async def _turns(self) -> None:
        while True:
            self._stir.clear()
            self._settle(*await asyncio.to_thread(children.find_processes))
            self._reports.see_returned()
            await self._report()
            busy = self._reaping or self._reports.are_open or not self._heard
            try:
                async with asyncio.timeout(REAP_TURN_S if busy else TURN_S):
                    await self._stir.wait()
            except TimeoutError:
                continue

    async def _bury_dead(self) -> None:
        """As soon as one died, whatever a turn is doing: somebody may wait for its bytes."""
        while True:
            await self._died.wait()
            self._died.clear()
            turn_ends_s = time.monotonic() + REAP_TURN_S
            await self._see_reaped()
            while self._reaping and time.monotonic() < turn_ends_s:
                await asyncio.sleep(LOOK_AGAIN_S)
                await self._see_reaped()
            # A reading can wait: the next engine may be starting on what this one gave back.
            asyncio.get_running_loop().call_later(REAP_TURN_S, self._stir.set)

    async def _see_reaped(self) -> None:
        reaped = [c for t in self._reaping if (c := self._children.by_ticket.get(t))]
        if any(not child.is_whole for child in reaped) or self._outsiders.by_ticket:
            self._settle(*await asyncio.to_thread(children.find_processes))
        else:
            for child in reaped:
                self._see_dead(child)
        await self._reports.say_all_gone()

    async def _report(self) -> None:
        """Engines that went, at once, for somebody may wait for their bytes; then a reading."""
        await self._reports.say_all_gone()
        trees = self._children.trees() + self._outsiders.trees() + self._reports.trees()
        returned = self._returned
        readings = await asyncio.to_thread(self._probe.read, trees)
        engines = tuple(self._judged(e) for e in readings.engines)
        stalls = procfs.stalled_fraction()
        said = ev.Measured(self._node, readings.devices, engines, stalls, readings.unreadable)
        self._heard = await self._reports.say((said,))
        if self._heard:
            self._release_outsiders(readings.engines, returned)

    def _release_outsiders(
        self, engines: tuple[ev.EngineReading, ...], returned: list[TicketId]
    ) -> None:
        """Who gave its lease back is watched no more; and when a reading has counted as foreign
        what it keeps, its bytes are said to be back."""
        for ticket in returned:
            self._reports.note_gone(ticket, bytes_back=True)
        back = self._outsiders.given_back(engines)
        self._returned = [outsider.ticket for outsider in back]
        for outsider in back:
            self._forget_outsider(outsider)
        if returned or back:
            self._stir.set()

    def _judged(self, reading: ev.EngineReading) -> ev.EngineReading:
        """Pages shared with a zygote count as an engine's own once that zygote died. Asked after
        the reading, for it may have died during it."""
        child = self._children.by_ticket.get(reading.ticket)
        forked_by = child.zygote if child else None
        return replace(reading, exact=self._keeper.is_alive() and forked_by == self._keeper.known)

    # -- the zygote ------------------------------------------------------------------------------

    async def _adopt(self) -> None:
        """Children forked just before an earlier agent died, who left no note of them."""
        for row in await self._keeper.zygote.list():
            known = row.ticket in self._children.by_ticket or row.ticket in self._spawning
            if known:
                continue
            if child := self._children.open(row.ticket, row.pid, (), zygote=self._keeper.known):
                self._watch(child)

    def _kill_strays(self) -> None:
        """Forked by a zygote that died before it could say so: nobody knows their ticket."""
        self._children.refresh()
        known = {pid for c in self._children.by_ticket.values() for pid in c.members}
        children.kill_all(
            procfs.started_with(str(self._folder / "zygote.sock"), zygote_client.MARK) - known
        )


def _crash(task: asyncio.Future[None]) -> None:
    """Ray starts the agent anew, and it finds its engines again."""
    if not task.cancelled() and (error := task.exception()):
        logger.critical("the agent ends itself, to start anew: %r", error, exc_info=error)
        logging.shutdown()
        os._exit(os.EX_SOFTWARE)
