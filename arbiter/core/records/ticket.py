"""A ticket: its states, the lawful transitions between them, and what is noted of it."""

from dataclasses import dataclass, field
from enum import Enum

from arbiter.core.decisions import Reason, Tier
from arbiter.core.types import ANYBODY, Client, LeaseConditions, Need, Priority, Split
from arbiter.units import (
    Bytes,
    DeviceId,
    HolderId,
    Instant,
    NodeId,
    Span,
    TicketId,
    host_device,
)


class State(Enum):
    QUEUED = "queued"
    LOADING = "loading"
    RESIDENT = "resident"
    DRAINING = "draining"
    ASLEEP = "asleep"
    RECLAIMING = "reclaiming"
    CLOSED = "closed"

    __hash__ = object.__hash__  # an enum's own is a call of Python, on each look into a table


LEAVING = frozenset({State.DRAINING, State.RECLAIMING})
CHARGED = frozenset({State.LOADING, State.RESIDENT, State.DRAINING, State.ASLEEP, State.RECLAIMING})
UNCHARGED = tuple(state for state in State if state not in CHARGED)  # compared, not hashed

TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.LOADING, State.CLOSED}),
    State.LOADING: frozenset({State.RESIDENT, State.ASLEEP, State.RECLAIMING}),
    State.RESIDENT: frozenset({State.DRAINING, State.RECLAIMING}),
    State.DRAINING: frozenset({State.RESIDENT, State.ASLEEP, State.RECLAIMING}),
    State.ASLEEP: frozenset({State.LOADING, State.RECLAIMING}),
    State.RECLAIMING: frozenset({State.CLOSED}),
    State.CLOSED: frozenset(),
}

Sizes = dict[DeviceId, Bytes]
NONE = Bytes(0)


@dataclass(slots=True)
class Ticket:
    """One ticket. Whatever changes bytes goes through the Ledger; the rest is notes for rules."""

    ticket: TicketId
    holder: HolderId
    node: NodeId
    capability: str
    model: str
    settings_key: str
    need: Need
    need_is_explicit: bool
    attempt: int
    opened: Instant
    since: Instant  # of the present state
    state: State = State.QUEUED
    granted: Sizes = field(default_factory=dict)
    measured: Sizes = field(default_factory=dict)
    home: Sizes = field(default_factory=dict)  # granted while awake; where a sleeper must wake
    ram_bytes: Bytes = Bytes(0)  # of its process beside a GPU: rules.process_ram

    # What the configuration says of its model.
    role: str = ""
    role_rank: int = 0
    pinned: bool = False
    allow_oversize: bool = False
    keep_warm: Span = Span(-1)
    dispatch_lock: str = ""
    shared_scratch_bytes: Bytes = Bytes(0)  # of the reserve of its lock, on each of its devices
    gang: tuple[TicketId, ...] = ()
    split: Split = Split.NONE
    settles: bool = False  # its floor was lowered: it goes down to it once it is idle
    grows_bytes: Bytes = Bytes(0)  # wanted on top of what it has; waits for room
    grows_by: Instant = Instant(0)
    grown_bytes: Bytes = Bytes(0)  # granted beyond what it was loaded with
    shrinks_from: Instant | None = None  # a word of less counts from then on; None: never grew
    less_since: Instant | None = None  # its holder says that it has less than it was granted

    client: Client = ANYBODY  # on whose account it is: see bill_to
    lease: LeaseConditions | None = None  # its holder is a process outside Serve
    lease_ends: Instant = Instant(0)

    # What its holder said last.
    is_prefetch: bool = False  # brought in unasked, and not used yet (C11)
    priority: Priority = Priority.NORMAL  # of its last request; see urgency.of for what counts
    inflight: int = 0
    uses_count: int = 0  # so far, under this ticket
    last_used: Instant = Instant(0)

    # Notes of the present or last load.
    load_by: Instant = Instant(0)
    predicted: Span = Span(0)
    load_took: Span = Span(0)
    resident_since: Instant = Instant(0)
    readings_count: int = 0  # while resident; the first may have been taken before it was
    peak_bytes: Bytes = Bytes(0)
    wakes_count: int = 0

    # Notes of the present revoke.
    leaving: Reason | None = None
    revoked_at: Instant | None = None
    to: Tier = Tier.GONE
    barrier_until: Instant = Instant(0)
    unloading_since: Instant | None = None
    slept_at: Instant | None = None
    slept_from_bytes: Bytes = Bytes(0)
    declined_until: Instant = Instant(0)
    kill_at: Instant = Instant(0)
    reclaim_late: bool = False  # reclaim took too long; its holder is quarantined

    def charge(self, device: DeviceId) -> Bytes:
        """Bytes on the books for it; 0 in states that hold none."""
        if self.state in UNCHARGED:
            return Bytes(0)
        held, granted = self.measured.get(device, NONE), self.granted.get(device, NONE)
        if self.dispatch_lock:
            held = Bytes(held - self.scratch_in_use(device))
        return held if held > granted else granted

    def scratch_in_use(self, device: DeviceId) -> Bytes:
        """Of what it is measured to hold, the part that the shared reserve stands for."""
        if not self.dispatch_lock or device == host_device(self.node):
            return Bytes(0)
        beyond_grant = max(0, self.measured.get(device, 0) - self.granted.get(device, 0))
        return Bytes(min(self.shared_scratch_bytes, beyond_grant))

    @property
    def devices(self) -> set[DeviceId]:
        return self.granted.keys() | self.measured.keys()

    @property
    def home_bytes(self) -> Bytes:
        return Bytes(sum(self.home.values()))

    @property
    def at_home_bytes(self) -> Bytes:
        """Measured on the devices it was granted while awake."""
        return Bytes(sum(self.measured.get(d, 0) for d in self.home))
