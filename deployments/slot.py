"""One model on one holder: its ticket, its engine, who uses it and who waits for it."""

import asyncio
import re
import time
import uuid
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from arbiter.events import DeviceBytes, HeldTicket, Phase, Priority, Requested
from arbiter.units import Bytes, HolderId, Span, TicketId
from arbiter.wire import Granted, SpawnSpec
from deployments.engine_link import EngineLink
from deployments.plan import ModelPlan

# Room for the socket folder and suffix in the kernel's 108 bytes of a socket's path.
_NAME_MOST = 24


class Life(Enum):
    """The holder's own view; QUEUED and CLOSED hold nothing."""

    QUEUED = "queued"
    LOADING = "loading"
    RESIDENT = "resident"
    DRAINING = "draining"
    UNLOADING = "unloading"
    ASLEEP = "asleep"
    CLOSED = "closed"


PHASES = {
    Life.QUEUED: Phase.ASLEEP,  # held and in the line: a sleeper that is to be woken
    Life.LOADING: Phase.LOADING,
    Life.RESIDENT: Phase.RESIDENT,
    Life.DRAINING: Phase.DRAINING,
    Life.UNLOADING: Phase.UNLOADING,
    Life.ASLEEP: Phase.ASLEEP,
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
class Slot:
    plan: ModelPlan
    ticket: TicketId
    life: Life = Life.QUEUED
    inflight: int = 0
    waiters: set[asyncio.Future[bool]] = field(default_factory=set)
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
    warm_until_ns: int = 0  # a client asked that it does not count as idle before
    priority: Priority = Priority.NORMAL  # the most urgent of those in flight or waiting
    wanted: bool = False  # with nobody waiting: pinned, or brought back
    growth: asyncio.Task[None] | None = None  # it is becoming larger, or smaller again
    before: "Before | None" = None  # it grew; this is what it was
    restarts: bool = False  # its process is being replaced: in use, to everybody else

    @property
    def model(self) -> str:
        return self.plan.model

    def enter(self, priority: Priority) -> None:
        """One request more in flight."""
        self.note(priority)
        self.inflight += 1
        self.uses_count += 1

    def note(self, priority: Priority) -> bool:
        """A request comes. True when the arbiter, which was asked already, must hear of it."""
        is_busy = bool(self.inflight or self.waiters)
        is_raised = is_busy and priority < self.priority
        self.priority = priority if is_raised or not is_busy else self.priority
        return is_raised and self.life is Life.QUEUED

    def granted(self, grant: Granted) -> None:
        """What it asked for may be loaded now."""
        self.life, self.devices = Life.LOADING, grant.devices
        self.predicted, self.granted_ns = grant.predicted, time.monotonic_ns()

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
        """Whoever waited hears the error, or without one looks again at what there is."""
        for waiter in self._take_waiters():
            if error is None:
                waiter.set_result(False)
            else:
                waiter.set_exception(error)

    def _take_waiters(self) -> list[asyncio.Future[bool]]:
        taken = [w for w in self.waiters if not w.done()]
        self.waiters.clear()
        return taken

    def asks(self, holder: HolderId, capability: str) -> Requested:
        plan = self.plan
        return Requested(
            self.ticket, holder, capability, plan.model, plan.need, plan.settings_key,
            need_is_explicit=plan.need_is_explicit, attempt=self.attempt, priority=self.priority,
            split=plan.split,
        )  # fmt: skip

    def account(self) -> HeldTicket:
        waiting = len(self.waiters) if self.life is Life.LOADING else 0
        inflight = max(self.inflight + waiting, int(self.restarts))
        phase = Phase.RESIDENT if self.restarts else PHASES[self.life]
        since_ns = max(self.last_end_ns, self.warm_until_ns)
        idle = 0 if inflight else max(0, time.monotonic_ns() - since_ns)
        return HeldTicket(
            self.ticket, self.model, phase, inflight, Span(idle), self.devices,
            self.plan.need, self.plan.settings_key, self.priority, self.uses_count,
        )  # fmt: skip

    @property
    def device_bytes(self) -> Bytes:
        return Bytes(sum(d.size_bytes for d in self.devices))
