"""Names what the configuration and people set, ask for and tell."""

from dataclasses import dataclass

from arbiter.core.types import CapabilitySpec, Floor, Level, ModelName, Priority
from arbiter.units import Bytes, Span, TicketId


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
