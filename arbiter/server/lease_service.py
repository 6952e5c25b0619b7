"""Turns the calls of processes outside Serve into the events that a holder sends.

Each lease is a holder of its own with one ticket. Its calls repeat everything (level-triggered), so
a front or an arbiter may restart between any two of them. A lease goes on after a restart with what
the last epoch granted, whatever its calls say that it holds.
"""

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Protocol

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.decisions import Reason
from arbiter.core.records.ticket import State
from arbiter.core.reports.plan import PlanQuestion
from arbiter.core.types import LEASE
from arbiter.errors import (
    AgentAway,
    ArbiterUnavailable,
    LeaseRefused,
    RequestError,
    TicketClosed,
    UnknownLease,
)
from arbiter.protocol import messages
from arbiter.protocol.json_codec import plain
from arbiter.server.shell import Shell
from arbiter.server.store import ExpectedHolder, GrantedLease
from arbiter.units import HolderId, NodeId, Span, TicketId, in_seconds, seconds

logger = logging.getLogger("arbiter")

# Longest wait of one call. A third of the lapse, so that two calls may be lost.
WAIT_MOST_S = 3.0
LATE_S = 4.0  # without a call for this long a holder has missed at least one: `clean` ends it
ENDED_KEPT = 1_000  # ends remembered for clients that ask late, ~200 B each
CLIENT_STATES = {
    State.QUEUED.value: "queued",
    State.LOADING.value: "held",
    State.RESIDENT.value: "held",
    State.DRAINING.value: "leaving",
}


class Adopts(Protocol):
    """Names how a node agent is told whose memory a lease is."""

    async def adopt(
        self, node: NodeId, ticket: TicketId, pid: int, granted: tuple[types.DeviceBytes, ...]
    ) -> None: ...


class LeaseStore(Protocol):
    """Names what the next epoch of the arbiter must know: whom to wait for, and when their terms
    end."""

    def add_member(self, member: ExpectedHolder) -> None: ...
    def drop_holder(self, holder: HolderId) -> None: ...
    def leases(self) -> tuple[GrantedLease, ...]: ...
    def save_leases(self, leases: tuple[GrantedLease, ...]) -> None: ...


@dataclass(slots=True, eq=False)
class LeaseSession:
    """Describes one lease, from its first call to its end."""

    call: messages.LeaseCall
    holder: HolderId
    node: NodeId
    devices: tuple[types.DeviceBytes, ...] = ()
    error: RequestError | None = None  # why it was not granted
    reason: str | None = None  # why it is to leave, or has ended
    gone_by_s: float | None = None  # monotonic
    heard_s: float = field(default_factory=time.monotonic)
    ends_unix_s: float | None = None  # its term, whatever its holder says; None: not known
    pid: int | None = None  # whose memory the agent reads for it
    is_kept: bool = False  # no process beats for it: it lasts for its term
    history: types.LeaseHistory = types.NO_HISTORY  # before this epoch
    work: asyncio.Task[None] | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def notify(self) -> None:
        self.news.set()
        self.news = asyncio.Event()

    def held_tickets(self) -> tuple[ev.HeldTicket, ...]:
        if not self.devices:
            return ()
        call, phase = self.call, types.Phase.RESIDENT
        held = ev.HeldTicket(
            call.ticket,
            call.label,
            phase,
            call.users_count,
            Span(0),
            self.devices,
            types.Need(call.size_bytes),
            lease=self._terms(),
            lease_history=self.history,
        )
        return (held,)

    def _terms(self) -> types.LeaseConditions:
        """Returns the lease's terms with what is left of its term by the arbiter's clock, also
        after a restart of the arbiter."""
        if self.ends_unix_s is None:
            return self.call.terms
        remaining = seconds(max(0.0, self.ends_unix_s - time.time()))
        return replace(self.call.terms, term=min(self.call.terms.term, remaining))


class LeaseService:
    """Turns calls about leases into a holder's events: one LeaseSession for each lease of the
    cluster. Sizes are in bytes, terms and waits in seconds. Calls raise LeaseRefused or
    UnknownLease; a grant that the core refuses is the lease's `error`. `known` is the state file,
    which keeps the leases for the next epoch."""

    def __init__(self, shell: Shell, agents: Adopts, store: LeaseStore) -> None:
        self._shell, self._agents, self._known = shell, agents, store
        self._granted = {granted.call.ticket: granted for granted in store.leases()}
        self._sessions: dict[TicketId, LeaseSession] = {}
        self._ended: OrderedDict[TicketId, str] = OrderedDict()  # why
        self._plans: dict[TicketId, messages.Plain] = {}  # of `arbiter free`, as it began

    def restore(self) -> None:
        """Goes on with the leases of the last epoch that no process beats for."""
        for granted in list(self._granted.values()):
            if granted.is_kept:
                self._return(granted)

    async def update(
        self, call: messages.LeaseCall, *, is_kept: bool = False
    ) -> messages.LeaseState:
        """Asks for a lease, or beats for it, and waits for news. Raises RequestError when it is
        refused, or its process is not there."""
        if call.ticket in self._ended:
            return messages.LeaseState(call.ticket, "ended", reason=self._ended[call.ticket])
        session = self._sessions.get(call.ticket) or self._open(call, is_kept)
        session.call, session.heard_s, session.is_kept = call, time.monotonic(), is_kept
        self._shell.feed(ev.Renewed(session.holder, session.held_tickets()))
        if call.users_count and self._client_state(session) == "leaving":  # it came into use
            self._shell.feed(ev.Busy(call.ticket, call.users_count))
        await self._wait(session, call)
        await self._adopt(session, call)
        if self._client_state(session) == "held":  # it was in use, and goes on
            session.reason = session.gone_by_s = None
            self._note_drained(call.ticket, is_drained=False)
        return self._reply(session)

    async def free(self, call: messages.LeaseCall, *, is_kept: bool) -> messages.Plain:
        """Asks for what `arbiter free` may have. `is_kept`: no process beats for it, and it lasts
        for its term or until it is given back. Repeated, it is one lease. Raises as `update`."""
        session = self._sessions.get(call.ticket)
        if session is not None and not session.call.terms.frees:
            raise LeaseRefused("id", "names a lease that `arbiter free` did not begin")
        if session is None and call.ticket not in self._ended:
            self._plans[call.ticket] = self._shell.plan(_question(call))
        plan = self._plans.get(call.ticket)
        try:
            state = await self.update(call, is_kept=is_kept)
        finally:
            if call.ticket not in self._sessions:  # it was refused, or is over
                self._plans.pop(call.ticket, None)
        if state.state == "ended":
            raise LeaseRefused(
                "id", f"names a lease that is over ({state.reason}); ask again under a new id"
            )
        return {"plan": plan, "lease": plain(state)}

    def give_back(self, lease: str, tenant: str) -> None:
        """Ends a lease, also of the last epoch and without a call of its process since. Repeated,
        it does nothing. Raises UnknownLease."""
        ticket = messages.lease_ticket(tenant, lease)
        if ticket not in self._sessions and (granted := self._granted.get(ticket)):
            self._return(granted)
        if not messages.LEASE_NAME.fullmatch(lease) or not (
            ticket in self._sessions or ticket in self._ended
        ):
            raise UnknownLease(lease)
        if session := self._sessions.get(ticket):
            self._end(session, "released")

    def _end(self, session: LeaseSession, reason: str) -> None:
        if self._client_state(session) == "queued":
            self._shell.withdraw(ev.Withdrawn(session.call.ticket, session.holder))
        else:
            self._shell.feed(ev.Released(session.call.ticket, reason, session.holder))
        self._close(session, reason)

    def clean(self) -> list[TicketId]:
        """Ends the leases that have missed a heartbeat, and returns their tickets."""
        late = [t for t, s in self._sessions.items() if time.monotonic() - s.heard_s > LATE_S]
        for ticket in late:
            self._end(self._sessions[ticket], "lost")
        return late

    def sweep(self) -> None:
        """Forgets leases that ended while no client asked. After a restart it also forgets leases
        whose term was over once all living holders were back."""
        if self._shell.core.gave_up_waiting:
            self._forget_lapsed()
        for session in [s for s in self._sessions.values() if s.is_kept]:
            self._keep(session)
        for session in list(self._sessions.values()):
            if (
                self._client_state(session) == "ended"
                and time.monotonic() - session.heard_s > LATE_S
            ):
                self._close(session, _why(session))

    def _keep(self, session: LeaseSession) -> None:
        """Beats for a lease that no process holds, until its term is over."""
        if self._client_state(session) in ("queued", "held"):
            session.heard_s = time.monotonic()
            self._shell.feed(ev.Renewed(session.holder, session.held_tickets()))

    def _forget_lapsed(self) -> None:
        """Forgets leases of the last epoch whose term is over. If their process calls all the same,
        the lease is unknown; else its term would begin anew. Where models left for a lease, it is
        opened once more to end, so that they are loaded again."""
        now_s = time.time()
        lapsed = [
            granted
            for ticket, granted in self._granted.items()
            if ticket not in self._sessions and granted.ends_unix_s <= now_s
        ]
        for granted in lapsed:
            if granted.history.returning:
                self._return(granted)
            else:
                del self._granted[granted.call.ticket]
        if lapsed:
            self._save()

    # -- coming --------------------------------------------------------------------------------

    def _open(self, call: messages.LeaseCall, is_kept: bool) -> LeaseSession:
        if not messages.LEASE_NAME.fullmatch(call.lease):
            raise LeaseRefused("id", "must be letters and digits with . _ - inside, 64 at most")
        granted = self._granted.get(call.ticket)  # by the last epoch
        node = granted.node if granted else call.node or self._only_node()
        session = LeaseSession(call, HolderId(call.ticket), node)
        if granted:
            session.devices, session.history = granted.devices, granted.history
            session.ends_unix_s = granted.ends_unix_s
        if not is_kept:  # the next epoch waits for no process that does not exist
            self._known.add_member(ExpectedHolder(session.holder, node))
        self._begin(session)
        if granted and granted.is_drained:
            self._shell.feed(ev.UnloadAsked(call.ticket))  # the last epoch's notice ended with it
        return session

    def _return(self, granted: GrantedLease) -> None:
        """Has a lease of the last epoch go on without its process, to the end of its term."""
        session = LeaseSession(granted.call, HolderId(granted.call.ticket), granted.node)
        session.devices, session.history = granted.devices, granted.history
        session.ends_unix_s, session.is_kept = granted.ends_unix_s, True
        self._begin(session)

    def _begin(self, session: LeaseSession) -> None:
        self._sessions[session.call.ticket] = session
        self._shell.open_mail(session.holder)
        self._shell.feed(ev.Joined(session.holder, session.node, LEASE, session.held_tickets()))
        session.work = asyncio.ensure_future(self._run(session))

    def _only_node(self) -> NodeId:
        match self._shell.core.nodes:
            case (node,):
                return node
            case ():
                raise ArbiterUnavailable(0.0)  # its nodes have yet to introduce themselves
            case many:
                raise LeaseRefused("node", f"must be one of {', '.join(many)}")

    async def _run(self, session: LeaseSession) -> None:
        """Waits for the grant, then for commands. Ends by being cancelled with its session."""
        if not session.devices:
            try:
                granted = await self._shell.acquire(_request(session))
            except RequestError as error:
                session.error = error
                return session.notify()
            session.devices = granted.devices
            self._note_granted(session)
            session.notify()
        ack = 0
        while session.call.ticket in self._sessions:
            for command in await self._shell.listen(session.holder, ack):
                ack = command.sequence
                self._on_command(session, command.command)

    def _note_granted(self, session: LeaseSession) -> None:
        call = session.call
        self._granted[call.ticket] = GrantedLease(
            call,
            session.node,
            session.devices,
            time.time() + in_seconds(call.terms.term),
            session.is_kept,
            self._shell.core.lease_history(call.ticket),
        )
        self._save()

    def _note_drained(self, ticket: TicketId, *, is_drained: bool) -> None:
        granted = self._granted.get(ticket)
        if granted is not None and granted.is_drained is not is_drained:
            self._granted[ticket] = replace(granted, is_drained=is_drained)
            self._save()

    def _save(self) -> None:
        self._known.save_leases(tuple(self._granted.values()))

    def _on_command(self, session: LeaseSession, command: messages.Command) -> None:
        if isinstance(command, messages.RevokeCommand) and command.ticket == session.call.ticket:
            session.reason = command.reason.value
            session.gone_by_s = time.monotonic() + in_seconds(command.barrier)
            session.notify()
            if session.is_kept:  # no process has bytes to give back; the next epoch forgets it
                self._end(session, session.reason)
            elif command.reason is Reason.MANUAL:
                self._note_drained(command.ticket, is_drained=True)

    async def _adopt(self, session: LeaseSession, call: messages.LeaseCall) -> None:
        """Tells the agent of the lease's process with each call, because an agent that restarted
        has forgotten."""
        if call.pid is None or self._client_state(session) not in ("held", "leaving"):
            return
        try:
            await self._agents.adopt(session.node, call.ticket, call.pid, session.devices)
        except AgentAway as away:
            logger.warning("%s is not measured yet: %s", call.ticket, away)
            return  # restarting: the next call says it again
        except LeaseRefused as refused:
            if session.pid == call.pid:  # it died since, and the agent says so by itself
                return
            self._end(session, str(refused))
            raise
        session.pid = call.pid

    # -- news ----------------------------------------------------------------------------------

    async def _wait(self, session: LeaseSession, call: messages.LeaseCall) -> None:
        within_s = min(WAIT_MOST_S, in_seconds(call.wait))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while session.error is None and self._has_no_news(session, call.seen):
                    await session.news.wait()

    def _has_no_news(self, session: LeaseSession, seen: str) -> bool:
        """Says whether the lease's holder knows its state already, or a notice is on its way with
        the time that is left."""
        state = self._client_state(session)
        return state == seen or (state == "leaving" and session.gone_by_s is None)

    def _client_state(self, session: LeaseSession) -> str:
        if session.error:
            return "ended"
        if not session.devices:
            return "queued"  # or about to be
        return CLIENT_STATES.get(self._shell.core.state_of(session.call.ticket), "ended")

    def _reply(self, session: LeaseSession) -> messages.LeaseState:
        state = self._client_state(session)
        ticket = session.call.ticket
        if state == "ended":
            self._close(session, _why(session))
            if session.error and not isinstance(session.error, TicketClosed):
                raise session.error
        left_s = (
            None if session.gone_by_s is None else max(0.0, session.gone_by_s - time.monotonic())
        )
        remaining = None if left_s is None or state != "leaving" else seconds(left_s)
        lapse = self._shell.core.settings.timeouts.lease_lapse
        return messages.LeaseState(
            ticket, state, session.devices, remaining, session.reason, session.node, lapse
        )

    def _close(self, session: LeaseSession, reason: str) -> None:
        """Forgets a lease. Its ticket may last longer, until its bytes are seen back."""
        if self._sessions.pop(session.call.ticket, None) is None:
            return
        self._plans.pop(session.call.ticket, None)
        self._ended[session.call.ticket] = reason
        if len(self._ended) > ENDED_KEPT:
            self._ended.popitem(last=False)
        if session.work:
            session.work.cancel()
        session.notify()
        self._shell.close_mail(session.holder)
        self._known.drop_holder(session.holder)
        if self._granted.pop(session.call.ticket, None) is not None:
            self._save()
        self._shell.feed(ev.HolderLost(session.holder))


def _why(session: LeaseSession) -> str:
    return str(session.error) if session.error else session.reason or "lost"


def _question(call: messages.LeaseCall) -> PlanQuestion:
    need = types.Need(call.size_bytes)
    return PlanQuestion(LEASE, call.label, need, True, node=call.node, lease=call.terms)


def _request(session: LeaseSession) -> ev.Requested:
    call = session.call
    return ev.Requested(
        call.ticket,
        session.holder,
        LEASE,
        call.label,
        types.Need(call.size_bytes),
        need_is_explicit=True,
        deadline=call.deadline,
        lease=call.terms,
    )
