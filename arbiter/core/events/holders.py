"""Names what holders ask for and tell of their tickets, in uses."""

from dataclasses import dataclass

from arbiter.core.histogram import HistogramCounts
from arbiter.core.types import (
    ANYBODY,
    NO_HISTORY,
    Client,
    DeviceBytes,
    LeaseConditions,
    LeaseHistory,
    ModelName,
    Need,
    Phase,
    Priority,
    Split,
)
from arbiter.units import Bytes, HolderId, NodeId, Span, TicketId


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
    stay_warm: Span = Span(0)  # from now, in which it does not count as idle: a client asked so
    need_is_explicit: bool = False  # the configuration gives its need
    has_slept: bool = False  # under this ticket, so a load of it is a wake


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
    # The sender, which must be the ticket's own holder; None: not said.
    holder: HolderId | None = None


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
    # The sender, which must be the ticket's own holder; None: not said.
    holder: HolderId | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """Says that a load or wake has finished and the model serves."""

    ticket: TicketId
    took: Span
    verified: bool = True  # False: its probe differed after the wake, so it was loaded from disk
    is_used: bool = True  # False: no request waits for it; a person, a pin or the arbiter asked


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
    # The sender, which must be the ticket's own holder; None: not said.
    holder: HolderId | None = None


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
