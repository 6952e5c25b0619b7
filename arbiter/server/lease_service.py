"""The arbiter's counter for processes outside Serve: their calls become the events a holder sends.

Each lease is a holder of its own with one ticket. Its calls repeat everything (level-triggered), so
a front or an arbiter may restart between any two of them. A claim to hold bytes already is believed
only of whom the last life of the arbiter knew.
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
from arbiter.core.records.ticket import State
from arbiter.core.tickets.leases import LEASE
from arbiter.errors import (
    AgentAway,
    ArbiterUnavailable,
    LeaseRefused,
    RequestError,
    TicketClosed,
    UnknownLease,
)
from arbiter.protocol import messages
from arbiter.protocol.lease_schema import NAME
from arbiter.server.shell import Shell
from arbiter.server.store import Member
from arbiter.units import HolderId, NodeId, Span, TicketId, in_seconds, seconds

logger = logging.getLogger("arbiter")

# Longest wait of one call. A third of the lapse, so that two calls may be lost.
WAIT_MOST_S = 3.0
LATE_S = 4.0  # without a call for this long a holder has missed at least one: `clean` ends it
ENDED_KEPT = 1_000  # ends remembered for whoever asks late, ~200 B each
WORDS = {
    State.QUEUED.value: "queued",
    State.LOADING.value: "held",
    State.RESIDENT.value: "held",
    State.DRAINING.value: "leaving",
}


class Adopts(Protocol):
    """How a node agent is told whose memory a lease is."""

    async def adopt(
        self, node: NodeId, ticket: TicketId, pid: int, granted: tuple[types.DeviceBytes, ...]
    ) -> None: ...


class LeaseStore(Protocol):
    """What the next life of the arbiter must know: whom to wait for, and when their terms end."""

    def members(self) -> tuple[Member, ...]: ...
    def add_member(self, member: Member) -> None: ...
    def drop_holder(self, holder: HolderId) -> None: ...
    def lease_ends(self) -> dict[str, float]: ...
    def save_lease_ends(self, ends: dict[str, float]) -> None: ...


@dataclass(slots=True, eq=False)
class LeaseSession:
    """One lease, from its first call to its end."""

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
    work: asyncio.Task[None] | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self) -> None:
        self.news.set()
        self.news = asyncio.Event()

    def account(self) -> tuple[ev.HeldTicket, ...]:
        if not self.devices:
            return ()
        call, phase = self.call, types.Phase.RESIDENT
        need = types.Need(call.size_bytes)
        return (
            ev.HeldTicket(
                call.ticket, call.label, phase, 0, Span(0), self.devices, need, lease=self._terms()
            ),
        )

    def _terms(self) -> types.LeaseConditions:
        """What is left of its term is the arbiter's to say, also after a restart of it."""
        if self.ends_unix_s is None:
            return self.call.terms
        left = seconds(max(0.0, self.ends_unix_s - time.time()))
        return replace(self.call.terms, term=min(self.call.terms.term, left))


class LeaseService:
    def __init__(self, shell: Shell, agents: Adopts, known: LeaseStore) -> None:
        self._shell, self._agents, self._known = shell, agents, known
        self._expected = {member.holder for member in known.members()}  # of the last life
        self._ends = known.lease_ends()
        self._seats: dict[TicketId, LeaseSession] = {}
        self._ended: OrderedDict[TicketId, str] = OrderedDict()  # why

    async def hear(self, call: messages.LeaseCall) -> messages.LeaseState:
        """Raises RequestError when it is refused, or its process is not there."""
        if call.ticket in self._ended:
            return messages.LeaseState(call.ticket, "ended", reason=self._ended[call.ticket])
        seat = self._seats.get(call.ticket) or self._open(call)
        seat.call, seat.heard_s = call, time.monotonic()
        self._shell.feed(ev.Renewed(seat.holder, seat.account()))
        await self._wait(seat, call)
        await self._adopt(seat, call)
        return self._said(seat)

    def give_back(self, lease: str, tenant: str) -> None:
        """Repeated: nothing. Raises UnknownLease."""
        ticket = messages.lease_ticket(tenant, lease)
        if not NAME.fullmatch(lease) or not (ticket in self._seats or ticket in self._ended):
            raise UnknownLease(lease)
        if seat := self._seats.get(ticket):
            self._end(seat, "released")

    def _end(self, seat: LeaseSession, reason: str) -> None:
        if self._word(seat) == "queued":
            self._shell.withdrawn(ev.Withdrawn(seat.call.ticket, seat.holder))
        else:
            self._shell.feed(ev.Released(seat.call.ticket, reason, seat.holder))
        self._close(seat, reason)

    def clean(self) -> list[TicketId]:
        late = [t for t, s in self._seats.items() if time.monotonic() - s.heard_s > LATE_S]
        for ticket in late:
            self._end(self._seats[ticket], "lost")
        return late

    def sweep(self) -> None:
        """Forget those that ended while nobody asked, and after a restart those whose term was over
        when all who would come back had."""
        if self._shell.core.gave_up_waiting:
            self._forget_lapsed()
        for seat in list(self._seats.values()):
            if self._word(seat) == "ended" and time.monotonic() - seat.heard_s > LATE_S:
                self._close(seat, _why(seat))

    def _forget_lapsed(self) -> None:
        """One that comes all the same is a stranger: else its term would begin anew."""
        now_s = time.time()
        lapsed = [t for t, at_s in self._ends.items() if t not in self._seats and at_s <= now_s]
        for ticket in lapsed:
            del self._ends[ticket]
            self._expected.discard(HolderId(ticket))
        if lapsed:
            self._known.save_lease_ends(self._ends)

    # -- coming --------------------------------------------------------------------------------

    def _open(self, call: messages.LeaseCall) -> LeaseSession:
        if not NAME.fullmatch(call.lease):
            raise LeaseRefused("id", "has letters, digits and . _ - inside, 64 at most")
        node = call.node or self._only_node()
        seat = LeaseSession(call, HolderId(call.ticket), node)
        if seat.holder in self._expected:
            seat.devices, seat.ends_unix_s = call.devices, self._ends.get(call.ticket)
        self._seats[call.ticket] = seat
        self._known.add_member(Member(seat.holder, node))
        self._shell.open_mail(seat.holder)
        self._shell.feed(ev.Joined(seat.holder, node, LEASE, seat.account()))
        seat.work = asyncio.ensure_future(self._live(seat))
        return seat

    def _only_node(self) -> NodeId:
        match self._shell.core.nodes:
            case (node,):
                return node
            case ():
                raise ArbiterUnavailable(0.0)  # its nodes have yet to introduce themselves
            case many:
                raise LeaseRefused("node", f"must be one of {', '.join(many)}")

    async def _live(self, seat: LeaseSession) -> None:
        """Waits for the grant, then for orders. Ends by being cancelled with its seat."""
        if not seat.devices:
            try:
                granted = await self._shell.acquire(_asks(seat))
            except RequestError as error:
                seat.error = error
                return seat.tell()
            seat.devices = granted.devices
            self._ends[seat.call.ticket] = time.time() + in_seconds(seat.call.terms.term)
            self._known.save_lease_ends(self._ends)
            seat.tell()
        ack = 0
        while True:
            for order in await self._shell.listen(seat.holder, ack):
                ack = order.sequence
                self._obey(seat, order.command)

    def _obey(self, seat: LeaseSession, command: messages.Command) -> None:
        if isinstance(command, messages.RevokeOrder) and command.ticket == seat.call.ticket:
            seat.reason = command.reason.value
            seat.gone_by_s = time.monotonic() + in_seconds(command.barrier)
            seat.tell()

    async def _adopt(self, seat: LeaseSession, call: messages.LeaseCall) -> None:
        """With each call: an agent that restarted has forgotten."""
        if call.pid is None or self._word(seat) not in ("held", "leaving"):
            return
        try:
            await self._agents.adopt(seat.node, call.ticket, call.pid, seat.devices)
        except AgentAway as away:
            logger.warning("%s is not measured yet: %s", call.ticket, away)
            return  # restarting: the next call says it again
        except LeaseRefused as refused:
            if seat.pid == call.pid:  # it died since, and the agent says so by itself
                return
            self._end(seat, str(refused))
            raise
        seat.pid = call.pid

    # -- news ----------------------------------------------------------------------------------

    async def _wait(self, seat: LeaseSession, call: messages.LeaseCall) -> None:
        within_s = min(WAIT_MOST_S, in_seconds(call.wait))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while seat.error is None and self._word(seat) == call.seen:
                    await seat.news.wait()

    def _word(self, seat: LeaseSession) -> str:
        if seat.error:
            return "ended"
        if not seat.devices:
            return "queued"  # or about to be
        return WORDS.get(self._shell.core.state_of(seat.call.ticket), "ended")

    def _said(self, seat: LeaseSession) -> messages.LeaseState:
        word = self._word(seat)
        ticket = seat.call.ticket
        if word == "ended":
            self._close(seat, _why(seat))
            if seat.error and not isinstance(seat.error, TicketClosed):
                raise seat.error
        left_s = None if seat.gone_by_s is None else max(0.0, seat.gone_by_s - time.monotonic())
        left = None if left_s is None or word != "leaving" else seconds(left_s)
        lapse = self._shell.core.settings.timeouts.lease_lapse
        return messages.LeaseState(ticket, word, seat.devices, left, seat.reason, seat.node, lapse)

    def _close(self, seat: LeaseSession, reason: str) -> None:
        """The ticket may go on without it, until its bytes are seen back."""
        if self._seats.pop(seat.call.ticket, None) is None:
            return
        self._ended[seat.call.ticket] = reason
        if len(self._ended) > ENDED_KEPT:
            self._ended.popitem(last=False)
        if seat.work:
            seat.work.cancel()
        seat.tell()
        self._shell.close_mail(seat.holder)
        self._known.drop_holder(seat.holder)
        if self._ends.pop(seat.call.ticket, None) is not None:
            self._known.save_lease_ends(self._ends)
        self._shell.feed(ev.HolderLost(seat.holder))


def _why(seat: LeaseSession) -> str:
    return str(seat.error) if seat.error else seat.reason or "lost"


def _asks(seat: LeaseSession) -> ev.Requested:
    call = seat.call
    return ev.Requested(
        call.ticket,
        seat.holder,
        LEASE,
        call.label,
        types.Need(call.size_bytes),
        need_is_explicit=True,
        deadline=call.deadline,
        lease=call.terms,
    )
