"""Defines a ticket: its states, the lawful transitions between them, and what is noted of it."""

from dataclasses import dataclass, field, replace
from enum import Enum

from arbiter.core.decisions import Reason, Tier
from arbiter.core.records.estimates import ModelKey
from arbiter.core.types import ANYBODY, Client, LeaseConditions, ModelName, Need, Priority, Split
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
    """Names the states of a ticket; TRANSITIONS says which may follow which."""

    QUEUED = "queued"
    LOADING = "loading"
    RESIDENT = "resident"
    DRAINING = "draining"
    ASLEEP = "asleep"
    RECLAIMING = "reclaiming"
    CLOSED = "closed"

    __hash__ = object.__hash__  # an enum's own is a call of Python, on each look into a table


COMING = frozenset({State.QUEUED, State.LOADING})
AWAKE = frozenset({State.LOADING, State.RESIDENT, State.DRAINING})  # a drain may yet be declined
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
class Load:
    """Describes the present or last load or wake of a ticket, from its grant on."""

    load_by: Instant  # the holder reports its end by then
    predicted: Span = Span(0)  # 0 when nothing was known
    took: Span = Span(0)  # 0 until it is over, and for a lease, which loads nothing
    resident_since: Instant = Instant(0)
    readings_count: int = 0  # while resident; the first may have been taken before it was
    peak_bytes: Bytes = Bytes(0)
    # The peak up to the first reading that found it idle after a request. None: there was none
    # yet; 0: there will be none.
    settled_bytes: Bytes | None = None


@dataclass(slots=True)
class ClaimedSleep:
    """Describes a sleep that the holder reports and that no reading has confirmed yet (D1)."""

    at: Instant
    from_bytes: Bytes  # on the devices that it was awake on
    least_bytes: Bytes  # measured there since
    # When a reading last found less than those before it. None before the first, which may have
    # been taken before the sleep.
    fell_at: Instant | None = None


@dataclass(slots=True)
class Revocation:
    """Describes what the holder of a DRAINING ticket was asked, and how far it has come."""

    to: Tier
    barrier_until: Instant
    unloading_since: Instant | None = None  # nothing has been in flight since
    held_before_bytes: Bytes = Bytes(0)  # noted where a driver names no sizes per process
    sleep: ClaimedSleep | None = None


@dataclass(slots=True)
class PendingGrowth:
    """Describes bytes that a resident wants on top of what it has, and waits for (A14)."""

    more_bytes: Bytes
    until: Instant  # it goes on without them when there is no room by then


@dataclass(slots=True)
class Grown:
    """Describes a ticket that may hold more than it was loaded with."""

    beyond_load_bytes: Bytes
    shrinks_from: Instant  # word of less that arrives sooner was sent before the last growth


@dataclass(slots=True)
class Lease:
    """Describes the terms on which a process outside Serve holds the ticket (A15)."""

    terms: LeaseConditions
    ends: Instant
    is_measured: bool = False  # the agent of its node reads the process that holds it
    foreign_before: Sizes = field(default_factory=dict)  # the least since it began, by device


@dataclass(slots=True)
class Ticket:
    """Describes one ticket: the books' part of it, its configuration, and what happens to it.

    Rules read these fields and never write them. What the books depend on changes through the
    Ledger (`state`, `granted`, `measured`, `home`, `pinned`, `client`, the scratch of a dispatch
    lock), the rest through the methods below. What only means something together is one optional
    record, so that beginning or ending it sets or drops all of it.
    """

    id: TicketId
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
    has_drafter: bool = True  # unless it has given that back, or its need has none
    drafter_revoked_at: Instant | None = None
    granted: Sizes = field(default_factory=dict)
    measured: Sizes = field(default_factory=dict)
    home: Sizes = field(default_factory=dict)  # granted while awake; an asleep ticket wakes there
    ram_bytes: Bytes = Bytes(0)  # of its process beside a GPU: see tickets/process_ram.py

    # What the configuration says of its model.
    role: str = ""
    role_rank: int = 0
    pinned: bool = False
    allow_oversize: bool = False
    keep_warm: Span = Span(-1)
    dispatch_lock: str = ""
    shared_scratch_bytes: Bytes = Bytes(0)  # of the reserve of its lock, on each of its devices

    # What its holder asked for.
    gang: tuple[TicketId, ...] = ()
    split: Split = Split.NONE
    client: Client = ANYBODY  # on whose account it is: see Ledger.bill_to
    lease: Lease | None = None  # None: its holder is a replica

    # What its holder said last.
    is_prefetch: bool = False  # brought in unasked, and not used yet (C11)
    priority: Priority = Priority.NORMAL  # of its last request; see ranking.effective_priority
    inflight: int = 0
    uses_count: int = 0  # so far, under this ticket
    last_used: Instant = Instant(0)
    warm_until: Instant = Instant(0)  # a client asked that it does not count as idle before
    less_since: Instant | None = None  # its holder says that it has less than it was granted

    # What happens to it.
    load: Load | None = None  # None: nothing was granted yet
    wakes_count: int = 0  # granted so far; above zero the present load is a wake
    growth: PendingGrowth | None = None
    grown: Grown | None = None  # None: it never grew
    # Its floor was lowered, or it was unloaded during its load: once idle it goes to its floor
    settles: bool = False
    unload_tries_count: int = 0  # heartbeats that decide on an unload that found it in use
    leaving: Reason | None = None  # why it drains or is reclaimed
    revoked_at: Instant | None = None  # when it was last asked to leave, unless it declined
    revocation: Revocation | None = None  # None unless it drains
    declined_until: Instant = Instant(0)  # it was busy when asked, and is left alone until then
    kill_at: Instant = Instant(0)  # in RECLAIMING: its engine is killed again then
    reclaim_late: bool = False  # reclaim took too long; its holder is quarantined

    # Made once, because each rule asks for them.
    model_name: ModelName = field(init=False)
    model_key: ModelKey = field(init=False)  # what was learned of it is kept under this

    def __post_init__(self) -> None:
        self.model_name = ModelName(self.capability, self.model)
        self.model_key = ModelKey(self.capability, self.model, self.settings_key)

    # -- configuration -------------------------------------------------------------------------

    def configure(self, role: str, rank: int, *, allow_oversize: bool, keep_warm: Span) -> None:
        """Takes over what the table says of its model now."""
        self.role = role
        self.role_rank = rank
        self.allow_oversize = allow_oversize
        self.keep_warm = keep_warm

    def expire_at_once(self) -> None:
        """Lets it go as soon as it is idle: its model is no longer in the table."""
        self.keep_warm = Span(0)

    def settle_when_idle(self, settles: bool) -> None:
        """Notes whether it goes down to its floor once it is idle."""
        self.settles = settles

    def try_unload(self, tries_count: int) -> None:
        """Has so many heartbeats decide whether it is unloaded by hand. 0: no unload is asked for,
        or it has been decided on."""
        self.unload_tries_count = tries_count

    # -- use -----------------------------------------------------------------------------------

    def set_priority(self, priority: Priority) -> None:
        """Takes the priority of its last request."""
        self.priority = priority

    def note_prefetch(self, is_prefetch: bool) -> None:
        """Notes whether no request has asked for it yet."""
        self.is_prefetch = is_prefetch

    def begin_first_use(self) -> None:
        """Counts the use that a load was for: it is in use until its holder says otherwise."""
        self.inflight = 1
        self.uses_count += 1

    def note_inflight(self, count: int) -> None:
        """Takes the holder's word on its requests in flight."""
        self.inflight = count

    def note_wanted(self, now: Instant) -> None:
        """Keeps it warm from now on, as after a use."""
        self.last_used = now

    def note_use(self, inflight: int, priority: Priority, last_used: Instant) -> None:
        """Takes the holder's word on use; a later use that is known already stands."""
        self.inflight = inflight
        self.priority = priority
        self.last_used = Instant(max(self.last_used, last_used))

    def note_warm_until(self, until: Instant) -> None:
        """Takes the holder's word on how long a client keeps it from counting as idle."""
        self.warm_until = until

    def note_uses_count(self, count: int) -> int:
        """Takes how often it was used so far, and returns how many of these uses are new."""
        more = count - self.uses_count
        self.uses_count = count
        return more

    # -- loads and leases ----------------------------------------------------------------------

    @property
    def last_load(self) -> Load:
        """Returns its present or last load, which every ticket past the queue has."""
        assert self.load is not None, f"{self.id} was never granted"
        return self.load

    def begin_load(self, load_by: Instant, predicted: Span) -> None:
        """Forgets the load before: the grant of another one, or of a wake, has been made."""
        self.load = Load(load_by, predicted)

    def count_wake(self) -> None:
        """Makes the load that begins now a wake."""
        self.wakes_count += 1

    def end_load(self, took: Span, now: Instant) -> None:
        """Notes that it serves."""
        load = self.last_load
        load.took = took
        load.resident_since = now
        load.readings_count = 0
        self.last_used = now

    def note_reading(self, held: Bytes) -> None:
        """Counts a reading of what it holds while it serves."""
        load = self.last_load
        load.readings_count += 1
        load.peak_bytes = max(load.peak_bytes, held)

    def note_settled(self) -> Bytes:
        """Notes, at the first reading that finds it idle after a request, what it needed since its
        load; returns that, and 0 at any other. A process that was woken may have kept more than it
        needs, so only a load counts."""
        load = self.last_load
        if load.settled_bytes is not None or self.inflight or not self.uses_count:
            return Bytes(0)
        load.settled_bytes = Bytes(0) if self.wakes_count else load.peak_bytes
        return load.settled_bytes

    def forget_peak(self) -> None:
        """Has its peak measured anew, as after a load."""
        load = self.last_load
        load.peak_bytes = Bytes(0)
        load.readings_count = 0

    def bind_lease(
        self, terms: LeaseConditions, ends: Instant, priority: Priority, rank: int
    ) -> None:
        """Makes it the ticket of a lease, which no idle time ends."""
        before = self.lease or Lease(terms, ends)
        self.lease = replace(before, terms=terms, ends=ends)
        self.priority = priority
        self.role_rank = rank
        self.keep_warm = Span(-1)

    def note_lessee(self, foreign: Sizes, is_measured: bool) -> None:
        """Notes a reading of a lease's devices: what is foreign there, and whether the process that
        holds the lease was measured."""
        assert self.lease is not None
        before = self.lease.foreign_before
        least = {d: min(size, before.get(d, size)) for d, size in foreign.items()}
        self.lease = replace(self.lease, is_measured=is_measured, foreign_before=before | least)

    def reduce_need(self, size: Bytes) -> None:
        """Has a queued lease ask for fewer bytes."""
        self.need = Need(size)

    @property
    def frees(self) -> bool:
        """Says whether it is the lease of `arbiter free`."""
        return self.lease is not None and self.lease.terms.frees

    @property
    def is_host_copy(self) -> bool:
        """Says whether it is the lease of a copy that engines share in host RAM (D4)."""
        return self.lease is not None and self.lease.terms.on_host

    # -- growth --------------------------------------------------------------------------------

    @property
    def grows_bytes(self) -> Bytes:
        """Returns the bytes that it waits for on top of what it has; 0 when it waits for none."""
        return self.growth.more_bytes if self.growth else Bytes(0)

    def ask_growth(self, more: Bytes, until: Instant) -> None:
        """Notes what its holder wants, instead of anything it wanted before."""
        self.growth = PendingGrowth(more, until) if more > 0 else None

    def end_growth(self) -> None:
        """Notes that it waits for nothing more: it was granted, refused, or not wanted."""
        self.growth = None

    def note_grown(self, more: Bytes, shrinks_from: Instant) -> None:
        """Counts what it was granted beyond its load; word of less counts from `shrinks_from`."""
        before = self.grown.beyond_load_bytes if self.grown else 0
        self.grown = Grown(Bytes(before + more), shrinks_from)
        self.less_since = None

    def note_shrunk(self, less: Bytes) -> None:
        """Counts what it gave back of what it had grown by."""
        if self.grown:
            self.grown.beyond_load_bytes = Bytes(max(0, self.grown.beyond_load_bytes - less))

    def note_drafter_revoked(self, now: Instant) -> None:
        """Notes when its holder was asked to go on without its drafter."""
        self.drafter_revoked_at = now

    def note_drafter_gone(self) -> None:
        """Notes that its process runs without a drafter until its end."""
        self.has_drafter = False

    @property
    def drafter_bytes(self) -> Bytes:
        """Returns the part of its bytes that a drafter takes."""
        return self.need.drafter_bytes if self.has_drafter else Bytes(0)

    def note_less_since(self, since: Instant | None) -> None:
        """Notes from when on its holder says that it has less; None: it has all of it."""
        self.less_since = since

    def note_ram(self, held: Bytes) -> None:
        """Notes the RAM that its process holds beside a GPU."""
        self.ram_bytes = held

    # -- leaving -------------------------------------------------------------------------------

    def note_revoked(self, now: Instant) -> None:
        """Begins to time how long its bytes take to come back."""
        self.revoked_at = now

    def begin_revocation(self, reason: Reason, to: Tier, barrier_until: Instant) -> None:
        """Notes what its holder is asked as it begins to drain."""
        self.leaving = reason
        self.revocation = Revocation(to, barrier_until)

    def end_revocation(self) -> None:
        """Forgets the revoke: the ticket sleeps, or serves on."""
        self.leaving = self.revocation = None

    def note_busy(self, inflight: int, now: Instant, left_alone_until: Instant) -> None:
        """Notes that its holder was busy and declined the revoke."""
        self.inflight = inflight
        self.last_used = now
        self.declined_until = left_alone_until

    def forget_revoked(self) -> None:
        """Stops the clock of `note_revoked`: its bytes stay."""
        self.revoked_at = None

    def note_leaving(self, reason: Reason) -> None:
        """Notes why it is reclaimed; the reason of an earlier revoke stands."""
        self.leaving = self.leaving or reason

    @property
    def leaving_reason(self) -> Reason:
        """Returns why it drains or is reclaimed, which every ticket in these states has."""
        assert self.leaving is not None, f"{self.id} does not leave"
        return self.leaving

    def note_unloading(self, now: Instant) -> None:
        """Notes that nothing is in flight any more and its engine lets go."""
        if self.revocation and self.revocation.unloading_since is None:
            self.revocation.unloading_since = now

    def note_held_before_sleep(self, held: Bytes) -> None:
        """Notes what its devices held when it was asked to leave."""
        assert self.revocation is not None
        self.revocation.held_before_bytes = held

    def claim_sleep(self, now: Instant, held: Bytes) -> None:
        """Notes the holder's word that it sleeps, and the bytes that must now be seen to fall.
        `held`: measured on its devices now."""
        assert self.revocation is not None
        before = Bytes(max(self.granted_home_bytes, self.revocation.held_before_bytes, held))
        self.revocation.sleep = ClaimedSleep(now, before, held)

    def note_held_since_sleep(self, now: Instant, held: Bytes) -> None:
        """Notes what a reading finds on its devices while its sleep waits for confirmation."""
        claimed = self.claimed_sleep
        if claimed is not None and (claimed.fell_at is None or held < claimed.least_bytes):
            claimed.least_bytes, claimed.fell_at = held, now

    @property
    def claimed_sleep(self) -> ClaimedSleep | None:
        """Returns the sleep that waits for its confirmation, if there is one."""
        return self.revocation.sleep if self.revocation else None

    def kill_again_at(self, at: Instant) -> None:
        """Sets when its engine is killed again, unless its bytes are back by then."""
        self.kill_at = at

    def note_late_reclaim(self) -> None:
        """Puts its holder in quarantine: its bytes are not counted on any more."""
        self.reclaim_late = True

    # -- bytes ---------------------------------------------------------------------------------

    def charge(self, device: DeviceId) -> Bytes:
        """Returns its bytes on the books of a device; 0 in states that hold none."""
        if self.state in UNCHARGED:
            return Bytes(0)
        held = self.measured.get(device, NONE)
        granted = self.granted.get(device, NONE)
        if self.dispatch_lock:
            held = Bytes(held - self.scratch_in_use(device))
        return held if held > granted else granted

    def scratch_in_use(self, device: DeviceId) -> Bytes:
        """Returns the part of its measured bytes that the shared reserve stands for."""
        if not self.dispatch_lock or device == host_device(self.node):
            return Bytes(0)
        beyond_grant = max(0, self.measured.get(device, 0) - self.granted.get(device, 0))
        return Bytes(min(self.shared_scratch_bytes, beyond_grant))

    @property
    def devices(self) -> set[DeviceId]:
        """Returns the devices on which it was granted or measured bytes."""
        return self.granted.keys() | self.measured.keys()

    @property
    def granted_home_bytes(self) -> Bytes:
        """Returns the bytes that it was granted while awake, over the devices of its home."""
        return Bytes(sum(self.home.values()))

    @property
    def measured_home_bytes(self) -> Bytes:
        """Returns the bytes that it is measured to hold on the devices of its home."""
        return Bytes(sum(self.measured.get(d, 0) for d in self.home))
