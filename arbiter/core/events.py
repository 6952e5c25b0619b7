"""Names what happened. The shell turns calls, timers and node readings into these events; the core
reads them.

Holders speak of *use*, node agents of *bytes*, and neither speaks of the other.
"""

from dataclasses import dataclass

from arbiter.core.histogram import HistogramCounts
from arbiter.core.types import (
    ANYBODY,
    NO_HISTORY,
    CapabilitySpec,
    Client,
    DeviceBytes,
    DeviceSpec,
    Floor,
    LeaseConditions,
    LeaseHistory,
    Level,
    ModelName,
    Need,
    Phase,
    Priority,
    Split,
)
from arbiter.units import Bytes, Content, DeviceId, HolderId, NodeId, Span, TicketId


@dataclass(frozen=True, slots=True)
class CapabilitiesSet:
    """Brings the configuration's whole table; it replaces the table before. Held tickets and
    capabilities that were registered from Python stay. The core raises CapabilityConflict for a
    table that differs from a registered capability."""

    capabilities: tuple[CapabilitySpec, ...]


@dataclass(frozen=True, slots=True)
class CapabilityRegistered:
    """Adds one capability from Python until it is unregistered, or repeats one. The core raises
    CapabilityConflict for a different one of the same name."""

    capability: CapabilitySpec


@dataclass(frozen=True, slots=True)
class CapabilityUnregistered:
    """Removes a capability that was registered from Python. The core raises UnknownCapability for
    any other name."""

    capability: str


@dataclass(frozen=True, slots=True)
class DeviceUnreadable:
    """The node has this device, and the driver gives no answer for it at the moment."""

    device: DeviceId
    cause: str


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """Introduces a node and its devices. The node agent repeats it after each restart of its own,
    and when a device comes or goes. An `unreadable` device has not gone, even if `devices` lacks
    it."""

    node: NodeId
    devices: tuple[DeviceSpec, ...]
    unreadable: tuple[DeviceUnreadable, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeLost:
    """Says that a node is gone, with its devices and every engine on it."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class ForeignProcess:
    """A process that holds memory of a GPU and belongs to no ticket."""

    pid: int
    name: str  # empty if the agent cannot see the process
    size_bytes: Bytes


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """Describes the memory of one device as the kernel or NVML reports it."""

    device: DeviceId
    free_bytes: Bytes  # physically free, as the kernel or NVML says
    foreign_bytes: Bytes  # used by processes that are not engines opened by this agent
    exact: bool = True  # False: foreign bytes inferred from the device total, not per process
    foreign_processes: tuple[ForeignProcess, ...] = ()  # those NVML names, the largest


@dataclass(frozen=True, slots=True)
class EngineReading:
    """Gives the measured bytes of the process tree that runs under one ticket."""

    ticket: TicketId
    measured: tuple[DeviceBytes, ...]
    exact: bool = True  # False: counts pages that a new engine would share; teaches nothing


@dataclass(frozen=True, slots=True)
class SlabReading:
    """Describes one slab of a node's pool: what an engine keeps in host RAM beyond its own life
    (E1). The counts are of all its writers so far."""

    slab: str  # its number on the node
    content: Content
    owner: str  # capability/model
    namespace: str  # of what is in it, in short; empty before its first writer
    ticket: TicketId | None  # of the engine that writes it; None: idle
    allocated_bytes: Bytes
    limit_bytes: Bytes
    rows_count: int  # ready
    hits_count: int
    misses_count: int
    stored_count: int
    evicted_count: int
    refused_count: int  # found no room
    restored_count: int = 0  # came back from a file
    load: Span = Span(0)  # in which rows were on their way into an engine
    restore: Span = Span(0)  # in which rows were read from a file
    must_erase: bool = False  # its writer has not yet erased the rows of a removed tenant
    hot_count: int = (
        0  # of adapters: in the engine's slots now, and requests that found theirs there
    )
    hot_hits_count: int = 0


@dataclass(frozen=True, slots=True)
class ContentReading:
    """Sums up what a node's pool did with one content since its agent started, slabs that have left
    among it (E7)."""

    content: Content
    allocated_bytes: Bytes
    rows_count: int
    hits_count: int
    misses_count: int
    stored_count: int
    evicted_count: int
    refused_count: int
    restored_count: int
    saves_count: int  # slabs that went to a file
    load: Span
    restore: Span
    hot_hits_count: int = 0  # requests for which the slabs were not asked

    @property
    def hit_fraction(self) -> float | None:
        """Returns the share of the lookups that found a row; None before the first."""
        asked_count = self.hits_count + self.misses_count
        return self.hits_count / asked_count if asked_count else None


@dataclass(frozen=True, slots=True)
class SlabDropped:
    """Says that an idle slab left the pool, and why."""

    slab: str
    content: Content
    owner: str
    size_bytes: Bytes
    reason: str  # full, pressure, removed, or stale: it has no rows
    was_saved: bool = False  # to a file, from which the next engine of its settings has it (G4)


@dataclass(frozen=True, slots=True)
class HostCopyReading:
    """Gives one copy of a model's files in host RAM that engines of a node share (D4)."""

    key: str
    ticket: TicketId  # of its lease
    models: tuple[ModelName, ...]  # whose files it has
    users: tuple[TicketId, ...]  # engines that have it open
    size_bytes: Bytes
    is_leaving: bool = False  # with the last of its users


@dataclass(frozen=True, slots=True)
class Measured:
    """Brings a full reading of one node: every device, every engine alive on it, every slab of its
    pool. The reading leaves out unreadable devices: the last figures of those stand."""

    node: NodeId
    devices: tuple[DeviceReading, ...]
    engines: tuple[EngineReading, ...]
    stalled_fraction: float = 0.0  # of the last 10 s, in which some task waited for RAM (PSI)
    unreadable: tuple[DeviceUnreadable, ...] = ()
    slabs: tuple[SlabReading, ...] = ()
    dropped: tuple[SlabDropped, ...] = ()  # slabs since the last reading that was heard
    contents: tuple[ContentReading, ...] = ()  # of the slabs, and of those that left
    copies: tuple[HostCopyReading, ...] = ()  # shared by engines (D4)


@dataclass(frozen=True, slots=True)
class EngineGone:
    """Says that no process of the ticket's engine exists any more (and, by the agent's tombstone,
    none will start). `bytes_back` says whether its bytes were also seen free: at once for host RAM,
    after NVML agrees for a GPU. Sent again with True once they are."""

    node: NodeId
    ticket: TicketId
    bytes_back: bool


# -- from holders -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HeldTicket:
    """Gives a holder's own account of one ticket; rejoin and heartbeat carry one for each, in
    full."""

    ticket: TicketId
    model: str
    phase: Phase
    inflight: int
    idle: Span  # since the last request ended; 0 while one is in flight
    devices: tuple[DeviceBytes, ...]  # as granted
    need: Need
    settings_key: str = ""  # as asked, so that what is learned survives an arbiter restart
    priority: Priority = Priority.NORMAL  # of its last request
    uses_count: int = 0  # requests served under this ticket so far
    lease: LeaseConditions | None = None  # held by a process outside Serve
    lease_history: LeaseHistory = NO_HISTORY
    client: Client = ANYBODY  # of its last request


@dataclass(frozen=True, slots=True)
class Joined:
    """Introduces a holder, at its start and after each restart of the arbiter. Its process, by pid
    and start time, is known to its node's agent after it died, even while there is no arbiter."""

    holder: HolderId
    node: NodeId
    capability: str
    tickets: tuple[HeldTicket, ...]
    pid: int = 0  # 0: not said
    start_ticks: int = 0
    is_driver: bool = False  # no actor, of whose death Ray would tell (A5)


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """Describes one request that has ended (K1), never what was asked or answered."""

    ticket: TicketId | None  # None: it was refused before there was one
    model: str
    took: Span  # from its arrival at the holder, the wait for a load included
    outcome: str  # answered, left (its client went), or the code of the refusal
    request: str = ""  # the id its client knows it by
    ran: Span | None = None  # of it, since the model served; None: it did not, or only held it


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts the requests of one client that have ended (C10)."""

    client: Client
    requests_count: int


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Counts the requests that have ended one way, by how long they took (K2)."""

    outcome: str  # answered, left or refused
    took: HistogramCounts  # in seconds, over SECONDS_BOUNDS


@dataclass(frozen=True, slots=True)
class Renewed:
    """Brings a heartbeat. Level-triggered: it repeats every ticket, so any heartbeat may be lost; a
    ticket charged to this holder that is missing here was released. `runs` ended since the last
    heartbeat; `runs_dropped_count` more were dropped. `usage` and `request_times` count all of
    them."""

    holder: HolderId
    tickets: tuple[HeldTicket, ...]
    runs: tuple[FinishedRequest, ...] = ()
    runs_dropped_count: int = 0
    usage: tuple[Usage, ...] = ()
    request_times: tuple[RequestTimes, ...] = ()


@dataclass(frozen=True, slots=True)
class HolderLost:
    """Says that a holder is dead, as Ray or its node agent has seen."""

    holder: HolderId


@dataclass(frozen=True, slots=True)
class Requested:
    """Asks for the model on a device of the holder's node. For a known ASLEEP ticket it asks to be
    woken; for a ticket that waits already it says that it has become more urgent."""

    ticket: TicketId
    holder: HolderId
    capability: str
    model: str
    need: Need
    settings_key: str = ""  # learned peaks hold for one model under one set of engine settings
    need_is_explicit: bool = False
    deadline: Span | None = None  # refuse if not granted within
    attempt: int = 1  # 2 after a load that failed for memory
    priority: Priority = Priority.NORMAL
    gang: tuple[TicketId, ...] = ()  # of its holder, itself included: granted all or none
    split: Split = Split.NONE
    lease: LeaseConditions | None = None  # of a process outside Serve; `model` is what it is called
    client: Client = ANYBODY  # the client that waits for it

    @property
    def model_name(self) -> ModelName:
        """Names the model that the event is about."""
        return ModelName(self.capability, self.model)


@dataclass(frozen=True, slots=True)
class GrowthAsked:
    """Asks that a resident may hold more: longer context, more KV (A14). Answered like a request,
    under the same ticket."""

    ticket: TicketId
    more_bytes: Bytes  # 0: no longer
    within: Span  # it goes on as it is when there is no room by then
    holder: HolderId | None = (
        None  # the sender, which must be the ticket's own holder; None: not said
    )


@dataclass(frozen=True, slots=True)
class GaveBack:
    """Says that a resident holds less from now on. It says how much is held, not how much less, so
    it may be repeated; and the next heartbeats say the same, so it may be lost. What is still
    measured stays charged."""

    ticket: TicketId
    devices: tuple[DeviceBytes, ...]  # what it has now of what it was granted


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """Says that the last caller stopped waiting. A grant may already be on its way."""

    ticket: TicketId
    holder: HolderId | None = (
        None  # the sender, which must be the ticket's own holder; None: not said
    )


@dataclass(frozen=True, slots=True)
class Loaded:
    """Says that a load or wake has finished and the model serves."""

    ticket: TicketId
    took: Span
    verified: bool = True  # False: its probe differed after the wake, so it was loaded from disk


@dataclass(frozen=True, slots=True)
class LoadBroke:
    """Says that a load failed and that the holder has let go of the engine."""

    ticket: TicketId
    cause: str
    out_of_memory: bool


@dataclass(frozen=True, slots=True)
class Busy:
    """Declines a revoke that takes idle models only: requests are in flight, the model stays."""

    ticket: TicketId
    inflight: int


@dataclass(frozen=True, slots=True)
class BarrierDropped:
    """Declines a revoke after its barrier: work in flight outlived it, the model goes on."""

    ticket: TicketId
    inflight: int


@dataclass(frozen=True, slots=True)
class Slept:
    """Reports that the weights are in host RAM, which is true only once measured (D1)."""

    ticket: TicketId


@dataclass(frozen=True, slots=True)
class Released:
    """Says that the holder has let go of the engine for good. Bytes stay charged until
    EngineGone."""

    ticket: TicketId
    reason: str
    holder: HolderId | None = (
        None  # the sender, which must be the ticket's own holder; None: not said
    )


@dataclass(frozen=True, slots=True)
class Prewarmed:
    """Tells how the pre-warm of a stable prefix ended (G6), never what the prefix says."""

    holder: HolderId
    ticket: TicketId | None  # None: its model was not brought in
    model: str
    prefix: str  # `__system_prefix__`, or the hash of a request's own
    cause: str  # load, session, speech, sweep
    outcome: str  # warmed, or why not
    prompt_tokens_count: int = 0
    cached_tokens_count: int = 0  # of them, before
    took: Span = Span(0)


@dataclass(frozen=True, slots=True)
class SpeechStarted:
    """Says that a person began to speak, as voice activity detection has found."""

    holder: HolderId


# -- from the shell and people ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UnloadAsked:
    """Unloads an idle model by hand (K1, reason `manual`)."""

    ticket: TicketId


@dataclass(frozen=True, slots=True)
class PriorityRaised:
    """Asks with a more urgent priority for a queued ticket, by hand (K4)."""

    ticket: TicketId
    priority: Priority


@dataclass(frozen=True, slots=True)
class CancelAsked:
    """Refuses a queued ticket by hand (K4)."""

    ticket: TicketId


@dataclass(frozen=True, slots=True)
class FloorSet:
    """Sets how far a model may fall (D8). Raises UnknownCapability, UnknownModel."""

    capability: str
    model: str
    floor: Floor

    @property
    def model_name(self) -> ModelName:
        """Names the model that the event is about."""
        return ModelName(self.capability, self.model)


@dataclass(frozen=True, slots=True)
class LoadAsked:
    """Loads a model once by hand, with no request waiting. Raises as FloorSet, and NotResident,
    OutsideHours."""

    capability: str
    model: str

    @property
    def model_name(self) -> ModelName:
        """Names the model that the event is about."""
        return ModelName(self.capability, self.model)


@dataclass(frozen=True, slots=True)
class CompactAsked:
    """Has idle models freed and loaded again (D7): those named, else all that hold enough beyond
    their need. Raises UnknownCapability, UnknownModel. Repeated under the same name while the first
    is under way, it is done once."""

    request: str  # names the answer, a Compacted
    models: tuple[ModelName, ...] = ()


@dataclass(frozen=True, slots=True)
class PressurePushed:
    """Reports from outside that memory is short, for a term (C5)."""

    where: str  # a device, or a node: all its devices
    level: Level
    free_bytes: Bytes | None
    term: Span


@dataclass(frozen=True, slots=True)
class TenantRemoved:
    """Has everything erased that the requests of a tenant left in the pools (E6)."""

    tenant: str


@dataclass(frozen=True, slots=True)
class HoursReading:
    """Says whether hours (`ModelSpec.hours`) are open by the clock on the wall."""

    hours: str
    is_open: bool
    left: Span  # until they close or open


@dataclass(frozen=True, slots=True)
class HoursRead:
    """Brings the time of day into the core (C13): what the shell has read of hours before the core
    has the table that names them, when they open or close, and when its clock was set."""

    readings: tuple[HoursReading, ...]


@dataclass(frozen=True, slots=True)
class ClosingDown:
    """Stops all grants, refuses the queue and unloads what is idle."""


@dataclass(frozen=True, slots=True)
class TimerFired:
    """Says that the time of the last SetTimer has come."""


Event = (
    CapabilitiesSet
    | CapabilityRegistered
    | CapabilityUnregistered
    | NodeSeen
    | NodeLost
    | Measured
    | EngineGone
    | Joined
    | Renewed
    | HolderLost
    | Requested
    | GrowthAsked
    | GaveBack
    | Withdrawn
    | Loaded
    | LoadBroke
    | Busy
    | BarrierDropped
    | Slept
    | Released
    | Prewarmed
    | SpeechStarted
    | UnloadAsked
    | PriorityRaised
    | CancelAsked
    | FloorSet
    | LoadAsked
    | CompactAsked
    | PressurePushed
    | TenantRemoved
    | HoursRead
    | ClosingDown
    | TimerFired
)
