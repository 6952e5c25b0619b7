"""One model on one holder: its ticket, its engine, the requests in flight and those that wait."""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from arbiter.client.gang_request import Gang
from arbiter.core.events import HeldTicket, Requested
from arbiter.core.types import ANYBODY, Client, DeviceBytes, Phase, Priority
from arbiter.errors import DeadlineUnmet
from arbiter.protocol.messages import Granted, Spawned, SpawnSpec
from arbiter.units import HolderId, Span, TicketId, in_seconds, seconds
from deployments.config.load_plan import ModelPlan
from deployments.replica.engine_client import EngineLink
from deployments.replica.model_files.loaded_files import LoadedFiles
from deployments.requests.prefixes import PrefixEnd
from deployments.routing.pieces import KeptKv

logger = logging.getLogger("arbiter.residency")

# Room for the socket folder and suffix in the kernel's 108 bytes of a socket's path.
_NAME_MOST = 24


class HolderState(Enum):
    """The holder's own view of one model. CLOSED holds no bytes, and neither does QUEUED, except
    for an asleep model that waits for the grant of its wake.

    DRAINING admits no request while those in flight finish. What follows depends on why it began:
    a revoke (unloading.drain) ends asleep, closed, or resident when the barrier drops; a change of
    size (resize._restart) puts another process under the same ticket; replaced files
    (unloading.outdate) close it, and another held model of the same name takes new requests at
    once."""

    QUEUED = "queued"
    LOADING = "loading"
    RESIDENT = "resident"
    DRAINING = "draining"
    UNLOADING = "unloading"
    ASLEEP = "asleep"
    CLOSED = "closed"


TRANSITIONS: dict[HolderState, frozenset[HolderState]] = {
    HolderState.QUEUED: frozenset({HolderState.LOADING, HolderState.ASLEEP, HolderState.CLOSED}),
    HolderState.LOADING: frozenset({HolderState.QUEUED, HolderState.RESIDENT, HolderState.CLOSED}),
    HolderState.RESIDENT: frozenset({HolderState.DRAINING, HolderState.CLOSED}),
    HolderState.DRAINING: frozenset(
        {
            HolderState.LOADING,
            HolderState.RESIDENT,
            HolderState.UNLOADING,
            HolderState.CLOSED,
        }
    ),
    HolderState.UNLOADING: frozenset({HolderState.ASLEEP, HolderState.CLOSED}),
    HolderState.ASLEEP: frozenset({HolderState.QUEUED, HolderState.CLOSED}),
    HolderState.CLOSED: frozenset(),
}

LEAVING = frozenset({HolderState.DRAINING, HolderState.UNLOADING})
UNDER_WAY = frozenset({HolderState.QUEUED, HolderState.LOADING}) | LEAVING
PHASES = {
    # The heartbeat tells of bytes only. A queued model that holds some is asleep: until the grant
    # of its wake the arbiter has it as it was.
    HolderState.QUEUED: Phase.ASLEEP,
    HolderState.LOADING: Phase.LOADING,
    HolderState.RESIDENT: Phase.RESIDENT,
    HolderState.DRAINING: Phase.DRAINING,
    HolderState.UNLOADING: Phase.UNLOADING,
    HolderState.ASLEEP: Phase.ASLEEP,
}


def new_ticket(model: str) -> TicketId:
    """Makes a ticket's id, with only plain characters of the model's name, because sockets and logs
    carry it."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", model).strip("-")[:_NAME_MOST] or "model"
    return TicketId(f"{name}-{uuid.uuid4().hex[:10]}")


class EngineSpawner(Protocol):
    """Has the node agent start an engine's process."""

    async def __call__(self, ticket: TicketId, spec: SpawnSpec) -> Spawned: ...


@dataclass(slots=True, eq=False)
class RequestsInFlight:
    """The requests in flight, and how long there have been none."""

    inflight: int = 0
    served_count: int = 0  # under this ticket so far
    last_end_ns: int = field(default_factory=time.monotonic_ns)
    warm_until_ns: int = 0  # a client asked that the model does not count as idle before
    emptied: asyncio.Event = field(default_factory=asyncio.Event)  # in-flight fell to zero
    on_begin: Callable[[], None] | None = None  # ends what only runs while nothing is in flight

    @property
    def is_kept_warm(self) -> bool:
        return time.monotonic_ns() < self.warm_until_ns

    def begin(self) -> None:
        if self.on_begin is not None:
            self.on_begin()
        self.inflight += 1
        self.served_count += 1

    def end(self) -> None:
        assert self.inflight > 0
        self.inflight -= 1
        if self.inflight == 0:
            self.last_end_ns = time.monotonic_ns()
            self.emptied.set()

    async def all_ended(self) -> None:
        """Waits until no request is in flight."""
        while self.inflight:
            self.emptied.clear()
            await self.emptied.wait()

    async def ended_within(self, within: Span) -> bool:
        """Waits until no request is in flight. False: one outlived the time."""
        try:
            async with asyncio.timeout(in_seconds(within)):
                await self.all_ended()
        except TimeoutError:
            return not self.inflight
        return True


@dataclass(slots=True, eq=False)
class Demand:
    """The requests that wait, and what the ticket says for them."""

    # Until when each waits, on the monotonic clock; None: as long as it takes
    waiters: dict[asyncio.Future[bool], float | None] = field(default_factory=dict)
    priority: Priority = Priority.NORMAL  # the most urgent of those in flight or waiting
    until_s: float | None = None  # the latest of those waiting, on the monotonic clock
    client: Client = ANYBODY  # of the last request
    is_wanted: bool = False  # even while no request waits: pinned, or brought back

    @property
    def has_waiting(self) -> bool:
        return any(not waiter.done() for waiter in self.waiters)

    @property
    def is_any(self) -> bool:
        return bool(self.waiters) or self.is_wanted


@dataclass(slots=True)
class LoadNotes:
    """The present load or wake, as the arbiter's answers tell of it."""

    attempt: int = 1
    predicted: Span = Span(0)  # as said with the grant; 0: unknown
    granted_ns: int = 0
    serves_at_ns: int = 0  # expected by the arbiter while the ticket is queued; 0: unknown

    @property
    def granted_s(self) -> float:
        """Seconds since the grant."""
        return (time.monotonic_ns() - self.granted_ns) / 1e9


@dataclass(frozen=True, slots=True)
class BeforeGrowth:
    """What a model was before it grew."""

    plan: ModelPlan
    devices: tuple[DeviceBytes, ...]


@dataclass(slots=True, eq=False)
class Growth:
    """A change of size under way, and the way back from a growth that was made (A14)."""

    work: asyncio.Task[None] | None = None
    before: BeforeGrowth | None = None  # None: it has not grown
    look: asyncio.TimerHandle | None = None  # the next look at whether to give the growth back
    is_restart: bool = False  # its process is being replaced; the arbiter sees it in use


class WarmerApi(Protocol):
    """What a held model tells and asks its PrefixWarmer."""

    def on_move(self, before: HolderState, to: HolderState) -> None: ...
    async def settled(self) -> None: ...
    def on_use(self, cut: PrefixEnd, chat: bytes, tenant: str) -> None: ...
    def on_session(self, cut: PrefixEnd | None, chat: bytes, tenant: str) -> None: ...
    def on_speech(self) -> None: ...
    def forget_tenant(self, tenant: str) -> None: ...


@dataclass(slots=True, eq=False)
class HeldModel:
    """One model, from its request for a ticket to its end. Only `move` changes its state."""

    plan: ModelPlan
    ticket: TicketId
    state: HolderState = HolderState.QUEUED
    has_slept: bool = False  # under this ticket
    devices: tuple[DeviceBytes, ...] = ()
    link: EngineLink | None = None
    work: asyncio.Task[None] | None = None  # the load, wake or unload under way
    watch: asyncio.Task[None] | None = None  # of its files and its engine
    gang: Gang | None = None  # until the grant: the tickets requested together
    slab_caps: tuple[tuple[str, float], ...] = ()  # of tenants, as its engine was told them
    files: LoadedFiles = field(default_factory=LoadedFiles)
    kept_kv: KeptKv | None = None  # by the last report of its engine
    outdated: asyncio.Event = field(default_factory=asyncio.Event)  # its files were replaced
    requests: RequestsInFlight = field(default_factory=RequestsInFlight)
    demand: Demand = field(default_factory=Demand)
    load: LoadNotes = field(default_factory=LoadNotes)
    growth: Growth = field(default_factory=Growth)
    warmer: WarmerApi | None = None  # of its stable prefixes; None: its engine has no use for it

    def move(self, to: HolderState) -> None:
        """Changes the state, which nothing else does; see TRANSITIONS."""
        lawful = TRANSITIONS[self.state]
        assert to in lawful, f"{self.ticket}: no way from {self.state.value} to {to.value}"
        logger.debug("%s: %s -> %s", self.ticket, self.state.value, to.value)
        before, self.state = self.state, to
        self.has_slept |= to is HolderState.ASLEEP
        if self.warmer is not None:
            self.warmer.on_move(before, to)

    def try_again(self) -> None:
        """Queues the model once more, under a new ticket: the first try's is over."""
        if self.state is not HolderState.QUEUED:  # a refusal leaves it there
            self.move(HolderState.QUEUED)
        self.ticket, self.load.attempt = new_ticket(self.model), 2
        self.has_slept = False

    @property
    def model(self) -> str:
        return self.plan.model

    def begin_request(self, priority: Priority, client: Client = ANYBODY) -> None:
        """Puts one more request in flight."""
        self.note_request(priority, client)
        self.requests.begin()

    def note_request(
        self, priority: Priority, client: Client = ANYBODY, until_s: float | None = None
    ) -> bool:
        """Notes an arriving request. True when the arbiter, which has the ticket in its queue
        already, must hear of it: it is more urgent than those that wait, or waits for longer, or it
        is the first for a model that was brought in unasked."""
        demand = self.demand
        is_busy, demand.client = bool(self.requests.inflight or demand.waiters), client
        is_raised = is_busy and priority < demand.priority
        is_later = is_busy and _is_later(until_s, demand.until_s)
        is_first = demand.is_wanted and not is_busy
        demand.priority = priority if is_raised or not is_busy else demand.priority
        demand.until_s = until_s if is_later or not is_busy else demand.until_s
        return (is_raised or is_later or is_first) and self.state is HolderState.QUEUED

    def on_grant(self, grant: Granted) -> None:
        """Takes the arbiter's grant: the load or wake may begin."""
        self.move(HolderState.LOADING)
        self.devices, self.gang = grant.devices, None
        self.load.predicted, self.load.granted_ns = grant.predicted, time.monotonic_ns()
        self.load.serves_at_ns = 0

    def on_wait_estimate(self, predicted: Span) -> None:
        """Takes the arbiter's estimate of how long the queued ticket waits and loads. A waiting
        request whose deadline is sooner fails at once (A21)."""
        self.load.serves_at_ns = time.monotonic_ns() + predicted
        for waiter, until_s in list(self.demand.waiters.items()):
            if not waiter.done() and (error := self.deadline_unmet(until_s)):
                waiter.set_exception(error)

    @property
    def left_s(self) -> float | None:
        """Seconds until the model serves: of its load, as predicted with the grant, or of its wait
        and load; None when nothing is known."""
        now_ns, load = time.monotonic_ns(), self.load
        if self.state is HolderState.LOADING:
            ends_ns = load.granted_ns + load.predicted
            return max(0.0, (ends_ns - now_ns) / 1e9) if load.predicted else None
        is_known = self.state is HolderState.QUEUED and load.serves_at_ns
        return max(0.0, (load.serves_at_ns - now_ns) / 1e9) if is_known else None

    def wait(self, until_s: float | None) -> asyncio.Future[bool]:
        """Begins a request's wait for the work on the model. The result is True once the request is
        in flight, and False where the model's state must be looked at again. Raises DeadlineUnmet
        where the work is known to end too late for the request."""
        if late := self.deadline_unmet(until_s):
            raise late
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.demand.waiters[waiter] = until_s
        return waiter

    def deadline_unmet(self, until_s: float | None) -> DeadlineUnmet | None:
        """Returns the refusal of a request that waits until then; None: in time, or not known."""
        left_s = self.left_s
        if until_s is None or left_s is None or time.monotonic() + left_s <= until_s:
            return None
        return DeadlineUnmet(self.ticket, 0.0, max(1.0, left_s), left_s)

    def end_request(self) -> None:
        """Takes one request out of flight."""
        self.requests.end()

    def admit_waiting(self) -> None:
        """Puts the waiting requests in flight. A model that has become RESIDENT does so in the same
        step, so that no revoke finds it idle between its load and its first use."""
        for waiter in self._take_waiters():
            self.requests.begin()
            waiter.set_result(True)

    def turn_back_waiting(self, error: Exception | None = None) -> None:
        """Ends the wait of all requests. They fail with the error; without an error they look again
        at what there is. So does a request that may wait for longer than the refused ticket did."""
        for waiter, until_s in self._take_waiters().items():
            if error is None or _is_in_time(error, until_s):
                waiter.set_result(False)
            else:
                waiter.set_exception(error)

    def _take_waiters(self) -> dict[asyncio.Future[bool], float | None]:
        waiters = self.demand.waiters
        taken = {w: until_s for w, until_s in waiters.items() if not w.done()}
        waiters.clear()
        return taken

    def ticket_request(self, holder: HolderId, capability: str) -> Requested:
        """Returns the event that asks the arbiter for the model's ticket."""
        plan, demand, deadline = self.plan, self.demand, None
        if demand.until_s is not None and not demand.is_wanted:
            deadline = seconds(max(0.001, demand.until_s - time.monotonic()))
        return Requested(
            self.ticket,
            holder,
            capability,
            plan.model,
            plan.need,
            plan.settings_key,
            need_is_explicit=plan.need_is_explicit,
            deadline=deadline,
            attempt=self.load.attempt,
            priority=demand.priority,
            client=demand.client,
            split=plan.split,
            gang=self.gang.tickets if self.gang else (),
        )

    def heartbeat_entry(self) -> HeldTicket:
        """Returns what the heartbeat says of the model. Requests that wait for its load count as in
        flight."""
        requests, is_restart = self.requests, self.growth.is_restart
        waiting = len(self.demand.waiters) if self.state is HolderState.LOADING else 0
        inflight = max(requests.inflight + waiting, int(is_restart))
        phase = Phase.RESIDENT if is_restart else PHASES[self.state]
        now_ns = time.monotonic_ns()
        idle = 0 if inflight else max(0, now_ns - max(requests.last_end_ns, requests.warm_until_ns))
        return HeldTicket(
            self.ticket,
            self.model,
            phase,
            inflight,
            Span(idle),
            self.devices,
            self.plan.need,
            self.plan.settings_key,
            self.demand.priority,
            requests.served_count,
            client=self.demand.client,
            stay_warm=Span(max(0, requests.warm_until_ns - now_ns)),
            need_is_explicit=self.plan.need_is_explicit,
            has_slept=self.has_slept,
        )


def _is_later(until_s: float | None, than_s: float | None) -> bool:
    return than_s is not None and (until_s is None or until_s > than_s)


def _is_in_time(error: Exception, until_s: float | None) -> bool:
    """Whether the ticket was refused for another request's deadline, and this one's is later."""
    if not isinstance(error, DeadlineUnmet):
        return False
    return until_s is None or time.monotonic() + (error.predicted_s or 0.0) < until_s
