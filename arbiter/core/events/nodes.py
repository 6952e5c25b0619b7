"""Names what node agents measure and see, in bytes."""

from dataclasses import dataclass

from arbiter.core.types import DeviceBytes, DeviceSpec, ModelName
from arbiter.units import Bytes, Content, DeviceId, NodeId, Span, TicketId


@dataclass(frozen=True, slots=True)
class DeviceUnreadable:
    """Says that a node has this device, and that its driver gives no answer at the moment."""

    device: DeviceId
    cause: str


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """Introduces a node and its devices. The node agent repeats it after each restart of its own,
    and when a device comes or goes. An `unreadable` device has not gone, even if `devices` lacks
    it; a device that is `lost` has, and may come back."""

    node: NodeId
    devices: tuple[DeviceSpec, ...]
    unreadable: tuple[DeviceUnreadable, ...] = ()
    lost: tuple[DeviceId, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeLost:
    """Says that a node is gone, with its devices and every engine on it."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class ForeignProcess:
    """Describes a process that holds memory of a GPU and belongs to no ticket."""

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
    among it (E7). Of weights: shared copies, of which a row is a file and a lookup a load."""

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
    """Says that an idle slab, or a copy of a model's files, left a node's RAM, and why."""

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
    users: tuple[TicketId, ...]  # engines that have it open, and `process-...` of the group
    size_bytes: Bytes
    is_leaving: bool = False  # with the last of its users
    files_count: int = 0
    hits_count: int = 0  # loads that found it
    socket: str = ""  # at which the node agent hands it to processes of its group


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
    contents: tuple[ContentReading, ...] = ()  # of slabs and copies, and of those that left
    copies: tuple[HostCopyReading, ...] = ()  # shared by engines (D4)


@dataclass(frozen=True, slots=True)
class EngineGone:
    """Says that no process of the ticket's engine exists any more (and, by the agent's tombstone,
    none will start). `bytes_back` says whether its bytes were also seen free: at once for host RAM,
    after NVML agrees for a GPU. Sent again with True once they are."""

    node: NodeId
    ticket: TicketId
    bytes_back: bool
