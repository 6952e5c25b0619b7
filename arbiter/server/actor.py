"""The arbiter as a Ray actor: named, detached, one per cluster. Wire and watches; no rules.

Its calls carry the dataclasses of arbiter.events; whoever holds tickets says in which epoch it
believes, and hears StaleEpoch when that is over.
"""

import asyncio
import contextlib
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import LogEvent
from arbiter.errors import SettingsConflict, StaleEpoch
from arbiter.node import zygote_client
from arbiter.protocol import messages, ray_internals, rpc
from arbiter.units import Epoch, Generation, HolderId, NodeId, TicketId

# Whoever gets a handle of this actor imports this module: Ray wants its class. A replica that
# starts does so while somebody waits for its first token, so what only the arbiter's own process
# needs is imported where it is used; that is a tenth of a second.
if TYPE_CHECKING:
    from arbiter.server.event_log import EventLog
    from arbiter.server.recording import Recorder, RecordingHeader
    from arbiter.server.shell import Shell

logger = logging.getLogger("arbiter")

ACCOUNTS_SAVED_LOOKS = 10  # that much of the accounts a crash costs; 100 kB are written each time
HANDLE_S = 10.0  # a holder's actor answers its first call within its own start


class ArbiterActor:
    """Everything public here is the wire; see arbiter.client.holder for who calls what."""

    def __init__(self, boot: messages.StartConfig) -> None:
        from arbiter.server.event_log import EventLog
        from arbiter.server.lease_service import LeaseService
        from arbiter.server.node_agents import RayAgents
        from arbiter.server.store import Store, default_path

        self._boot = boot
        path = Path(boot.state_file) if boot.state_file else default_path()
        self._store = Store(path, ray_internals.session_name())
        self._configuration = self._store.configuration() or boot.configuration.numbered(1)
        self._store.save_configuration(self._configuration)
        epoch = self._store.next_epoch()
        self._agents = RayAgents(boot.agent)
        log = EventLog(epoch, Path(boot.event_file) if boot.event_file else None)
        self._shell = self._new_shell(epoch, log)
        self._looks_count = 0
        self._stays: dict[HolderId, str] = {}  # the joining that counts, of each holder
        self._ends: dict[str, asyncio.Event] = {}  # of a stay
        self._leases = LeaseService(self._shell, self._agents, self._store)
        self._learned_saved = self._shell.core.export_learned()
        self._shell.feed(self._configuration.capabilities)
        self._tell_start()
        self._tasks: set[asyncio.Future[None]] = set()
        self._door = self._open_door()
        self._start(self._look())

    def __repr__(self) -> str:
        return f"Arbiter({self._boot.configuration.settings.evict})"

    def _new_shell(self, epoch: Epoch, log: "EventLog") -> "Shell":
        """Its core is made from a heading, so that a recording of this life begins as it did."""
        from arbiter.server.recording import RecordingHeader
        from arbiter.server.shell import Shell, monotonic

        chosen = self._configuration
        known = tuple(sorted(member.holder for member in self._store.members()))
        heading = RecordingHeader(
            messages.protocol_hash(),
            chosen.settings,
            epoch,
            known,
            self._store.learned(),
            monotonic(),
            self._store.floors(),
            self._store.accounts(),
        )
        core = heading.core(chosen.policies)
        return Shell(core, epoch, self._agents, log, recorder=self._recorder(heading, log))

    def _recorder(self, heading: "RecordingHeader", log: "EventLog") -> "Recorder | None":
        """A file that cannot be written costs the recording, not the arbiter."""
        from arbiter.server.recording import Recorder

        path = self._store.recording()
        if path is None:
            return None
        try:
            return Recorder(Path(path), heading)
        except OSError as error:
            log.tell(LogEvent("not_recorded", {"cause": str(error)}))
            return None

    def _open_door(self) -> rpc.RpcServer:
        """For holders and the agent of this node."""
        node = ray_internals.own_node()
        ours = self.acquire, self.grow, self.tell, self.renew, self.listen, self.report
        offers: rpc.Offers = {f.__name__: f for f in ours}
        return rpc.RpcServer(
            node, zygote_client.folder(self._boot.agent, node) / "arbiter.sock", offers
        )

    def _tell_start(self) -> None:
        if self._store.trouble:
            self._tell_trouble(self._store.trouble)
        self._store.on_trouble = self._tell_trouble
        self._agents.on_end = self._tell_agent_ended
        aside = str(self._store.moved_aside) if self._store.moved_aside else None
        known = len(self._store.members())
        self._shell.log.tell(LogEvent("arbiter_started", {"holders": known, "broken_state": aside}))

    def _tell_trouble(self, why: str) -> None:
        self._shell.log.tell(LogEvent("state_not_kept", {"cause": why}))

    def _tell_agent_ended(self, node: NodeId, cause: str) -> None:
        self._shell.log.tell(LogEvent("agent_ended", {"node": node, "cause": cause}))

    # -- holders -------------------------------------------------------------------------------

    async def hello(self) -> messages.Plain:
        """For the version handshake: plain values only, whatever code the caller runs."""
        return {
            "identity": messages.identity(),
            "epoch": int(self._shell.epoch),
            "holders": len(self._shell.holders),
            "door": await self._door.where(),
        }

    async def join(
        self, epoch: Epoch | None, joined: ev.Joined, stay: str, handles: list[Any], refs: list[Any]
    ) -> messages.JoinReply:
        """`handles`: the holder's own actor, if it is one. `refs`: its pending call of
        `keepalive(stay)`; both in lists, so that Ray passes them on instead of waiting for them."""
        from arbiter.server.store import Member

        self._shell.calls_count += 1
        holder = joined.holder
        self._store.add_member(Member(holder, joined.node, joined.pid, joined.start_ticks))
        self._shell.open_mail(holder)
        before, self._stays[holder] = self._stays.get(holder), stay
        if before:
            self._end_of(before).set()
        self._start(self._watch(holder, stay, handles, refs))
        self._shell.feed(joined)
        return messages.JoinReply(
            self._shell.epoch,
            messages.package_version(),
            self._configuration.table,
            self._configuration.settings.timeouts,
        )

    async def keepalive(self, stay: str) -> None:
        """The caller owns its result, so that losing the result is its death. Returns when that
        joining is over, whichever of the two calls came first."""
        try:
            await self._end_of(stay).wait()
        finally:
            self._ends.pop(stay, None)

    def _end_of(self, stay: str) -> asyncio.Event:
        return self._ends.setdefault(stay, asyncio.Event())

    async def acquire(self, epoch: Epoch, requested: ev.Requested) -> messages.Granted:
        """Waits for a grant. Raises RequestError; cancelled: the ticket is withdrawn."""
        self._check(epoch, requested.holder)
        return await self._shell.acquire(requested)

    async def grow(self, epoch: Epoch, holder: HolderId, event: ev.GrowthAsked) -> messages.Granted:
        """Waits for more for a resident. Raises GrowthRefused, NeverFits, TicketClosed."""
        self._check(epoch, holder)
        return await self._shell.grow(replace(event, holder=holder))

    async def tell(self, epoch: Epoch, holder: HolderId, event: ev.Event) -> None:
        self._check(epoch, holder)
        match event:
            case ev.Withdrawn():
                self._shell.withdrawn(replace(event, holder=holder))
            case ev.Released():
                self._shell.feed(replace(event, holder=holder))
            case ev.GrowthAsked():
                self._shell.growth_withdrawn(event)
            case ev.HolderLost():
                self._lost(event.holder)
            case _:
                self._shell.feed(event)

    async def renew(self, epoch: Epoch, renewed: ev.Renewed) -> Epoch:
        self._check(epoch, renewed.holder)
        self._shell.feed(renewed)
        if not self._shell.core.has_joined(renewed.holder):  # it was silent, and counted as dead
            self._lost(renewed.holder)
            raise StaleEpoch(epoch, self._shell.epoch)
        return self._shell.epoch

    async def listen(
        self, holder: HolderId, epoch: Epoch, ack: int
    ) -> tuple[messages.SequencedCommand, ...]:
        """Orders after `ack`; empty when none came for a while. Raises StaleEpoch: rejoin."""
        self._check(epoch, holder)
        return await self._shell.listen(holder, ack)

    def _check(self, epoch: Epoch, holder: HolderId) -> None:
        self._shell.calls_count += 1
        if epoch != self._shell.epoch or not self._shell.has_mail(holder):
            raise StaleEpoch(epoch, self._shell.epoch)

    async def _watch(
        self, holder: HolderId, stay: str, handles: list[Any], refs: list[Any]
    ) -> None:
        """Ends when the holder's process does: in 10-25 ms if its actor was called once, because
        that subscribes us to the actor's state, else in 2 s."""
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            async with asyncio.timeout(HANDLE_S):
                for handle in handles:
                    await handle.__ray_ready__.remote()
        if await ray_internals.owner_died(refs[0]) and self._stays.get(holder) == stay:
            self._lost(holder)

    def _lost(self, holder: HolderId) -> None:
        if stay := self._stays.pop(holder, None):
            self._end_of(stay).set()
        self._store.drop_holder(holder)
        self._shell.close_mail(holder)
        self._shell.feed(ev.HolderLost(holder))

    # -- nodes ---------------------------------------------------------------------------------

    async def report(self, node: NodeId, epoch: Epoch | None, said: tuple[ev.Event, ...]) -> Epoch:
        """From a node agent. Nothing is heard of one that believes in another epoch: it
        introduces itself first."""
        if epoch == self._shell.epoch:
            for event in said:
                self._shell.feed(event)
        return self._shell.epoch

    async def _look(self) -> None:
        from arbiter.server.node_agents import LOOK_S

        while True:
            try:
                await self._agents.look(self._shell.feed)
                await self._bury_awaited()
            except ray.exceptions.RayError as error:
                logger.warning("cannot see the nodes: %r", error)
            self._save_learned()
            self._looks_count += 1
            if self._looks_count % ACCOUNTS_SAVED_LOOKS == 0:
                self._save_accounts()
            self._leases.sweep()
            self._shell.refresh_targets()
            await asyncio.sleep(LOOK_S)

    async def _bury_awaited(self) -> None:
        """Who died while there was no arbiter to see it is not waited for. Who lives and is only
        slow keeps its engines, and its place in the file."""
        awaited = self._shell.core.awaited
        members = [m for m in self._store.members() if m.holder in awaited] if awaited else []
        if self._shell.core.gave_up_waiting:
            dead = [m.holder for m in members]  # waited for in vain: the next life need not
        else:
            dead = await self._agents.dead(members)
        for holder in dead:
            if holder in self._shell.core.awaited:  # not back meanwhile, under the same name
                self._store.drop_holder(holder)
                self._shell.feed(ev.HolderLost(holder))

    def _save_accounts(self) -> None:
        self._store.save_accounts(self._shell.core.export_accounts())

    def _save_learned(self) -> None:
        learned = self._shell.core.export_learned()
        if learned != self._learned_saved:
            self._store.save_learned(learned)
            self._learned_saved = learned

    # -- outside processes ---------------------------------------------------------------------

    async def lease(self, call: messages.LeaseCall) -> messages.LeaseState:
        """Asks for a lease, beats for it, and waits for news of it. Raises RequestError."""
        return await self._leases.hear(call)

    async def end_lease(self, lease: str, tenant: str) -> None:
        """Its holder has let go. Repeated: nothing. Raises UnknownLease."""
        self._leases.give_back(lease, tenant)

    async def clean_leases(self) -> list[TicketId]:
        """End those whose holder has missed its heartbeats, without waiting any longer."""
        return self._leases.clean()

    # -- people --------------------------------------------------------------------------------

    async def configure(self, configuration: messages.Configuration) -> None:
        """As the front reads it from its file. A file that says what it said before takes back no
        change made at runtime since (C12)."""
        if configuration.table != self._configuration.written:
            self._choose(configuration.numbered(self._configuration.generation + 1))

    async def change_settings(self, wanted: messages.Configuration, of: Generation) -> Generation:
        """At runtime, if the settings are still of that generation; kept across restarts. Returns
        the new one. Raises SettingsConflict. Said twice, it is done once."""
        now = self._configuration
        if now.table == wanted.table and now.generation == of + 1:
            return now.generation
        if now.generation != of:
            raise SettingsConflict(of, now.generation)
        self._choose(replace(wanted, written=now.written, generation=Generation(of + 1)))
        return self._configuration.generation

    def _choose(self, configuration: messages.Configuration) -> None:
        """Takes effect at once; other settings or policies begin a new epoch, in which holders
        rejoin with everything they hold."""
        old, self._configuration = self._configuration, configuration
        self._store.save_configuration(configuration)
        self._shell.feed(configuration.capabilities)
        self._store.save_floors(self._shell.core.export_floors())  # what was removed has none
        self._shell.order_all(messages.ConfigChanged(configuration.table))
        if (old.settings, old.policies) != (configuration.settings, configuration.policies):
            self._begin_anew("settings changed")

    async def record(self, path: str | None) -> None:
        """Every event from the next epoch on, which begins now; None: no longer."""
        self._store.save_recording(path)
        self._begin_anew("recording" if path else "no longer recording")

    def _begin_anew(self, why: str) -> None:
        """End this process; the next has another epoch, and holders rejoin."""
        from arbiter.server.shell import crash

        logger.info("a new epoch begins: %s", why)
        self._save_accounts()
        reply_is_out_s = 0.05  # the answer to the call that led here is a local send
        asyncio.get_running_loop().call_later(reply_is_out_s, crash, InterruptedError(why))

    async def register(self, capability: types.CapabilitySpec) -> None:
        """Adds a capability from Python. Raises CapabilityConflict."""
        self._shell.feed(ev.CapabilityRegistered(capability))

    async def unload(self, ticket: TicketId) -> None:
        """By hand; one in use stays."""
        self._shell.feed(ev.UnloadAsked(ticket))

    async def set_floor(self, capability: str, model: str, floor: types.Floor) -> None:
        """Kept across restarts. Raises UnknownCapability, UnknownModel."""
        self._shell.feed(ev.FloorSet(capability, model, floor))
        self._store.save_floors(self._shell.core.export_floors())

    async def load(self, capability: str, model: str) -> None:
        """By hand, with nobody waiting. Raises UnknownCapability, UnknownModel, NotResident."""
        self._shell.feed(ev.LoadAsked(capability, model))

    async def resize(self, order: messages.Resize) -> None:
        """By hand; one that cannot goes on as it is, which the events say (A14)."""
        self._shell.order_all(order)

    async def push_pressure(self, pushed: ev.PressurePushed) -> None:
        """Somebody knows that memory is short (C5)."""
        self._shell.feed(pushed)

    async def state(self) -> messages.Plain:
        now = self._configuration
        chosen = {"policy": now.settings.evict, "table": now.table, "generation": now.generation}
        return {**self._shell.snapshot(), **chosen}

    async def explain(self, ticket: TicketId) -> messages.Plain:
        """Why it waits, or why it went. Raises UnknownTicket."""
        return self._shell.explain(ticket)

    async def events(self, after_seq: int, wait_s: float) -> list[messages.Plain]:
        return await self._shell.log.after(after_seq, wait_s)

    async def replicas(self, version: int, wait_s: float) -> tuple[int, dict[str, int]]:
        return await self._shell.replicas(version, wait_s)

    async def pid(self) -> int:
        return os.getpid()

    async def table(self) -> messages.Plain:
        """What another arbiter is to be started with, in plain values: it may be of other code,
        in which a pickled object would be read without an error, and wrong."""
        return self._configuration.table

    async def close(self, wait_s: float) -> int:
        """Grant nothing more, unload what is idle, wait for the rest; then end all agents and
        with them every engine. Returns how many tickets were still open at the end of the wait."""
        self._shell.feed(ev.ClosingDown())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self._shell.open_tickets:
                    await asyncio.sleep(0.02)
        left = self._shell.open_tickets
        for task in self._tasks:
            task.cancel()
        await self._agents.close()
        self._save_learned()
        self._save_accounts()
        self._door.close()
        self._store.end_session()
        self._store.close()
        return left

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            from arbiter.server.shell import crash

            crash(error)
