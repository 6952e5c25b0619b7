"""What a policy may see and what it may answer; nothing here can change the books.

A policy is a handful of pure functions in one bundle. They return keys, never decisions: the core
finds what is lawful, sorts it by the policy's key, and acts on as much of it as is needed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from arbiter.core.records.reuse import Reuse
from arbiter.core.types import DeviceKind, Level, Priority
from arbiter.units import Bytes, DeviceId, HolderId, Instant, Span, TicketId

Key = tuple[Any, ...]  # compared with other keys of the same function only; lowest goes first


class Candidate(NamedTuple):
    """Describes a ticket that may be chosen as a victim. A named tuple, because each price needs a
    new one: of so many fields a frozen dataclass takes four times as long to make."""

    ticket: TicketId
    holder: HolderId
    role_rank: int  # policies.ROLES: lowest is evicted first
    freed_bytes: Bytes  # on the device that is short
    inflight: int  # by the holder's last word; a hint for ranking
    last_used: Instant
    reload: Span  # expected time to bring it back, in ns; 0: nothing is known of it
    priority: Priority = Priority.NORMAL  # of its last request, BATCH past its keep-warm
    now: Instant = Instant(0)
    budget_bytes: Bytes = Bytes(0)  # of that device
    recent_count: float = 0.0  # uses in the last window, older ones fading (usage_rates.UsageRates)
    lasting_count: float = 0.0  # the same in the long window
    usual_count: float = 0.0  # uses in the coming hours, as on other days (usage_rates.HourlyUsage)
    reuse: Reuse = Reuse()  # how likely it is wanted soon, and from what (reuse.ReuseLearner)
    next_use: Instant | None = None  # in a replay that knows the future; None: never, or unknown
    evict_cost_s: float = 0.0  # what losing it costs beside the reload, by its role


class Price(NamedTuple):
    """Says what losing a candidate costs. Ranks come first and are compared part by part; within
    one rank costs add up over the victims of one eviction. Before a policy's rank the core puts
    parts of its own (ranking.price_victim): whether a request waits for the ticket, whether it is
    in use, and how urgent it is."""

    rank: Key = ()
    cost_s: float = 1.0  # counts as 1e-9 at the least (ranking.COST_LEAST_S)
    why: object = None  # what the cost comes from; explain shows it with `str`


class QueuedRequest(NamedTuple):
    """Describes a ticket in the queue."""

    ticket: TicketId
    asked_at: Instant
    sequence: int  # how many had asked before; breaks ties
    priority: Priority = Priority.NORMAL
    is_warm: bool = False  # soon ready: asleep, or another load of the model is under way
    is_asleep: bool = False  # its weights are in host RAM
    virtual_start_bytes: Bytes = Bytes(0)  # what its tenant had asked for before: least goes first


class PlacementOption(NamedTuple):
    """Describes a device that a ticket could go to, because its budget holds it."""

    device: DeviceId
    need_bytes: Bytes
    free_bytes: Bytes  # negative while overcommitted
    copies_count: int = 0  # of the same model, held by others on this device
    tickets_count: int = 0  # charged there
    was_home: bool = False  # the model was here last on this node


@dataclass(frozen=True, slots=True)
class PressureMarks:
    """Gives the fractions at which memory counts as low, and as critical (C5)."""

    ram_low_fraction: float = 0.15  # of host RAM: what is available of the total is below it
    ram_critical_fraction: float = 0.05
    reserve_low_fraction: float = 0.5  # of a GPU: what is free of the reserve is below it
    reserve_critical_fraction: float = 0.2
    # Share of time in which some task waited for memory, 10 s average, is at it. systemd-oomd kills
    # at 60 % by default; a tenth of that is memory that is short already.
    stall_low_fraction: float = 0.06
    stall_critical_fraction: float = 0.6


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Describes what is known of a device's real memory."""

    kind: DeviceKind
    free_bytes: Bytes  # physically
    total_bytes: Bytes
    reserve_bytes: Bytes  # of the total, not ours to plan with; a cap on what is lent aside
    stalled_fraction: float  # of time in which tasks waited for this memory
    marks: PressureMarks = PressureMarks()


@dataclass(frozen=True, slots=True)
class IdleModel:
    """Describes a resident or asleep model that is not in use."""

    last_used: Instant
    keep_warm: Span  # negative: never goes by itself
    pinned: bool


@dataclass(frozen=True, slots=True)
class Role:
    """Says what kind of work a capability does, and so how dear its models are (C1)."""

    rank: int  # lowest is evicted first
    act: str  # what evicting one of its models does, in words
    keep_warm_s: float  # C8, unless the model or capability says otherwise
    is_spared: bool = False  # C5: pressure never evicts it
    # What evicting one of its models costs beside the reload; policies that price by cost add it.
    evict_cost_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NamedRole:
    """Describes a role of the configuration, new or in place of a role of policies/roles.py."""

    name: str
    role: Role


@dataclass(frozen=True, slots=True)
class Policies:
    """Holds one choice of each kind. Built by name in policies.bundle."""

    evict: Callable[[Candidate], Price]
    admit: Callable[[QueuedRequest], Key]
    place: Callable[[PlacementOption], Key]
    keep_warm: Callable[[IdleModel], Instant | None]  # when it leaves by itself; None: never
    roles: Mapping[str, Role]
    pressure: Callable[[MemoryReading], Level]
