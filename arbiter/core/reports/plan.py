"""The question and the answer of a dry run (K3), as data and in sentences."""

from dataclasses import dataclass
from enum import StrEnum

from arbiter.core import types
from arbiter.core.decisions import Tier
from arbiter.units import Bytes, HolderId, NodeId, Span, TicketId, human, in_seconds

COMPACTED = "compacted"  # how a victim goes, beside the tiers
GOES = {Tier.ASLEEP.value: "falls asleep", COMPACTED: "is unloaded and loaded again, smaller"}


class Answer(StrEnum):
    """Names the four answers, best first."""

    NOW = "now"
    AFTER_EVICTING = "after_evicting"
    NOT_BEFORE = "not_before"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """Describes the request of a dry run: as `Requested`, without a ticket."""

    capability: str
    model: str
    need: types.Need
    need_is_explicit: bool = False
    settings_key: str = ""
    priority: types.Priority = types.Priority.NORMAL
    client: types.Client = types.ANYBODY
    split: types.Split = types.Split.NONE
    node: NodeId | None = None  # None: any
    holder: HolderId | None = None  # None: the holder that such a request would find
    lease: types.LeaseConditions | None = None  # asks as a process outside Serve

    @property
    def name(self) -> types.ModelName:
        """Names the model."""
        return types.ModelName(self.capability, self.model)


@dataclass(frozen=True, slots=True)
class PlanVictim:
    """Describes a ticket that would leave."""

    ticket: TicketId
    capability: str
    model: str
    state: str
    freed: tuple[types.DeviceBytes, ...]  # on devices that compute
    goes: str  # asleep, gone, or compacted: gone, and loaded again beside the asker
    reload: Span  # until it would serve again; 0 when never measured
    inflight: int
    idle: Span
    priority: str  # that counts now
    tenant: str  # of the client that used it last
    client: str


@dataclass(frozen=True, slots=True)
class StayingTicket:
    """Describes a ticket that `arbiter free` may not have."""

    ticket: TicketId
    model: str
    charged: tuple[types.DeviceBytes, ...]  # on devices that compute
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Says what a request would bring about."""

    answer: Answer
    capability: str
    model: str
    need_bytes: Bytes
    node: NodeId | None
    goes_to: tuple[types.DeviceBytes, ...]  # as granted, or promised; empty when it only waits
    victims: tuple[PlanVictim, ...]
    wait: Span | None  # until its load may begin, as expected; None: nothing is known, or never
    load: Span  # from then until it serves; 0 when nothing is known
    is_resident: bool  # it serves at once
    starts_replica: bool  # a replica must start first, which takes a second or two more
    code: str | None  # of the refusal
    sentences: tuple[str, ...]  # the same for a person, a sentence each
    stays: tuple[StayingTicket, ...] = ()  # of `arbiter free`: pinned, in use, not to be had


def victim_sentence(victim: PlanVictim) -> str:
    """Says what becomes of a victim."""
    size = human(Bytes(sum(d.size_bytes for d in victim.freed)))
    back_s = in_seconds(victim.reload)
    back = f"back in {back_s:.1f} s" if victim.reload else "its reload was never measured"
    use = (
        f"{victim.inflight} requests in flight"
        if victim.inflight
        else f"idle for {in_seconds(victim.idle):.0f} s"
    )
    user = victim.client or victim.tenant
    goes = GOES.get(victim.goes, "leaves")
    return f"{victim.model} ({victim.ticket}) {goes}: {size}, {use}, last used by {user}; {back}."


def stays_sentence(stays: StayingTicket) -> str:
    """Says why a ticket stays."""
    size = human(Bytes(sum(d.size_bytes for d in stays.charged)))
    return f"{stays.model} ({stays.ticket}) stays with {size}: {stays.why}."
