"""One model on one holder: its ticket, its engine, who uses it and who waits for it."""

import asyncio
import re
import time
import uuid
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from arbiter.client.gang_request import Gang
from arbiter.core.events import HeldTicket, Requested
from arbiter.core.types import ANYBODY, Client, DeviceBytes, Phase, Priority
from arbiter.errors import DeadlineUnmet
from arbiter.protocol.messages import Granted, SpawnSpec
from arbiter.units import Bytes, HolderId, Span, TicketId, seconds
from deployments.config.load_plan import ModelPlan
from deployments.replica.engine_client import EngineLink

# Room for the socket folder and suffix in the kernel's 108 bytes of a socket's path.
_NAME_MOST = 24


class HolderState(Enum):
    """The holder's own view. CLOSED holds nothing, and QUEUED nothing but a sleeper that is to be
    woken.

    DRAINING: nobody enters, and who is in flight finishes; what comes then is known to who began
    it. A revoke (Residency._drain): asleep or gone, or RESIDENT when the barrier drops. A change of
    size (growing._restart): another process under the same ticket. Files that were replaced
    (Residency._outdated): gone, with another slot of the model in its place from the start."""

    QUEUED = "queued"
    LOADING = "loading"
    RESIDENT = "resident"
    DRAINING = "draining"
    UNLOADING = "unloading"
    ASLEEP = "asleep"
    CLOSED = "closed"


UNDER_WAY = frozenset(
    {HolderState.QUEUED, HolderState.LOADING, HolderState.DRAINING, HolderState.UNLOADING}
)
PHASES = {
    # Only what holds bytes is accounted for, and of those in the line only sleepers do: until the
    # grant of its wake it is to the arbiter what it was.
    HolderState.QUEUED: Phase.ASLEEP,
    HolderState.LOADING: Phase.LOADING,
    HolderState.RESIDENT: Phase.RESIDENT,
    HolderState.DRAINING: Phase.DRAINING,
    HolderState.UNLOADING: Phase.UNLOADING,
    HolderState.ASLEEP: Phase.ASLEEP,
}


def new_ticket(model: str) -> TicketId:
    """Names sockets and logs, so only plain characters of the model's name."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", model).strip("-")[:_NAME_MOST] or "model"
    return TicketId(f"{name}-{uuid.uuid4().hex[:10]}")


class Opens(Protocol):
    """A way to an engine's process: the path of its socket."""

    async def __call__(self, ticket: TicketId, spec: SpawnSpec) -> str: ...


@dataclass(frozen=True, slots=True)
class Before:
    """What a model was before it grew."""

    plan: ModelPlan
    devices: tuple[DeviceBytes, ...]


@dataclass(slots=True, eq=False)
class HeldModel:
    plan: ModelPlan
    ticket: TicketId
    life: HolderState = HolderState.QUEUED
    inflight: int = 0
    # Until when each waits, on the monotonic clock; None: as long as it takes
    waiters: dict[asyncio.Future[bool], float | None] = field(default_factory=dict)
    devices: tuple[DeviceBytes, ...] = ()
    link: EngineLink | None = None
    work: asyncio.Task[None] | None = None  # the load, wake or unload under way
    emptied: asyncio.Event = field(default_factory=asyncio.Event)  # in-flight fell to zero
    last_end_ns: int = field(default_factory=time.monotonic_ns)
    attempt: int = 1
    files: tuple[tuple[str | int, ...], ...] = ()  # of its model when it was loaded; see freshness
    contents: str = ""  # a hash of what lay in them
    watched: asyncio.Task[None] | None = None  # that they are still those
    uses_count: int = 0
    predicted: Span = Span(0)  # how long its load or wake takes, as said with the grant; 0: unknown
    granted_ns: int = 0
    serves_at_ns: int = 0  # as the arbiter expects while it is in the line; 0: nothing is known
    warm_until_ns: int = 0  # a client asked that it does not count as idle before
    priority: Priority = Priority.NORMAL  # the most urgent of those in flight or waiting
    until_s: float | None = None  # the latest of those waiting, on the monotonic clock
    client: Client = ANYBODY  # whose request came last
    wanted: bool = False  # with nobody waiting: pinned, or brought back
    growth: asyncio.Task[None] | None = None  # it is becoming larger, or smaller again
    before: "Before | None" = None  # it grew; this is what it was
    gives_back: asyncio.TimerHandle | None = None  # when it is looked at whether it may
    restarts: bool = False  # its process is being replaced: in use, to everybody else
    gang: Gang | None = None  # until it is granted: what it is granted with

    def try_again(self) -> None:
        """Queued once more, under a new ticket: that of the first try is closed."""
        self.ticket, self.attempt, self.life = new_ticket(self.model), 2, HolderState.QUEUED

    @property
    def model(self) -> str:
        return self.plan.model

    def enter(self, priority: Priority, client: Client = ANYBODY) -> None:
        """One request more in flight."""
        self.note(priority, client)
        self.inflight += 1
        self.uses_count += 1

    def note(
        self, priority: Priority, client: Client = ANYBODY, until_s: float | None = None
    ) -> bool:
        """A request comes. True when the arbiter, which was asked already, must hear of it: it is
        more urgent than those that wait, or waits for longer."""
        is_busy, self.client = bool(self.inflight or self.waiters), client
        is_raised = is_busy and priority < self.priority
        is_later = is_busy and _is_later(until_s, self.until_s)
        self.priority = priority if is_raised or not is_busy else self.priority
        self.until_s = until_s if is_later or not is_busy else self.until_s
        return (is_raised or is_later) and self.life is HolderState.QUEUED

    def granted(self, grant: Granted) -> None:
        """What it asked for may be loaded now."""
        self.life, self.devices = HolderState.LOADING, grant.devices
        self.predicted, self.granted_ns = grant.predicted, time.monotonic_ns()
        self.serves_at_ns, self.gang = 0, None

    def expected(self, predicted: Span) -> None:
        """It is in the line, and the arbiter says how long until it serves. Who cannot wait for
        that hears it at once (A21)."""
        self.serves_at_ns = time.monotonic_ns() + predicted
        for waiter, until_s in list(self.waiters.items()):
            if not waiter.done() and (error := self.unmet(until_s)):
                waiter.set_exception(error)

    @property
    def left_s(self) -> float | None:
        """Until it serves: of its load, as predicted with its grant, or of its wait and load; None
        when nothing is known."""
        now_ns = time.monotonic_ns()
        if self.life is HolderState.LOADING:
            ends_ns = self.granted_ns + self.predicted
            return max(0.0, (ends_ns - now_ns) / 1e9) if self.predicted else None
        is_known = self.life is HolderState.QUEUED and self.serves_at_ns
        return max(0.0, (self.serves_at_ns - now_ns) / 1e9) if is_known else None

    def wait(self, until_s: float | None) -> asyncio.Future[bool]:
        """True: in flight; False: look again. Raises DeadlineUnmet where that is known already."""
        if late := self.unmet(until_s):
            raise late
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.waiters[waiter] = until_s
        return waiter

    def unmet(self, until_s: float | None) -> DeadlineUnmet | None:
        """What to say to one that waits until then; None: it will do, or nobody knows."""
        left_s = self.left_s
        if until_s is None or left_s is None or time.monotonic() + left_s <= until_s:
            return None
        return DeadlineUnmet(self.ticket, 0.0, max(1.0, left_s), left_s)

    def leave(self) -> None:
        """One request less in flight."""
        assert self.inflight > 0
        self.inflight -= 1
        if self.inflight == 0:
            self.last_end_ns = time.monotonic_ns()
            self.emptied.set()

    def admit(self) -> None:
        """RESIDENT: whoever waited is in flight from this very step on, so that no revoke finds
        the model idle between its load and its first use."""
        for waiter in self._take_waiters():
            self.inflight += 1
            self.uses_count += 1
            waiter.set_result(True)

    def turn_back(self, error: Exception | None = None) -> None:
        """Whoever waited hears the error, or without one looks again at what there is. So does
        who may wait for longer than the ticket did."""
        for waiter, until_s in self._take_waiters().items():
            if error is None or _is_in_time(error, until_s):
                waiter.set_result(False)
            else:
                waiter.set_exception(error)

    def _take_waiters(self) -> dict[asyncio.Future[bool], float | None]:
        taken = {w: until_s for w, until_s in self.waiters.items() if not w.done()}
        self.waiters.clear()
        return taken

    def asks(self, holder: HolderId, capability: str) -> Requested:
        plan, deadline = self.plan, None
        if self.until_s is not None and not self.wanted:
            deadline = seconds(max(0.001, self.until_s - time.monotonic()))
        return Requested(
            self.ticket,
            holder,
            capability,
            plan.model,
            plan.need,
            plan.settings_key,
            need_is_explicit=plan.need_is_explicit,
            deadline=deadline,
            attempt=self.attempt,
            priority=self.priority,
            client=self.client,
            split=plan.split,
            gang=self.gang.tickets if self.gang else (),
        )

    def account(self) -> HeldTicket:
        waiting = len(self.waiters) if self.life is HolderState.LOADING else 0
        inflight = max(self.inflight + waiting, int(self.restarts))
        phase = Phase.RESIDENT if self.restarts else PHASES[self.life]
        since_ns = max(self.last_end_ns, self.warm_until_ns)
        idle = 0 if inflight else max(0, time.monotonic_ns() - since_ns)
        return HeldTicket(
            self.ticket,
            self.model,
            phase,
            inflight,
            Span(idle),
            self.devices,
            self.plan.need,
            self.plan.settings_key,
            self.priority,
            self.uses_count,
            client=self.client,
        )

    @property
    def device_bytes(self) -> Bytes:
        return Bytes(sum(d.size_bytes for d in self.devices))


def _is_later(until_s: float | None, than_s: float | None) -> bool:
    return than_s is not None and (until_s is None or until_s > than_s)


def _is_in_time(error: Exception, until_s: float | None) -> bool:
    """The ticket was refused for a deadline that is not this one's."""
    if not isinstance(error, DeadlineUnmet):
        return False
    return until_s is None or time.monotonic() + (error.predicted_s or 0.0) < until_s
