"""The arbiter as a Ray actor: named, detached, one per cluster. Its methods are the calls on the
wire; the rules are in arbiter.core.

Its calls carry the dataclasses of arbiter.core.events. A holder names the epoch that it believes
in, and gets StaleEpoch when that epoch is over.
"""

import asyncio
import contextlib
import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Compacted, EventKind, LogEvent
from arbiter.errors import StaleEpoch
from arbiter.node import zygote_client
from arbiter.protocol import messages, ray_internals, rpc
from arbiter.units import Epoch, Generation, HolderId, NodeId, TicketId, in_seconds

# A process that gets a handle of this actor imports this module: Ray wants its class. A starting
# replica does so while a request waits for its first token, so what only the arbiter's own process
# needs is imported where it is used; that is a tenth of a second.
if TYPE_CHECKING:
    from arbiter.core.reports.plan import PlanQuestion
    from arbiter.server.store import Store

logger = logging.getLogger("arbiter")


class ArbiterActor:
    """Answers the calls of holders, node agents and people. Every public method is called from
    other processes, by arbiter.client and by node agents."""

    def __init__(self, boot: messages.StartConfig) -> None:
        from arbiter import heap
        from arbiter.server import new_epoch
        from arbiter.server.configuration import LiveConfiguration
        from arbiter.server.egress import EgressBook
        from arbiter.server.holder_sessions import HolderSessions
        from arbiter.server.hours_clock import HoursClock
        from arbiter.server.job_book import JobBook
        from arbiter.server.lease_service import LeaseService
        from arbiter.server.node_agents import RayAgents
        from arbiter.server.node_watch import NodeWatch
        from arbiter.server.ray_metrics import export_forever
        from arbiter.server.state_path import default_path

        self._boot = boot
        path = Path(boot.state_file) if boot.state_file else default_path()
        self._store = self._open_store(path)
        chosen = self._store.configuration(boot.configuration)
        self._store.save_configuration(chosen)
        self._agents = RayAgents(boot.agent)
        self._tasks: set[asyncio.Future[None]] = set()
        jobs = JobBook(path)
        self._shell = new_epoch.begin(boot, chosen, self._store, jobs, self._agents, self._start)
        self._sessions = HolderSessions(self._shell, self._store, self._start)
        self._leases = LeaseService(self._shell, self._agents, self._store)
        self._egress = EgressBook(self._store, self._shell.tell)
        hours = HoursClock(self._shell.feed)
        self._configuration = LiveConfiguration(
            chosen, self._shell, self._store, hours, self._begin_anew
        )
        self._configuration.begin()
        self._tell_start()
        self._configuration.restore_registered()
        self._leases.restore()
        self._rpc = self._serve_rpc()
        self._watch = NodeWatch(
            self._shell,
            self._agents,
            self._store,
            self._leases.sweep,
            hours,
            boot.usage_looks_count,
        )
        self._start(self._watch.watch_nodes())
        self._start(self._watch.keep())
        self._start(export_forever(self._shell.samples))
        self._start(heap.trim_forever())

    def __repr__(self) -> str:
        return f"Arbiter({self._boot.configuration.settings.evict})"

    def _open_store(self, path: Path) -> "Store":
        """Locks and opens the state file. Raises StateFileInUse where another system has it."""
        from arbiter.server import state_lock
        from arbiter.server.store import Store

        session = ray_internals.session_name()
        self._state_lock = state_lock.hold(path, session)
        ray_internals.note_state_file(path)  # where a reader finds it though this process hangs
        return Store(path, session)

    def _serve_rpc(self) -> rpc.RpcServer:
        """Serves holders and the agent of this node over a socket."""
        node = ray_internals.own_node()
        ours = self.acquire, self.grow, self.tell, self.renew, self.listen
        agents = self.report, self.check_grant, self.lease, self.end_lease
        offers: rpc.Offers = {f.__name__: f for f in (*ours, *agents)}
        return rpc.RpcServer(
            node, zygote_client.folder(self._boot.agent, node) / "arbiter.sock", offers
        )

    def _tell_start(self) -> None:
        if self._store.trouble:
            self._tell_trouble(self._store.trouble)
        self._store.on_trouble = self._tell_trouble
        self._agents.on_end = self._tell_agent_ended
        aside = str(self._store.moved_aside) if self._store.moved_aside else None
        members_count = len(self._store.members())
        self._shell.tell(
            LogEvent(EventKind.ARBITER_STARTED, {"holders": members_count, "broken_state": aside})
        )

    def _tell_trouble(self, why: str) -> None:
        self._shell.tell(LogEvent(EventKind.STATE_NOT_KEPT, {"cause": why}))

    def _tell_agent_ended(self, node: NodeId, cause: str) -> None:
        self._shell.tell(LogEvent(EventKind.AGENT_ENDED, {"node": node, "cause": cause}))

    # -- holders -------------------------------------------------------------------------------

    async def hello(self) -> messages.Plain:
        """Answers the version handshake in plain values only, whatever code the caller runs."""
        return {
            "identity": messages.identity(),
            "epoch": int(self._shell.epoch),
            "holders": len(self._shell.holders),
            "rpc_address": await self._rpc.address(),
        }

    async def join(
        self,
        joined: ev.Joined,
        session_id: str,
        handles: list[Any],
        refs: list[Any],
    ) -> messages.JoinReply:
        """Takes a holder with all its tickets into this epoch. `handles`: the holder's own actor,
        if it is one. `refs`: its pending call of `keepalive(session_id)`. Both are in lists, so
        that Ray passes them on instead of waiting for them."""
        self._sessions.join(joined, session_id, handles, refs)
        chosen = self._configuration.current
        return messages.JoinReply(self._shell.epoch, chosen.table, chosen.settings.timeouts)

    async def keepalive(self, session_id: str) -> None:
        """Waits until this joining of a holder is over, whichever of the two calls came first. The
        holder owns the result of this call, so Ray tells the arbiter that the holder died by losing
        that result."""
        await self._sessions.ended(session_id)

    async def acquire(self, epoch: Epoch, requested: ev.Requested) -> messages.Granted:
        """Waits for a grant. Raises RequestError. A cancelled call withdraws the ticket."""
        self._sessions.check(epoch, requested.holder)
        return await self._shell.acquire(requested)

    async def grow(self, epoch: Epoch, holder: HolderId, event: ev.GrowthAsked) -> messages.Granted:
        """Waits for more bytes for a resident model. Raises GrowthRefused, NeverFits,
        TicketClosed."""
        self._sessions.check(epoch, holder)
        return await self._shell.grow(replace(event, holder=holder))

    async def tell(self, epoch: Epoch, holder: HolderId, event: ev.Event) -> None:
        """Takes an event of a holder that waits for no answer."""
        self._sessions.check(epoch, holder)
        match event:
            case ev.Withdrawn():
                self._shell.withdraw(replace(event, holder=holder))
            case ev.Released():
                self._shell.feed(replace(event, holder=holder))
            case ev.GrowthAsked():
                self._shell.withdraw_growth(replace(event, holder=holder))
            case ev.HolderLost():
                self._sessions.lost(holder)
            case _:
                self._shell.feed(event)

    async def renew(self, epoch: Epoch, renewed: ev.Renewed) -> Epoch:
        """Takes a heartbeat, and returns the epoch. Raises StaleEpoch: the holder must join
        again."""
        self._sessions.check(epoch, renewed.holder)
        self._sessions.check_mail(epoch, renewed.holder)  # refused, its counts are sent again
        self._shell.feed(renewed)
        if not self._shell.core.has_joined(renewed.holder):  # it was silent, and counted as dead
            self._sessions.lost(renewed.holder)
            raise StaleEpoch(epoch, self._shell.epoch)
        return self._shell.epoch

    async def listen(
        self, holder: HolderId, epoch: Epoch, ack: int
    ) -> tuple[messages.SequencedCommand, ...]:
        """Returns the commands after `ack` as soon as there is one; none after LISTEN_S without
        any. Raises StaleEpoch: the holder must join again."""
        self._sessions.check(epoch, holder)
        self._sessions.check_mail(epoch, holder)
        return await self._shell.listen(holder, ack)

    # -- nodes ---------------------------------------------------------------------------------

    async def report(
        self, node: NodeId, epoch: Epoch | None, events: tuple[ev.Event, ...]
    ) -> Epoch:
        """Takes the events of a node agent. The events of an agent that believes in another epoch
        are dropped: it introduces its node first."""
        if epoch == self._shell.epoch:
            for event in events:
                self._shell.feed(event)
        return self._shell.epoch

    async def check_grant(self, node: NodeId, ticket: TicketId) -> types.GrantCheck:
        """Tells a node agent whether it may spawn an engine under this ticket (A3)."""
        self._shell.calls_count += 1
        return self._shell.core.check_grant(ticket, node)

    # -- outside processes ---------------------------------------------------------------------

    async def lease(self, call: messages.LeaseCall) -> messages.LeaseState:
        """Asks for a lease, beats for it, and waits for news of it. Raises RequestError."""
        return await self._leases.update(call)

    async def end_lease(self, lease: str, tenant: str) -> None:
        """Ends a lease, because its holder has given the memory back. A repeated call does nothing.
        Raises UnknownLease."""
        self._leases.give_back(lease, tenant)

    async def free(self, call: messages.LeaseCall, is_kept: bool) -> messages.Plain:
        """Frees what is idle for a lease (A15). `is_kept`: no process beats for it. Says what left
        and what stays, as it was when the lease was first asked for, and how the lease is now.
        Raises RequestError."""
        return await self._leases.free(call, is_kept=is_kept)

    async def clean_leases(self) -> list[TicketId]:
        """Ends leases with missed heartbeats now, before they lapse."""
        return self._leases.clean()

    # -- remotes (fronts of older versions call these two by their names) -----------------------

    async def leave(self, egress: messages.Egress) -> messages.DaySpent:
        """Reserves a request's price and writes it down before it leaves. Repeated: once. Raises
        RemoteBudgetSpent, EgressRefused: then nothing may leave."""
        return self._egress.reserve(egress)

    async def left(self, end: messages.EgressEnd) -> messages.DaySpent:
        """Settles the price of a request that has ended. Repeated: once. Raises EgressUnsettled."""
        return self._egress.settle(end)

    async def spending(self) -> list[messages.Plain]:
        """Returns what tenants have spent at remotes today (UTC)."""
        return self._egress.today()

    # -- people --------------------------------------------------------------------------------

    async def configure(self, configuration: messages.Configuration) -> None:
        """Takes the table that the front read from its file. An unchanged file takes back no
        change made at runtime since (C12)."""
        self._configuration.configure(configuration)

    async def change_settings(
        self, configuration: messages.Configuration, of: Generation
    ) -> Generation:
        """Changes the settings at runtime, if they are still of that generation; kept across
        restarts. Returns the new generation. Raises SettingsConflict. Repeated, it is done once."""
        return self._configuration.change(configuration, of)

    async def record(self, path: str | None, of: Epoch) -> None:
        """Begins the next epoch now, and records its events and those of later epochs in the file
        `path`; None: ends the recording. `of`: the epoch that the caller knows. A repeated call is
        done once, because its answer may be lost as this process ends."""
        is_done = self._store.recording() == path
        if is_done and (path is None or of < self._shell.epoch):
            return
        self._store.save_recording(path)
        self._begin_anew("recording" if path else "no longer recording")

    def _begin_anew(self, why: str) -> None:
        """Ends this process; the next has another epoch, and holders rejoin."""
        from arbiter.server.shell import crash

        logger.info("a new epoch begins: %s", why)
        self._watch.save_all()
        reply_is_out_s = 0.05  # the answer to the call that led here is a local send
        asyncio.get_running_loop().call_later(reply_is_out_s, crash, InterruptedError(why))

    async def register(self, capability: types.CapabilitySpec) -> None:
        """Adds a capability from Python, which lasts until `unregister`, over changes of the table
        and restarts (A2). Raises CapabilityConflict, UnknownRole; ValueError for hours that cannot
        be read."""
        self._configuration.register(capability)

    async def unregister(self, capability: str) -> None:
        """Removes a capability that was registered from Python; its models leave once they are
        idle. Raises UnknownCapability for a name that was not registered from Python, or is no
        longer: also when a call is sent again whose answer was lost."""
        self._configuration.unregister(capability)

    async def unload(self, ticket: TicketId) -> None:
        """Unloads a model by hand; a model in use stays."""
        self._shell.feed(ev.UnloadAsked(ticket))

    async def raise_priority(self, ticket: TicketId, priority: types.Priority) -> None:
        """Raises the priority of a queued ticket by hand. Raises UnknownTicket, TicketNotQueued."""
        self._shell.feed(ev.PriorityRaised(ticket, priority))

    async def cancel(self, ticket: TicketId) -> None:
        """Refuses a queued ticket, by hand. Raises UnknownTicket, TicketNotQueued."""
        self._shell.feed(ev.CancelAsked(ticket))

    async def set_floor(self, capability: str, model: str, floor: types.Floor) -> None:
        """Sets the floor of a model, which is kept across restarts. Raises UnknownCapability,
        UnknownModel."""
        self._shell.feed(ev.FloorSet(capability, model, floor))
        self._store.save_floors(self._shell.core.export_floors())

    async def load(self, capability: str, model: str) -> None:
        """Loads a model by hand, without a request; what has not begun is kept across restarts.
        Raises UnknownCapability, UnknownModel, NotResident, OutsideHours."""
        self._shell.feed(ev.LoadAsked(capability, model))
        self._watch.save_asked()

    async def compact(
        self, request: str, models: tuple[types.ModelName, ...], wait_s: float
    ) -> Compacted:
        """Frees the named idle models and loads them again, or all that hold more than they need
        (D7). Returns what came of it, or after `wait_s` how far it has come. Raises
        UnknownCapability, UnknownModel."""
        return await self._shell.compact(ev.CompactAsked(request, models), wait_s)

    async def resize(self, command: messages.Resize) -> None:
        """Changes a model's size by hand; a resident that cannot change its size goes on as it is,
        and the event log tells why (A14)."""
        self._shell.command_all(command)

    async def push_pressure(self, pushed: ev.PressurePushed) -> None:
        """Takes from a person or program that memory is short (C5)."""
        self._shell.feed(pushed)

    async def drop_host_copy(self, key: str) -> bool:
        """Drops a copy of models' files on each node that has it (D8). False: it leaves with the
        last engine that has it open. Raises UnknownHostCopy, ArbiterUnavailable."""
        return await self._agents.drop_host_copy(key, self._shell.core.nodes_with_copy(key))

    async def remove_tenant(self, tenant: str) -> None:
        """Erases what its requests left in the pool of every node (E6). An agent that is away now
        is told when it appears, also by the next epoch."""
        from arbiter.core.residency.slabs import TOLD_AGAIN

        now, lately_s = time.time(), in_seconds(TOLD_AGAIN)
        removed = self._store.removed_tenants()
        lately = {name: at for name, at in removed.items() if now - at < lately_s}
        self._store.save_removed_tenants({**lately, tenant: now})
        self._shell.feed(ev.TenantRemoved(tenant))

    async def state(self) -> messages.Plain:
        """Returns what `arbiter status` shows, with the table."""
        now = self._configuration.current
        chosen = {"policy": now.settings.evict, "table": now.table, "generation": now.generation}
        return {**self._shell.snapshot(), **chosen}

    async def metrics(self) -> messages.Plain:
        """Returns the value of every metric, in plain values (K2)."""
        from arbiter.metrics.series import to_plain

        return to_plain(self._shell.samples())

    async def explain(self, ticket: TicketId) -> messages.Plain:
        """Returns why a ticket waits, or why it went. Raises UnknownTicket."""
        return self._shell.explain(ticket)

    async def plan(self, question: "PlanQuestion") -> messages.Plain:
        """Returns what a request would bring about, and changes nothing. Raises UnknownCapability,
        UnknownModel."""
        return self._shell.plan(question)

    async def events(self, after_seq: int, wait_s: float) -> list[messages.Plain]:
        """Returns the lines of the event log after a number; without any it waits for one, for
        `wait_s` at most."""
        return await self._shell.log.after(after_seq, wait_s)

    async def replicas(self, version: int, wait_s: float) -> tuple[int, dict[str, int]]:
        """Returns the replicas wanted of each capability, and the version of this answer. Waits for
        another than `version`, for `wait_s` at most."""
        return await self._shell.replicas(version, wait_s)

    async def pid(self) -> int:
        """Returns the pid of this process."""
        return os.getpid()

    async def nodes(self) -> messages.Plain:
        """Returns each living node, and whether engines start there as fast as they can."""
        return await self._agents.readiness()

    async def table(self) -> messages.Plain:
        """Returns the table that another arbiter is to be started with, in plain values: that one
        may be of other code, in which a pickled object would be read without an error, and
        wrong."""
        return self._configuration.current.table

    async def close(self, wait_s: float) -> int:
        """Grants nothing more, unloads what is idle, and waits for the rest; then ends all agents
        and with them every engine. Returns how many tickets were still open after the wait."""
        self._shell.feed(ev.ClosingDown())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self._shell.open_tickets:
                    await asyncio.sleep(0.02)
        open_tickets = self._shell.open_tickets
        for task in self._tasks:
            task.cancel()
        await self._agents.close()
        self._watch.save_all()
        self._rpc.close()
        self._store.end_session()
        self._store.close()
        self._shell.close_files()
        if self._state_lock is not None:
            os.close(self._state_lock)
            self._state_lock = None
        return open_tickets

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            from arbiter.server.shell import crash

            crash(error)
