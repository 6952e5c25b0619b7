"""One actor per node: keeps the zygote alive, opens engines, measures them, reaps them.

It speaks of bytes only, and decides nothing: what to open comes from holders with a granted ticket,
what to reap from the arbiter. It kills only what it opened.
"""

import asyncio
import logging
import os
import shutil
from pathlib import Path

import ray

from arbiter import children, proc, rays, zygotes
from arbiter import events as ev
from arbiter.errors import TicketClosed
from arbiter.probe import NodeProbe, find_gpus
from arbiter.units import Epoch, NodeId, TicketId
from arbiter.wire import NAME, NAMESPACE, AgentSettings, SpawnSpec

logger = logging.getLogger("arbiter.agent")

TURN_S = 1.0  # SPEC B1: within 2 s on the books
REAP_TURN_S = 0.25  # SPEC A10
REPORT_S = 5.0  # an arbiter slower than its own reading bound is as good as away
BACKOFF_FIRST_S, BACKOFF_MOST_S = 0.1, 5.0  # between starts of a zygote that will not stay up
RETRY_S = 0.02  # until the zygote's death is noticed, which takes a turn of the event loop
EX_SOFTWARE = 70  # sysexits.h
PINGS_MISSED = 3  # a zygote that answers none of these, seconds apart, is hung


class NodeAgent:
    """Runs as a detached actor; plain enough to be driven without Ray in tests."""

    def __init__(self, node: NodeId, settings: AgentSettings, logs: str | None = None) -> None:
        self._node, self._settings = node, settings
        self._folder = zygotes.private_folder(_folder(settings, node))
        self._logs = Path(logs) if logs else rays.logs_folder()
        self._probe = NodeProbe(node, find_gpus())
        self._children = children.Children(self._folder)
        self._zygote = zygotes.Zygote(self._folder / "zygote.sock")
        self._zygote_known: tuple[int, int] | None = None  # pid and start time
        self._zygote_up = asyncio.Event()
        self._spawning: dict[TicketId, asyncio.Task[str]] = {}
        self._reaping: set[TicketId] = set()
        self._gone: dict[TicketId, ev.EngineGone] = {}  # not yet said
        self._returning: dict[TicketId, set[int]] = {}  # dead, but NVML still lists these pids
        self._epoch: Epoch | None = None
        self._heard = False  # whether the arbiter got the last reading
        self._stir = asyncio.Event()
        self._closing = False
        for ticket in self._children.recover():
            self._say_gone(ticket)
        for child in self._children.by_ticket.values():
            self._watch(child)
        self._tasks = [asyncio.ensure_future(self._turns()), asyncio.ensure_future(self._keep())]
        for task in self._tasks:
            task.add_done_callback(_crash)

    def __repr__(self) -> str:
        return f"NodeAgent({self._node})"

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

    async def reap(self, ticket: TicketId) -> None:
        """Kill what there is of the ticket's engine, let none start, report EngineGone."""
        self._children.bury(ticket)
        if ticket in self._children.by_ticket:
            self._reaping.add(ticket)
            self._children.kill(self._children.by_ticket[ticket])
        elif ticket not in self._spawning:  # else the spawn finds the tombstone
            self._say_gone(ticket)
        self._stir.set()

    async def probe(self) -> None:
        """Send a reading now."""
        self._stir.set()

    async def pids(self) -> dict[str, int]:
        """The zygote's and the agent's own, for status pages and fault tests."""
        return {"agent": os.getpid(), "zygote": self._zygote_known[0] if self._zygote_known else 0}

    async def engines(self) -> dict[str, list[int]]:
        """Living processes by ticket, root first."""
        return {
            c.ticket: sorted(c.members, key=lambda pid, root=c.pid: pid != root)  # type: ignore[misc]
            for c in self._children.by_ticket.values()
        }

    async def close(self) -> None:
        """Kill every engine and the zygote; leaves nothing behind but logs."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        while self._children.by_ticket:
            self._settle(*await asyncio.to_thread(children.look), kill_all=True)
            await asyncio.sleep(0.01)
        if self._zygote_known:
            children.kill_known([self._zygote_known])
        self._zygote.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- engines ---------------------------------------------------------------------------------

    async def _spawn(self, ticket: TicketId, spec: SpawnSpec) -> str:
        try:
            path = self._children.socket(ticket)
            pid = await self._fork(ticket, self._with_devices(spec), path)
            child = self._children.open(ticket, pid, spec.devices)
            if child and not await self._is_listed(child):
                self._children.forget(child)  # died, and its pid may be another's: not ours to kill
                child = None
        finally:
            del self._spawning[ticket]
        if child is None:
            self._children.bury(ticket)
            self._say_gone(ticket)
            raise TicketClosed(ticket)
        self._watch(child)
        self._link_log(child)
        if self._children.is_buried(ticket):
            self._reaping.add(ticket)
            self._children.kill(child)
            raise TicketClosed(ticket)
        return str(path)

    async def _fork(self, ticket: TicketId, spec: SpawnSpec, path: Path) -> int:
        """By the next zygote when this one dies over it; whoever waits bounds the wait."""
        while True:
            await self._zygote_up.wait()
            if self._children.is_buried(ticket):
                raise TicketClosed(ticket)
            try:
                return await self._zygote.spawn(ticket, spec, path)
            except zygotes.ZygoteError as error:
                if not error.is_away:
                    raise
                await asyncio.sleep(RETRY_S)

    async def _is_listed(self, child: children.Child) -> bool:
        """The zygote drops a child from its list when it collects it; until then no other process
        can have its pid."""
        rows = await self._zygote.list()
        return any(r.ticket == child.ticket and r.pid == child.pid for r in rows)

    def _with_devices(self, spec: SpawnSpec) -> SpawnSpec:
        """The engine sees the GPUs of its ticket and no others, from its first instruction on."""
        ids = [d.device.rsplit("gpu:", 1)[1] for d in spec.devices if "gpu:" in d.device]
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(ids)} if ids else {}
        return SpawnSpec(spec.entry, spec.config, spec.devices, spec.env | visible)

    def _watch(self, child: children.Child) -> None:
        loop, fd = asyncio.get_running_loop(), child.fd

        def died() -> None:
            loop.remove_reader(fd)
            self._children.bury(child.ticket)
            self._reaping.add(child.ticket)
            self._stir.set()

        loop.add_reader(fd, died)

    def _link_log(self, child: children.Child) -> None:
        """Under Ray's log folder the dashboard shows it."""
        link = self._logs / f"engine-{child.ticket}.log"
        if not link.is_symlink():
            link.symlink_to(child.socket.with_suffix(".log"))

    def _keep_log(self, child: children.Child) -> None:
        """The engine is gone; what it wrote stays where people look."""
        written = child.socket.with_suffix(".log")
        if written.exists():
            link = self._logs / f"engine-{child.ticket}.log"
            link.unlink(missing_ok=True)
            shutil.move(written, link)

    def _settle(
        self, looked_ns: int, everything: dict[int, proc.Process], *, kill_all: bool = False
    ) -> None:
        """Kill what is left of dead and reaped engines; report those with nothing left."""
        for child in self._children.note(looked_ns, everything):
            if not child.members:
                asyncio.get_running_loop().remove_reader(child.fd)
                self._children.forget(child)
                self._keep_log(child)
                self._children.bury(child.ticket)
                self._reaping.discard(child.ticket)
                self._say_gone(child.ticket, child.pid)
            elif kill_all or child.ticket in self._reaping:
                self._children.kill(child)

    def _say_gone(self, ticket: TicketId, *pids: int) -> None:
        still_listed = self._probe.gpu_pids() & set(pids)
        if still_listed:
            self._returning[ticket] = still_listed
        self._gone[ticket] = ev.EngineGone(self._node, ticket, bytes_back=not still_listed)

    def _see_returned(self) -> None:
        """Bytes of dead engines count as back when NVML no longer lists their processes."""
        listed = self._probe.gpu_pids() if self._returning else set()
        for ticket in [t for t, pids in self._returning.items() if not pids & listed]:
            del self._returning[ticket]
            self._gone[ticket] = ev.EngineGone(self._node, ticket, bytes_back=True)

    # -- readings --------------------------------------------------------------------------------

    async def _turns(self) -> None:
        while True:
            self._stir.clear()
            self._settle(*await asyncio.to_thread(children.look))
            self._see_returned()
            await self._report()
            busy = self._reaping or self._returning or self._gone or not self._heard
            try:
                async with asyncio.timeout(REAP_TURN_S if busy else TURN_S):
                    await self._stir.wait()
            except TimeoutError:
                continue

    async def _report(self) -> None:
        """Engines that went, at once, for somebody may wait for their bytes; then a reading."""
        await self._say_all_gone()
        readings = await asyncio.to_thread(self._probe.read, self._children.trees())
        said = (ev.Measured(self._node, readings.devices, readings.engines),)
        self._heard = await self._send(said)

    async def _say_all_gone(self) -> None:
        """Kept for the next turn if nobody hears it."""
        gone = dict(self._gone)
        if gone and await self._send(tuple(gone.values())):
            for ticket, event in gone.items():
                if self._gone.get(ticket) == event:
                    del self._gone[ticket]

    async def _send(self, said: tuple[ev.Event, ...]) -> bool:
        """Whether the arbiter heard it. A new life of the arbiter hears of the node first."""
        try:
            arbiter = ray.get_actor(NAME, namespace=NAMESPACE)
            async with asyncio.timeout(REPORT_S):
                epoch = await arbiter.report.remote(self._node, self._epoch, said)
                if epoch != self._epoch:
                    self._epoch = epoch
                    seen = ev.NodeSeen(self._node, self._probe.inventory())
                    await arbiter.report.remote(self._node, epoch, (seen, *said))
        except (ray.exceptions.RayError, ValueError, TimeoutError):
            return False  # away; the next turn says it again
        return True

    # -- the zygote ------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """A zygote that answers, always; one that died or hangs is replaced."""
        backoff_s = BACKOFF_FIRST_S
        while True:
            try:
                await self._find_or_start()
                backoff_s = BACKOFF_FIRST_S
                await self._stays_up()
            except (zygotes.ZygoteError, OSError) as error:
                logger.warning("%s; next try in %.1f s", error, backoff_s)
            self._zygote_up.clear()
            self._kill_hung()
            await asyncio.sleep(backoff_s)
            backoff_s = min(BACKOFF_MOST_S, 2 * backoff_s)

    async def _find_or_start(self) -> None:
        try:
            pid = await self._zygote.ping(zygotes.IMPORTS_S)  # found while it still imports
        except zygotes.ZygoteError:
            self._kill_strays()
            log = self._logs / f"zygote-{self._node}.log"
            await asyncio.to_thread(
                zygotes.start, self._settings, self._folder / "zygote.sock", log
            )
            pid = await self._first_ping()
        found = proc.process(pid)
        self._zygote_known = (pid, found.start_ticks) if found else None
        await self._adopt()
        self._zygote_up.set()

    async def _first_ping(self) -> int:
        """It binds its socket before its imports and answers after them."""
        async with asyncio.timeout(zygotes.IMPORTS_S):
            while True:
                try:
                    return await self._zygote.ping(zygotes.IMPORTS_S)
                except zygotes.ZygoteError:
                    await asyncio.sleep(0.02)

    async def _adopt(self) -> None:
        """Children forked just before an earlier agent died, who left no note of them."""
        for row in await self._zygote.list():
            known = row.ticket in self._children.by_ticket or row.ticket in self._spawning
            if not known and (child := self._children.open(row.ticket, row.pid, ())):
                self._watch(child)

    async def _stays_up(self) -> None:
        """Returns when it is dead or hung."""
        assert self._zygote_known is not None
        died = asyncio.Event()
        fd = os.pidfd_open(self._zygote_known[0])
        loop = asyncio.get_running_loop()
        loop.add_reader(fd, died.set)
        try:
            missed = 0
            while missed < PINGS_MISSED and not died.is_set():
                try:
                    async with asyncio.timeout(TURN_S):
                        await died.wait()
                except TimeoutError:
                    missed = 0 if await self._answers() else missed + 1
        finally:
            loop.remove_reader(fd)
            os.close(fd)

    async def _answers(self) -> bool:
        try:
            await self._zygote.ping()
        except zygotes.ZygoteError:
            return False
        return True

    def _kill_strays(self) -> None:
        """Forked by a zygote that died before it could say so: nobody knows their ticket."""
        self._children.refresh()
        known = {pid for c in self._children.by_ticket.values() for pid in c.members}
        for pid in proc.started_with(str(self._folder / "zygote.sock")) - known:
            if found := proc.process(pid):
                children.kill_known([(pid, found.start_ticks)])

    def _kill_hung(self) -> None:
        self._zygote.close()
        if self._zygote_known:
            children.kill_known([self._zygote_known])
            self._zygote_known = None


def _folder(settings: AgentSettings, node: NodeId) -> Path:
    """Every step of the way must be ours alone, or a stranger could put another in its place."""
    if settings.folder:
        return Path(settings.folder)
    return zygotes.private_folder(Path(f"/tmp/arbiter-{os.getuid()}")) / node


def _crash(task: asyncio.Task[None]) -> None:
    """Ray starts the agent anew, and it finds its engines again."""
    if not task.cancelled() and (error := task.exception()):
        logger.critical("the agent ends itself, to start anew: %r", error, exc_info=error)
        logging.shutdown()
        os._exit(EX_SOFTWARE)
