"""The shell around the core, without Ray: clock, timer, futures, commands, subscribers.

Nothing between reading an event and finishing `handle` awaits, so every decision is atomic. A bug
in the core ends the process: books that broke are rebuilt from holders and measurement, never
repaired in place.
"""

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import NoReturn, Protocol

from arbiter.core import events as ev
from arbiter.core.arbiter import Arbiter
from arbiter.core.decisions import (
    Compacted,
    Decision,
    DropDrafter,
    DropSlabs,
    DropTenant,
    ForgetTenant,
    Grant,
    KillEngine,
    LoadModel,
    LogEvent,
    OutgoingDecision,
    PurgeCaches,
    Queued,
    Refuse,
    RequestReading,
    Revoke,
    SetTimer,
    WarmPrefixes,
    WithdrawLoad,
)
from arbiter.core.reports.plan import PlanQuestion
from arbiter.errors import RequestError, TicketClosed
from arbiter.metrics.counters import Counters
from arbiter.metrics.samples import Source, samples_of
from arbiter.metrics.series import Samples
from arbiter.protocol import messages
from arbiter.protocol.json_codec import plain
from arbiter.server.day_replays import DayReplays
from arbiter.server.event_log import EventLog
from arbiter.server.job_book import JobBook
from arbiter.server.recording import Recorder
from arbiter.server.status_log import StatusLog
from arbiter.units import Bytes, Epoch, HolderId, Instant, NodeId, Span, TicketId

logger = logging.getLogger("arbiter")

LISTEN_S = 30.0  # an idle long poll comes back this often; measured idle cost is nothing
EX_SOFTWARE = 70  # sysexits.h


def monotonic() -> Instant:
    """Returns the present instant of this host's monotonic clock."""
    return Instant(time.monotonic_ns())


class Agents(Protocol):
    """Names the messages to node agents. A lost message is repeated by the core."""

    def kill(self, node: NodeId, ticket: TicketId) -> None: ...
    def probe(self, node: NodeId) -> None: ...
    def drop_slabs(self, node: NodeId, owner: str) -> None: ...
    def drop_tenant(self, node: NodeId, tenant: str, ago: Span) -> None: ...


# A queued ticket brings its holder one estimate of the wait and a held model one revoke at a time,
# and a holder acknowledges within one round trip. So a holder whose mailbox has this many commands
# more than the whole queue may hold tickets does not read them.
COMMANDS_BESIDE_QUEUE_COUNT = 1_000


class Mailbox:
    """Keeps a holder's commands until they are acknowledged, at most `most_count`. A mailbox that
    is full keeps none, and its holder must rejoin, which tells it everything anew."""

    def __init__(self, most_count: int) -> None:
        self._most_count = most_count
        self._commands: deque[messages.SequencedCommand] = deque()
        self._sequence = 0
        self._has_commands = asyncio.Event()
        self.must_rejoin = False

    def put(self, command: messages.Command) -> None:
        """Keeps a command. A full mailbox keeps none."""
        if len(self._commands) >= self._most_count:
            self.must_rejoin = True
            self._commands.clear()
        if self.must_rejoin:
            return
        self._sequence += 1
        self._commands.append(messages.SequencedCommand(self._sequence, command))
        self._has_commands.set()

    async def after(self, ack: int, wait_s: float) -> tuple[messages.SequencedCommand, ...]:
        """Drops the commands up to `ack` and returns the others. Without any it waits for one, for
        `wait_s` seconds at most, and then returns none."""
        while self._commands and self._commands[0].sequence <= ack:
            self._commands.popleft()
        if not self._commands:
            self._has_commands.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._has_commands.wait()
            except TimeoutError:
                return ()
        return tuple(self._commands)


def crash(error: BaseException) -> NoReturn:
    """Ends the process, so that Ray starts the next epoch."""
    logger.critical("the arbiter ends itself, to start anew: %r", error, exc_info=error)
    logging.shutdown()
    os._exit(EX_SOFTWARE)


class _CrashOnBug(AbstractContextManager["_CrashOnBug", None]):
    """Lets a RequestError out, because a caller can act on it. Any other error raised inside is a
    bug, after which the books may be half written, and ends the process."""

    def __init__(self, crash: Callable[[BaseException], NoReturn]) -> None:
        self._crash = crash

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if error is not None and not isinstance(error, RequestError):
            self._crash(error)


class Shell:
    """Feeds events to the core, one at a time, and performs the decisions of each."""

    def __init__(
        self,
        core: Arbiter,
        epoch: Epoch,
        agents: Agents,
        log: EventLog,
        *,
        recorder: Recorder | None = None,
        day: DayReplays | None = None,
        jobs: JobBook | None = None,
        statuses: StatusLog | None = None,
        clock: Callable[[], Instant] = monotonic,
        crash: Callable[[BaseException], NoReturn] = crash,
    ) -> None:
        self.core, self.epoch, self.log = core, epoch, log
        self.calls_count = 0  # messages received, which the benchmarks of the protocol count
        self.counters = Counters()
        self._agents, self._clock, self._crash = agents, clock, crash
        self._recorder, self._day, self._jobs = recorder, day, jobs
        self._statuses = statuses
        self._answers: dict[TicketId, asyncio.Future[messages.Granted]] = {}  # that calls wait for
        self._callers: dict[TicketId, int] = {}  # how many calls wait for each
        self._compacting: dict[str, asyncio.Future[Compacted]] = {}  # by request
        self._mail: dict[HolderId, Mailbox] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: Instant | None = None
        self._targets: dict[str, int] = {}
        self._targets_version = 0
        self._targets_changed = asyncio.Event()

    # -- events --------------------------------------------------------------------------------

    def feed(self, event: ev.Event) -> None:
        """Has the core handle an event, and performs its decisions. Raises RequestError when the
        core refuses; any other error of the core ends the process."""
        with _CrashOnBug(self._crash):
            for decision in self._decide(event):
                self._perform(decision)
            self.refresh_targets()

    def _decide(self, event: ev.Event) -> list[Decision]:
        """Returns the core's decisions on an event; records both, where a recording is on."""
        now = self._clock()
        if self._recorder:
            self._recorder.event(event, now)
        decisions = self.core.handle(event, now)
        if self._recorder:
            self._recorder.decided(decisions)
        if self._day:
            self._day.note(event, now, decisions)
        return decisions

    def _perform(self, decision: Decision) -> None:
        match decision:
            case LogEvent():
                self.tell(decision)
            case SetTimer(at):
                self._set_timer(at)
            case Compacted():
                self._compacted(decision)
            case _:
                self._send(decision)

    def tell(self, event: LogEvent) -> None:
        """Writes one line of the event log, and counts it."""
        self.counters.note(event)
        self.log.tell(event)
        if self._statuses:
            self._statuses.note(event.kind)

    def close_files(self) -> None:
        """Closes the event log's file, and the recording, which ends with it."""
        self.log.close()
        if self._recorder:
            self._recorder.close()

    def tell_jobs(self) -> None:
        """Tells of the jobs that were accepted, have begun or have ended since the last call."""
        for event in self._jobs.changes() if self._jobs else ():
            self.tell(event)

    def _send(self, decision: OutgoingDecision) -> None:
        """Performs a decision that concerns a holder or a node agent."""
        match decision:
            case Grant():
                self._grant(decision)
            case Refuse(ticket, error):
                self._answer(ticket, error)
            case Revoke():
                self._revoke(decision)
            case KillEngine(node, ticket):
                self._agents.kill(node, ticket)
            case DropSlabs() | DropTenant():
                self._erase(decision)
            case RequestReading(node):
                self._agents.probe(node)
            case (
                Queued()
                | LoadModel()
                | WithdrawLoad()
                | DropDrafter()
                | PurgeCaches()
                | ForgetTenant()
                | WarmPrefixes()
            ):
                self._command(decision.holder, _as_command(decision))

    def _erase(self, decision: DropSlabs | DropTenant) -> None:
        match decision:
            case DropSlabs(node, owner):
                self._agents.drop_slabs(node, owner)
            case DropTenant(node, tenant, ago):
                self._agents.drop_tenant(node, tenant, ago)

    # -- tickets -------------------------------------------------------------------------------

    async def acquire(self, requested: ev.Requested) -> messages.Granted:
        """Waits for the answer. The same ticket asked again shares it; when the last asker is
        cancelled the ticket is withdrawn."""
        ticket = requested.ticket
        with self._waiting(ticket) as answer:
            try:
                self.feed(requested)
                return await asyncio.shield(answer)
            except asyncio.CancelledError:
                if self._callers[ticket] == 1 and not answer.done():
                    self.feed(ev.Withdrawn(ticket, requested.holder))
                raise

    async def grow(self, event: ev.GrowthAsked) -> messages.Granted:
        """Asks for more memory for a resident model and waits for the answer. Refused, the model
        goes on as it is; when the last asker is cancelled the wish is withdrawn. Raises what the
        core refuses with."""
        with self._waiting(event.ticket) as answer:
            try:
                self.feed(event)
                return await asyncio.shield(answer)
            except asyncio.CancelledError:
                if self._callers[event.ticket] == 1:
                    self.feed(replace(event, more_bytes=Bytes(0)))
                raise

    @contextmanager
    def _waiting(self, ticket: TicketId) -> Iterator[asyncio.Future[messages.Granted]]:
        """Gives a call the answer that it shares with all calls that wait for a ticket, and forgets
        it with the last of them."""
        answer = self._answers.setdefault(ticket, asyncio.get_running_loop().create_future())
        self._callers[ticket] = self._callers.get(ticket, 0) + 1
        try:
            yield answer
        finally:
            self._callers[ticket] -= 1
            if not self._callers[ticket]:
                del self._callers[ticket]
                if self._answers.get(ticket) is answer:
                    del self._answers[ticket]

    async def compact(self, event: ev.CompactAsked, wait_s: float) -> Compacted:
        """Waits until all is freed and loaded again; after `wait_s` it returns how far that has
        come. The same request asked again shares the answer. Raises UnknownCapability,
        UnknownModel."""
        loop = asyncio.get_running_loop()
        answer = self._compacting.setdefault(event.request, loop.create_future())
        try:
            self.feed(event)
            async with asyncio.timeout(wait_s):
                return await asyncio.shield(answer)
        except TimeoutError:
            if answer.done():  # in the turn of the loop in which the time was over
                return answer.result()
            compaction = self.core.compaction(event.request)
            assert compaction is not None, "its end would have been the answer"
            return compaction
        finally:
            if answer.done() or self.core.compaction(event.request) is None:
                self._compacting.pop(event.request, None)

    def _compacted(self, compacted: Compacted) -> None:
        answer = self._compacting.pop(compacted.request, None)
        if answer and not answer.done():
            answer.set_result(compacted)

    def withdraw(self, event: ev.Withdrawn) -> None:
        """Withdraws a ticket because its holder says so. A pending `acquire` of it raises
        TicketClosed."""
        self.feed(event)
        owner = self.core.holder_of(event.ticket)
        if owner is None or event.holder in (None, owner):
            self._answer(event.ticket, TicketClosed(event.ticket))

    def withdraw_growth(self, event: ev.GrowthAsked) -> None:
        """Withdraws a growth because its holder says so. A pending `grow` of it raises
        TicketClosed. The word of another holder does nothing."""
        owner = self.core.holder_of(event.ticket)
        if owner is None or event.holder in (None, owner):
            self.feed(event)
            self._answer(event.ticket, TicketClosed(event.ticket))

    def _grant(self, grant: Grant) -> None:
        """Answers the call that waits for a ticket's grant, if one still does."""
        answer = self._answers.pop(grant.ticket, None)
        if answer and not answer.done():
            within = Span(max(0, grant.load_by - self._clock()))
            answer.set_result(
                messages.Granted(grant.ticket, grant.devices, within, grant.predicted, self.epoch)
            )

    def _answer(self, ticket: TicketId, error: RequestError) -> None:
        """Answers the call that waits for a ticket with an error, if one still does."""
        answer = self._answers.pop(ticket, None)
        if answer and not answer.done():
            answer.set_exception(error)
            answer.exception()  # seen, because its caller may be gone

    # -- commands ------------------------------------------------------------------------------

    def open_mail(self, holder: HolderId) -> None:
        """Opens an empty mailbox; the commands of an earlier session of this holder are void."""
        most_count = self.core.settings.queue_total_count + COMMANDS_BESIDE_QUEUE_COUNT
        self._mail[holder] = Mailbox(most_count)

    def close_mail(self, holder: HolderId) -> None:
        """Drops the mailbox of a holder that is gone."""
        self._mail.pop(holder, None)

    def has_mail(self, holder: HolderId) -> bool:
        """Says whether a holder has a mailbox: it has joined."""
        return holder in self._mail

    def must_rejoin(self, holder: HolderId) -> bool:
        """Says whether a holder has left too many commands unread."""
        box = self._mail.get(holder)
        return box is not None and box.must_rejoin

    @property
    def holders(self) -> tuple[HolderId, ...]:
        """Returns the holders that have joined."""
        return tuple(self._mail)

    async def listen(self, holder: HolderId, ack: int) -> tuple[messages.SequencedCommand, ...]:
        """Waits for a holder's commands after `ack`, for LISTEN_S at most."""
        return await self._mail[holder].after(ack, LISTEN_S)

    def command_all(self, command: messages.Command) -> None:
        """Sends a command to every holder that has joined."""
        for holder in self.holders:
            self._command(holder, command)

    def _command(self, holder: HolderId, command: messages.Command) -> None:
        """Puts a command into a holder's mailbox, if it has one."""
        box = self._mail.get(holder)
        if box is None or box.must_rejoin:
            return
        box.put(command)
        if box.must_rejoin:
            logger.warning("%s reads no commands and must rejoin; %r is dropped", holder, command)

    def _revoke(self, revoke: Revoke) -> None:
        """Sends a revoke, with the time that is left until its barrier drops."""
        barrier = Span(max(0, revoke.barrier_until - self._clock()))
        command = messages.RevokeCommand(revoke.ticket, revoke.reason, revoke.to, barrier)
        self._command(revoke.holder, command)

    # -- time ----------------------------------------------------------------------------------

    def _set_timer(self, at: Instant) -> None:
        """Keeps one timer, for the earliest instant asked for; the core asks again after each."""
        if self._timer and self._timer_at is not None and self._timer_at <= at:
            return
        if self._timer:
            self._timer.cancel()
        delay_s = max(0, at - self._clock()) / 1e9
        self._timer_at = at
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = self._timer_at = None
        self.feed(ev.TimerFired())

    # -- replica counts ------------------------------------------------------------------------

    def refresh_targets(self) -> None:
        """Wakes the calls of `replicas` when the number of replicas wanted of a capability has
        changed."""
        targets = dict(self.core.replica_targets(self._clock()))
        if targets != self._targets:
            self._targets, self._targets_version = targets, self._targets_version + 1
            self._targets_changed.set()
            self._targets_changed = asyncio.Event()

    async def replicas(self, version: int, wait_s: float) -> tuple[int, dict[str, int]]:
        """Returns the replicas wanted of each capability, with the version of this answer: as soon
        as it differs from `version`, or after `wait_s` seconds."""
        if version == self._targets_version:
            try:
                async with asyncio.timeout(wait_s):
                    await self._targets_changed.wait()
            except TimeoutError:
                pass
        return self._targets_version, dict(self._targets)

    def snapshot(self) -> messages.Plain:
        """Returns what `arbiter status` shows, in plain values."""
        return {
            "version": messages.package_version(),
            "protocol": messages.protocol_hash(),
            "calls": self.calls_count,
            "sequence": self.log.sequence,
            "jobs": self._jobs.shown() if self._jobs else [],
            **plain(self.core.snapshot(self._clock())),
        }

    def samples(self) -> Samples:
        """Returns the value of every metric (K2)."""
        core = self.core
        return samples_of(
            Source(
                core.snapshot(self._clock()),
                self.counters,
                core.model_names,
                core.request_times,
                self.calls_count,
                self._day.last if self._day else None,
                self._jobs.totals() if self._jobs else (),
            )
        )

    def explain(self, ticket: TicketId) -> messages.Plain:
        """Returns why a ticket waits, or why it went, in plain values. Raises UnknownTicket."""
        explanation: messages.Plain = plain(self.core.explain(ticket, self._clock()))
        return explanation

    def plan(self, question: PlanQuestion) -> messages.Plain:
        """Returns what a request would bring about. The core's state stays as it is (K3), so a
        failure in here is the caller's alone and ends no process."""
        answer: messages.Plain = plain(self.core.plan(question, self._clock()))
        return answer

    @property
    def open_tickets(self) -> int:
        """Returns how many tickets are on the books."""
        return self.core.open_tickets_count


def _as_command(
    decision: Queued
    | LoadModel
    | WithdrawLoad
    | DropDrafter
    | PurgeCaches
    | ForgetTenant
    | WarmPrefixes,
) -> messages.Command:
    """Returns a decision as the command that its holder gets."""
    match decision:
        case Queued(ticket, _, predicted):
            return messages.WaitEstimate(ticket, predicted)
        case LoadModel(_, model):
            return messages.ReloadCommand(model)
        case WithdrawLoad(_, model):
            return messages.WithdrawCommand(model)
        case DropDrafter(_, model):
            return messages.Resize(model, messages.ModelSize.WITHOUT_DRAFTER)
        case PurgeCaches(ticket, _, only_slabs):
            return messages.PurgeCommand(ticket, only_slabs)
        case ForgetTenant(_, tenant):
            return messages.ForgetTenantCommand(tenant)
        case WarmPrefixes(ticket):
            return messages.PrewarmCommand(ticket)
