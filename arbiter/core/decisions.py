"""Names what must be done. The shell performs these decisions and reports back with events."""

from dataclasses import dataclass, field
from enum import Enum, StrEnum

from arbiter.core.types import DeviceBytes
from arbiter.errors import RequestError
from arbiter.units import Bytes, HolderId, Instant, NodeId, Span, TicketId


class Reason(Enum):
    """Says why a model leaves. The first seven are K1's reasons of `model_unload`."""

    SWAP = "swap"
    FIT = "fit"
    PRESSURE = "pressure"
    IDLE = "idle"
    MANUAL = "manual"
    SHUTDOWN = "shutdown"
    LOST = "lost"
    FAILED = "failed"
    WITHDRAWN = "withdrawn"
    TERM = "term"  # a lease has lasted as long as it may
    FREE = "free"  # for `arbiter free` (A15)
    HOURS = "hours"  # it is outside its hours (C13)
    COMPACT = "compact"  # to be loaded again, because it holds more than it needs (D7)
    REPLACED = "replaced"  # its files on disk are others now (D5)

    @property
    def only_if_idle(self) -> bool:
        """Tells a holder that has requests in flight to refuse the revoke at once (A9).

        For every other reason the holder puts the barrier up and drains. Holders, the replay and
        the simulation all ask this property, so none of them can disagree with the others.
        """
        return self in ONLY_IF_IDLE


ONLY_IF_IDLE = frozenset(
    {
        Reason.PRESSURE,
        Reason.IDLE,
        Reason.MANUAL,
        Reason.FREE,
        Reason.HOURS,
        Reason.COMPACT,
    }
)


class Tier(Enum):
    """Says where a revoked model goes."""

    ASLEEP = "asleep"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Grant:
    """Charges the ticket's bytes; the holder loads (or wakes) on these devices, by `load_by`."""

    ticket: TicketId
    devices: tuple[DeviceBytes, ...]
    load_by: Instant
    predicted: Span  # seconds the load is expected to take; 0 when nothing is known


@dataclass(frozen=True, slots=True)
class Queued:
    """Tells a holder that its ticket has joined the queue, and after how long it should serve
    (A21)."""

    ticket: TicketId
    holder: HolderId
    predicted: Span


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answers a request with an error: the cause, and when asking again makes sense, if ever."""

    ticket: TicketId
    error: RequestError


@dataclass(frozen=True, slots=True)
class Revoke:
    """Asks the holder for the bytes of a ticket. A busy holder refuses at once if
    `reason.only_if_idle`; otherwise its barrier is up until `barrier_until`. `to` says where the
    weights go. With `barrier_until` at the time of the decision it tells the holder that its ticket
    has ended: the agent ends the engine in any case."""

    ticket: TicketId
    holder: HolderId
    reason: Reason
    to: Tier
    barrier_until: Instant


@dataclass(frozen=True, slots=True)
class KillEngine:
    """Has the node agent kill what is left of this ticket's engine, let none start, and report
    EngineGone. Safe to repeat."""

    node: NodeId
    ticket: TicketId


@dataclass(frozen=True, slots=True)
class DropSlabs:
    """Has the node agent erase what engines of a removed model left in its pool (D9)."""

    node: NodeId
    owner: str  # capability/model


@dataclass(frozen=True, slots=True)
class DropTenant:
    """Has the node agent erase what requests of a tenant left in its pool until it was removed
    (E6)."""

    node: NodeId
    tenant: str
    ago: Span  # since it was removed


@dataclass(frozen=True, slots=True)
class RequestReading:
    """Has the node agent send a reading now rather than when the next is due."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class LoadModel:
    """Has a holder load a model that no request waits for: a floor asks for it, a prefetch does, or
    it made room for a load that failed (A12), or it was compacted (D7)."""

    holder: HolderId
    model: str


@dataclass(frozen=True, slots=True)
class WithdrawLoad:
    """Has a holder withdraw a load of a model for which no request waits: its floor was lowered. A
    load that has been granted goes on. Safe to repeat."""

    holder: HolderId
    model: str


@dataclass(frozen=True, slots=True)
class PurgeCaches:
    """Has a holder's engine drop what it keeps only to answer sooner (C5). Safe to repeat."""

    ticket: TicketId
    holder: HolderId
    only_slabs: bool = False  # what its slabs must give back or erase, and nothing else (E4, E6)


@dataclass(frozen=True, slots=True)
class SparedModel:
    """Names a model that a compaction left as it was, and why."""

    model: str
    ticket: TicketId | None  # None: it is not loaded
    why: str


@dataclass(frozen=True, slots=True)
class Compacted:
    """Answers a request for compaction (D7): how many models were freed, what they held beyond
    their need, and which were left alone."""

    request: str
    freed_count: int
    freed_bytes: Bytes
    spared: tuple[SparedModel, ...]
    is_finished: bool  # False: more are to be freed, or loaded again


@dataclass(frozen=True, slots=True)
class WarmPrefixes:
    """Has a holder's engine warm the stable prefixes of its model (G1). Safe to repeat."""

    ticket: TicketId
    holder: HolderId


@dataclass(frozen=True, slots=True)
class ForgetTenant:
    """Has a holder forget what it remembers of a removed tenant's requests (E6, G5)."""

    holder: HolderId
    tenant: str


@dataclass(frozen=True, slots=True)
class DropDrafter:
    """Has a holder go on with a model without its drafter, and give the drafter's bytes back."""

    holder: HolderId
    model: str


class EventKind(StrEnum):
    """Names every kind of line in the event log (K1). The value is what readers of the log see."""

    # The arbiter's process.
    ARBITER_STARTED = "arbiter_started"
    CLOSING = "closing"
    HOURS = "hours"  # of models or batch work: they have opened or closed
    NOT_RECORDED = "not_recorded"  # the recording could not be written
    STATE_NOT_KEPT = "state_not_kept"  # nor the saved state
    REGISTRATION_LOST = "registration_lost"  # the table contradicts what Python registered

    # Nodes, holders, devices.
    NODE_SEEN = "node_seen"
    NODE_SILENT = "node_silent"
    AGENT_ENDED = "agent_ended"  # and why it could not start
    DEVICE_FOUND = "device_found"
    DEVICE_LOST = "device_lost"
    DEVICE_UNREADABLE = "device_unreadable"
    DEVICE_READABLE = "device_readable"
    NODE_LOST = "node_lost"
    HOLDER_JOINED = "holder_joined"
    HOLDER_LOST = "holder_lost"
    QUARANTINE = "quarantine"
    UNCLAIMED_ENGINE = "unclaimed_engine"
    MEMORY_PRESSURE = "memory_pressure"
    PRESSURE_NOTHING_LEFT = "pressure_nothing_left"
    SLAB_DROPPED = "slab_dropped"
    TENANT_REMOVED = "tenant_removed"
    PINNED_OVERCOMMIT = "pinned_overcommit"
    LOADING_SHARE = "loading_share"  # of ten minutes: it has crossed the bound
    PIN_OVER_CAP = "pin_over_cap"

    # Tickets.
    TICKET_QUEUED = "ticket_queued"
    TICKET_WAITS = "ticket_waits"
    TICKET_GRANTED = "ticket_granted"
    TICKET_REFUSED = "ticket_refused"
    TICKET_RAISED = "ticket_raised"  # by hand
    TICKET_CLOSED = "ticket_closed"
    TICKET_REJOINED = "ticket_rejoined"
    OVERSIZE = "oversize"
    EXPLICIT_TOO_LOW = "explicit_too_low"

    # Models: loads, sleep, leaving.
    MODEL_LOAD = "model_load"
    MODEL_WAKE = "model_wake"
    MODEL_UNLOAD = "model_unload"
    MODEL_PRELOAD = "model_preload"
    MODEL_REMOVED = "model_removed"
    LOAD_FAILED = "load_failed"
    COOL_DOWN = "cool_down"
    ESTIMATE_ERROR = "estimate_error"
    WAKE_UNVERIFIED = "wake_unverified"
    WAKE_GIVEN_UP = "wake_given_up"
    NOT_ASLEEP = "not_asleep"
    EVICTION = "eviction"
    VICTIM_BUSY = "victim_busy"
    BARRIER_DROPPED = "barrier_dropped"
    REVOKE_UNANSWERED = "revoke_unanswered"
    UNLOAD_OVERDUE = "unload_overdue"
    UNLOAD_REFUSED = "unload_refused"
    MODEL_COMPACTED = "model_compacted"
    COMPACTION = "compaction"
    FLOOR_SET = "floor_set"
    GROWTH_ASKED = "growth_asked"
    GROWTH_GRANTED = "growth_granted"
    GROWTH_GIVEN_BACK = "growth_given_back"
    DRAFTER_REVOKED = "drafter_revoked"

    # Leases, and requests of users.
    LEASE_GRANTED = "lease_granted"
    LEASE_OVERDUE = "lease_overdue"
    LEASE_ENDED = "lease_ended"
    FREED_RETURN = "freed_return"  # what left for `arbiter free` is loaded again
    CAPABILITY_RUN = "capability_run"
    RUNS_DROPPED = "runs_dropped"
    PREWARM = "prewarm"  # of a stable prefix: no request of a user
    REMOTE_EGRESS = "remote_egress"  # a request is about to leave this machine
    REMOTE_ANSWER = "remote_answer"  # what came of it
    JOB_ACCEPTED = "job_accepted"  # or a batch
    JOB_BEGUN = "job_begun"
    JOB_ENDED = "job_ended"

    def __repr__(self) -> str:
        """Returns the quoted value, because recordings keep a hash of the decisions' text."""
        return repr(self.value)


@dataclass(frozen=True, slots=True)
class LogEvent:
    """Writes one line of the event log (K1). `data` holds plain values, never a prompt."""

    kind: EventKind
    data: dict[str, str | int | float | bool | None] = field(hash=False)
    ticket: TicketId | None = None
    size_bytes: Bytes | None = None
    took: Span | None = None


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Has the shell call `handle` with TimerFired at this time, unless an event comes sooner."""

    at: Instant


# Decisions that another process than the arbiter's hears of, or carries out.
OutgoingDecision = (
    Grant
    | Queued
    | Refuse
    | Revoke
    | KillEngine
    | RequestReading
    | LoadModel
    | WithdrawLoad
    | DropDrafter
    | DropSlabs
    | DropTenant
    | PurgeCaches
    | ForgetTenant
    | WarmPrefixes
)
Decision = OutgoingDecision | Compacted | LogEvent | SetTimer
