"""The engine processes of a node: spawned under granted tickets, replaced, killed, and seen to end.

A node agent kills only what it spawned. What it says of an end goes to the arbiter by `Reports`.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from arbiter.errors import ArbiterUnavailable, TicketClosed, TicketNotGranted
from arbiter.node import children, procfs, zygote_client
from arbiter.node.children import Restarts
from arbiter.node.cleanup import EngineLogs
from arbiter.node.host_copies import HostCopies
from arbiter.node.lending_socket import LendingSocket
from arbiter.node.pool import Pool
from arbiter.node.reports import Reports
from arbiter.node.zygote_supervisor import ZygoteSupervisor
from arbiter.protocol.messages import AgentSettings, SlabRequest, Spawned, SpawnSpec
from arbiter.units import DeviceId, Span, TicketId

LOOK_AGAIN_S = 0.005  # while helpers of a killed engine end: a look takes about as long
OVERWRITE_S = 2.0  # of some GiB; after it an engine is lent a new slab, and begins without KV
DEAD_WRITER_S = 5.0  # helpers of a dead engine die with it, unless the machine is overloaded
RETRY_S = 0.02  # until the zygote's death is noticed, which takes a turn of the event loop


class EngineProcesses:
    """Spawns and ends engines. `start` runs a coroutine as a task of the agent; `uuids` names this
    node's GPUs; `pool` lends the slabs, `copies` the files of models in host RAM."""

    def __init__(
        self,
        settings: AgentSettings,
        folder: Path,
        zygote_log: Path,
        logs: EngineLogs,
        reports: Reports,
        start: Callable[[Coroutine[Any, Any, None]], None],
        uuids: Callable[[], Mapping[DeviceId, str]],
        pool: Pool,
        copies: HostCopies,
    ) -> None:
        self.children = children.Children(folder)
        self.supervisor = ZygoteSupervisor(
            settings,
            folder / "zygote.sock",
            zygote_log,
            on_found=self._adopt,
            kill_orphans=self._kill_orphans,
        )
        self.died = asyncio.Event()  # the root of an engine did, or was killed
        self.is_closing = False
        self._folder, self._logs, self._reports, self._start = folder, logs, reports, start
        self._uuids, self._pool, self._copies = uuids, pool, copies
        self._slab_socket = LendingSocket(folder / "slabs.sock", pool.lent)
        start(self._slab_socket.serve())
        self._spawning: dict[TicketId, asyncio.Task[Spawned]] = {}
        self._forked: set[TicketId] = set()  # those of them that may have a process by now
        self._killed: set[TicketId] = set()  # something of them may still live
        self._restarts = Restarts()
        self._forking = asyncio.Lock()  # from asking for a fork until its child is known

    def recover(self) -> None:
        """Finds the engines of an earlier life of the agent, and reports those that ended."""
        for ticket in self.children.recover(self._logs.keep):
            self._reports.note_ended(ticket)
        for child in self.children.by_ticket.values():
            self._watch(child)
        self._recover_lent(set(self.children.by_ticket))

    def _recover_lent(self, tickets: set[TicketId]) -> None:
        """Finds the slabs and copies again that these engines have open."""
        for child in self.children.refresh():
            if child.ticket in tickets:
                self._recover_of(child.ticket, child.members)

    def _recover_of(self, ticket: TicketId, pids: Iterable[int]) -> None:
        """Finds the slabs and copies that these processes of a ticket have open."""
        self._pool.recover(ticket, pids)
        self._copies.recover(ticket, pids)

    @property
    def are_ending(self) -> bool:
        """Says whether something that was killed has not been seen to end."""
        return bool(self._killed)

    def own_pids(self) -> set[int]:
        """Returns the zygote and all processes of engines."""
        pids = {pid for child in self.children.by_ticket.values() for pid in child.members}
        return pids | self.supervisor.pids

    # -- spawning --------------------------------------------------------------------------------

    async def spawn(self, ticket: TicketId, spec: SpawnSpec) -> Spawned:
        """Spawns as `NodeAgent.spawn` has it."""
        self._check_open(ticket)
        return await self._spawn_once(ticket, spec, is_confirmed=False)

    async def respawn(self, ticket: TicketId, spec: SpawnSpec) -> Spawned:
        """Respawns as `NodeAgent.respawn` has it. Asks the arbiter once, while the process still
        lives: an arbiter that ends after its answer does not cost the model."""
        self._check_open(ticket)
        await self._reports.confirm(ticket)
        if child := self.children.by_ticket.get(ticket):
            end = self._restarts.begin(ticket)
            self._kill(child)
            self.died.set()
            await asyncio.shield(end)
        self._check_open(ticket)
        return await self._spawn_once(ticket, spec, is_confirmed=True)

    async def _spawn_once(
        self, ticket: TicketId, spec: SpawnSpec, *, is_confirmed: bool
    ) -> Spawned:
        """Spawns the ticket's process, unless it is there already or another call spawns it."""
        if ticket in self.children.by_ticket:
            return Spawned(str(self.children.socket(ticket)), Span(0))
        if ticket not in self._spawning:
            spawning = self._spawn(ticket, spec, is_confirmed=is_confirmed)
            self._spawning[ticket] = asyncio.ensure_future(spawning)
        return await asyncio.shield(self._spawning[ticket])

    def _check_open(self, ticket: TicketId) -> None:
        """Raises TicketClosed for a ticket under which no engine may start any more."""
        if self.children.may_not_start(ticket) or self.is_closing:
            raise TicketClosed(ticket)

    async def _spawn(self, ticket: TicketId, spec: SpawnSpec, *, is_confirmed: bool) -> Spawned:
        """Spawns the ticket's engine: asks the arbiter unless that is done, lends it slabs and a
        copy of its model's files, and has the zygote fork it. Raises what `spawn` raises."""
        try:
            if not is_confirmed:
                await self._confirm(ticket)
            path = self.children.socket(ticket)
            scratch = self.children.scratch(ticket)
            equipped = zygote_client.equipped(spec, scratch, self._uuids())
            equipped = await self._with_slabs(ticket, equipped)
            began_ns = time.monotonic_ns()
            equipped = await self._with_copy(ticket, equipped)
            await self._wait_for_zygote(ticket)
            waited = Span(time.monotonic_ns() - began_ns)
            child = await self._fork(ticket, equipped, path)
        finally:
            del self._spawning[ticket]
            self._forked.discard(ticket)
            if ticket not in self.children.by_ticket:
                self._take_back(ticket)
        if child is None:
            self.children.forbid_start(ticket)
            self._reports.note_ended(ticket)
            raise TicketClosed(ticket)
        self._watch(child)
        self._logs.link(ticket, path.with_suffix(".log"))
        if self.children.may_not_start(ticket):
            self._kill(child)
            raise TicketClosed(ticket)
        return Spawned(str(path), waited)

    async def _with_slabs(self, ticket: TicketId, spec: SpawnSpec) -> SpawnSpec:
        """Tells the engine where it is handed the slabs that it asked for, as far as there is a
        pool, and where files with more rows are."""
        slabs: dict[str, dict[str, Any]] = {}
        for request in spec.slabs:
            await self._wait_for_dead_writers(request)
            await self._pool.overwritten(request, OVERWRITE_S)
            if self._pool.lend(ticket, request) is not None:
                file = self._pool.file_for(request)
                slabs[request.content] = {
                    "socket": str(self._slab_socket.path),
                    "ticket": ticket,
                    **({"file": file} if file else {}),
                    **({"caps": dict(request.caps)} if request.caps else {}),
                }
        return replace(spec, config=spec.config | {"slabs": slabs}) if slabs else spec

    async def _with_copy(self, ticket: TicketId, spec: SpawnSpec) -> SpawnSpec:
        """Tells the engine where it is handed the copy of its model's files, if there is one."""
        lent = await self._copies.lend(ticket, spec.copy) if spec.copy else None
        return replace(spec, config=spec.config | {"copy": lent}) if lent else spec

    def _take_back(self, ticket: TicketId) -> None:
        """Takes back what was lent to the engine of a ticket."""
        self._pool.take_back(ticket)
        self._copies.take_back(ticket)

    async def _wait_for_dead_writers(self, request: SlabRequest) -> None:
        """Waits until the dead writers of such slabs have ended altogether, DEAD_WRITER_S at most.
        An engine that has just been killed gives its slab back once no process of it is left, which
        takes milliseconds, and the engine that takes its place is to find that slab."""
        ends_s = time.monotonic() + DEAD_WRITER_S
        while time.monotonic() < ends_s:
            writers = [self.children.by_ticket.get(t) for t in self._pool.writers(request)]
            if all(w is None or children.lives(w.pid, w.start_ticks) for w in writers):
                return
            self.collect_dead(*await asyncio.to_thread(children.find_processes))
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _confirm(self, ticket: TicketId) -> None:
        """Asks the arbiter whether it granted the ticket. Raises what `Reports.confirm` raises, and
        TicketClosed when the ticket was killed meanwhile."""
        try:
            await self._reports.confirm(ticket)
        except (TicketNotGranted, TicketClosed, ArbiterUnavailable):
            self._end_if_killed(ticket)
            raise
        self._end_if_killed(ticket)

    def _end_if_killed(self, ticket: TicketId) -> None:
        """Reports the end of a ticket that was killed: `kill` leaves that to a spawn that may have
        forked. Raises TicketClosed."""
        if self.children.may_not_start(ticket):
            self._reports.note_ended(ticket)
            raise TicketClosed(ticket)

    async def _wait_for_zygote(self, ticket: TicketId) -> None:
        """Waits for a zygote with its imports done. Raises ZygoteError when none will start,
        TicketClosed when the ticket was killed."""
        self._end_if_killed(ticket)
        while not self.supervisor.is_up:
            if self.supervisor.trouble:
                raise zygote_client.ZygoteError(self.supervisor.trouble)
            await self.supervisor.news.wait()
            self._end_if_killed(ticket)

    async def _fork(self, ticket: TicketId, spec: SpawnSpec, path: Path) -> children.Child | None:
        """Has the zygote fork a child, or the next zygote when this one dies over it; the caller
        bounds the wait. None: the child died at once. Raises what `_wait_for_zygote` raises,
        OSError where this process has no descriptors left for it."""
        while True:
            await self._wait_for_zygote(ticket)
            self._forked.add(ticket)
            try:
                async with self._forking:
                    with children.kept_descriptors():
                        pid = await self.supervisor.zygote.spawn(ticket, spec, path)
                    return self._adopt_child(ticket, pid, spec)
            except zygote_client.ZygoteError as error:
                if not error.is_away:
                    raise
                await asyncio.sleep(RETRY_S)

    def _adopt_child(self, ticket: TicketId, pid: int, spec: SpawnSpec) -> children.Child | None:
        """Opens a child that was just forked; None: it is dead. A child that died and was collected
        may have left its pid to another process. But that is no child of the zygote, which has
        forked nothing since: only we ask it, one at a time."""
        zygote = self.supervisor.process
        child = self.children.open(ticket, pid, spec.devices, zygote=zygote)
        process = procfs.process(pid) if child else None
        if child and process and zygote and process.parent == zygote[0]:
            return child
        if child:
            self.children.forget(child)  # not ours to kill
        self._tidy(ticket)
        return None

    # -- ending ----------------------------------------------------------------------------------

    def kill(self, ticket: TicketId) -> bool:
        """Lets no engine start under the ticket, and kills what there is of it. True: its death
        will be seen; False: there was no process."""
        self.children.forbid_start(ticket)
        if child := self.children.by_ticket.get(ticket):
            self._kill(child)
            self.died.set()  # look for what else is of it while it dies
            return True
        if ticket not in self._forked:  # what a spawn waits for may take long, and forks nothing
            self._reports.note_ended(ticket)
        self.supervisor.announce()  # a spawn that waits for a zygote looks again
        return False

    def _kill(self, child: children.Child) -> None:
        """Kills an engine, and notes that its end is to be seen."""
        self._killed.add(child.ticket)
        self.children.kill(child)

    def _watch(self, child: children.Child) -> None:
        """Has the death of an engine's root process noticed as soon as the kernel tells of it."""
        loop, fd = asyncio.get_running_loop(), child.fd

        def on_death() -> None:
            loop.remove_reader(fd)
            if child.ticket not in self._restarts:
                self.children.forbid_start(child.ticket)
            self._killed.add(child.ticket)
            self._end_if_dead(child)
            self.died.set()

        loop.add_reader(fd, on_death)

    def collect_dead(
        self, looked_ns: int, all_processes: dict[int, procfs.Process], *, kill_all: bool = False
    ) -> None:
        """Kills what is left of dead and killed engines; reports those with nothing left."""
        for child in self.children.note(looked_ns, all_processes):
            if not child.members:
                self._end(child)
            elif kill_all or child.ticket in self._killed:
                self.children.kill(child)

    def check_killed(self) -> bool:
        """Looks again at the known processes of killed engines, and ends those of which none is
        left. False: some may have processes that only a look at all processes finds."""
        killed = [c for t in self._killed if (c := self.children.by_ticket.get(t))]
        if any(not child.tree_is_final for child in killed):
            return False
        for child in killed:
            self._end_if_dead(child)
        return True

    def _end_if_dead(self, child: children.Child) -> None:
        """Drops the dead members of an engine whose tree is final, and ends the engine where none
        is left."""
        if child.tree_is_final:
            self.children.drop_dead_members(child)
            if not child.members:
                self._end(child)

    def _end(self, child: children.Child) -> None:
        """Forgets a child of which nothing is left, and reports that. It says so first, because a
        request may wait for its bytes."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(child.fd)
        self.children.forget(child)
        self._take_back(child.ticket)
        self._killed.discard(child.ticket)
        if child.ticket in self._restarts and not self.children.may_not_start(child.ticket):
            self._tidy(child.ticket)  # before the next process has its socket there
            return self._restarts.ended(child.ticket)
        self.children.forbid_start(child.ticket)
        self._restarts.ended(child.ticket)
        self._reports.note_ended(child.ticket, child.pid, *child.last_members, *child.killed)
        self._start(self._reports.send_ends())
        loop.call_soon(self._tidy, child.ticket)

    def _tidy(self, ticket: TicketId) -> None:
        self._logs.keep(ticket, self.children.socket(ticket).with_suffix(".log"))
        self.children.unlink(ticket)

    async def close(self) -> None:
        """Kills every engine and the zygote."""
        while self.children.by_ticket:
            self.collect_dead(*await asyncio.to_thread(children.find_processes), kill_all=True)
            await asyncio.sleep(LOOK_AGAIN_S)
        self._slab_socket.close()
        self.supervisor.end()

    # -- the zygote ------------------------------------------------------------------------------

    def was_forked_by_living_zygote(self, ticket: TicketId) -> bool:
        """Says whether the zygote that forked the engine of a ticket still lives, so that pages
        shared with it do not count as the engine's."""
        child = self.children.by_ticket.get(ticket)
        forked_by = child.zygote if child else None
        return self.supervisor.is_alive() and forked_by == self.supervisor.process

    async def _adopt(self) -> None:
        """Watches children that were forked just before an earlier agent died: it left no note of
        them. Kills those whose ticket was killed before they were found. What is spawned again just
        now is found by its spawn, which the zygote answers with this process."""
        adopted: set[TicketId] = set()
        for row in await self.supervisor.zygote.list():
            if row.ticket in self.children.by_ticket:
                continue
            if row.ticket in self._spawning:
                self._recover_of(row.ticket, (row.pid,))
                continue
            if child := self.children.open(row.ticket, row.pid, (), zygote=self.supervisor.process):
                self._watch(child)
                adopted.add(child.ticket)
        self._recover_lent(adopted)
        for ticket in filter(self.children.may_not_start, adopted):
            self.kill(ticket)

    def _kill_orphans(self) -> None:
        """Kills the orphans: a zygote forked them and died before it could say so, and no ticket
        names them."""
        self.children.refresh()
        pids = {pid for c in self.children.by_ticket.values() for pid in c.members}
        children.kill_all(
            procfs.started_with(str(self._folder / "zygote.sock"), zygote_client.MARK) - pids
        )
