"""Defines the nouns that events and rules share: devices, models, priorities, needs, clients."""

from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import NamedTuple

from arbiter.units import Bytes, DeviceId, Span


class ModelName(NamedTuple):
    """Names one model of one capability.

    A named tuple, because every rule looks tables up by it: it is made and hashed in a fifth of
    the time that a frozen dataclass takes, and plain rows of saved state compare equal to it."""

    capability: str
    model: str

    @property
    def path(self) -> str:
        """Returns `capability/model`."""
        return f"{self.capability}/{self.model}"


class DeviceKind(Enum):
    """Names what kind of memory a device is."""

    GPU = "gpu"
    CPU = "cpu"  # a budget of host RAM that stands in for a device on a node without one
    HOST = "host"  # host RAM for sleeping weights, caches and the pool


class Priority(IntEnum):
    """Says how urgent a request is (C2): the lowest number goes first. A model carries that of its
    last request."""

    URGENT = 1
    HIGH = 5
    NORMAL = 10
    LOW = 20
    BATCH = 40


class Level(IntEnum):
    """Says how short of real memory a device is (C5)."""

    NOMINAL = 0
    LOW = 1
    CRITICAL = 2


class Floor(Enum):
    """Says how far a model may fall (D1)."""

    COLD = "cold"
    HOST = "host"  # asleep at least
    DEVICE = "device"


class GrantCheck(Enum):
    """Says whether an engine may be spawned under a ticket (A3)."""

    GRANTED = "granted"
    NOT_GRANTED = "not_granted"
    ENDED = "ended"  # it was granted, and has been given back or taken away since
    SETTLING = "settling"  # a holder of the last epoch is not back; the ticket may be its own


class Split(Enum):
    """Says how a model larger than one device may lie on several (B5)."""

    NONE = "none"
    EQUAL = "equal"  # tensor parallel
    PROPORTIONAL = "proportional"  # layers by what each device has free


class Phase(Enum):
    """Names what a holder says of a ticket. The arbiter's own states are in
    records/ticket.State."""

    LOADING = "loading"
    RESIDENT = "resident"
    DRAINING = "draining"  # barrier up, requests still in flight
    UNLOADING = "unloading"  # nothing in flight, engine going to sleep or away
    ASLEEP = "asleep"


@dataclass(frozen=True, slots=True)
class Client:
    """Names on whose account something happens (C10)."""

    tenant: str = "default"  # of the API key, so no caller can choose it
    name: str = ""  # as the client calls itself (`x_client_id`), which it can


ANYBODY = Client()  # nothing is known of the client


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """Gives an amount of bytes on one device."""

    device: DeviceId
    size_bytes: Bytes


@dataclass(frozen=True, slots=True)
class Need:
    """Gives the peak bytes of one model on one device, by part (A3)."""

    weights_bytes: Bytes
    working_bytes: Bytes = Bytes(0)  # KV cache and activations
    scratch_bytes: Bytes = Bytes(0)
    context_bytes: Bytes = Bytes(0)  # what a live but empty engine process holds
    drafter_bytes: Bytes = Bytes(0)  # a drafter's weights and workspace in the same process (F9)
    host_bytes: Bytes = Bytes(0)  # charged to host RAM while asleep; 0 means it cannot sleep
    # What it will take however little of it was seen in use: weights, and the KV cache an engine
    # was told to have, which it fills behind its first answers. Nothing less is learned.
    least_bytes: Bytes = Bytes(0)
    # What the context is on a GPU, where that is an estimate; 0: the engine computes on none
    gpu_context_bytes: Bytes = Bytes(0)

    @property
    def device_bytes(self) -> Bytes:
        """Returns the sum of the parts that a device holds."""
        return Bytes(
            self.weights_bytes
            + self.working_bytes
            + self.scratch_bytes
            + self.context_bytes
            + self.drafter_bytes
        )

    def on_gpu(self) -> "Need":
        """Returns what the model takes where its device is a GPU."""
        return replace(self, context_bytes=max(self.context_bytes, self.gpu_context_bytes))


LEASE = "lease"  # the capability and the role every lease has


@dataclass(frozen=True, slots=True)
class LeaseConditions:
    """Gives the terms on which a process outside Serve holds device memory (A15)."""

    tenant: str
    term: Span  # until it ends whatever the heartbeats say; what is left of it when repeated
    notice: Span  # from being asked for the bytes until it must be gone
    preemptible: bool = False  # may be asked for its bytes so that others may come
    # `arbiter free`: idle models leave for it at once, none in use does, and they return after it
    frees: bool = False
    # A node agent's copy of a model's files in host RAM (D4): granted at once, into free host RAM,
    # or refused; it has no end of its own, and says how many engines use it
    on_host: bool = False


@dataclass(frozen=True, slots=True)
class LeaseHistory:
    """Says what the next epoch must know of a lease that began in this one (A15)."""

    foreign_before: tuple[DeviceBytes, ...] = ()  # the least that was foreign since it began
    returning: tuple[ModelName, ...] = ()  # left for it, and are loaded again after it


NO_HISTORY = LeaseHistory()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Describes one model of a capability, as configured."""

    name: str
    keep_warm: Span  # idle, it leaves after so long by itself; negative: never
    pinned: bool = False  # never a victim
    allow_oversize: bool = False  # loads even where it is larger than the whole budget (B6)
    dispatch_lock: str = ""  # its engine computes only while it holds this lock of its node
    shared_scratch_bytes: Bytes = Bytes(0)  # beyond its ticket, while it holds that lock (B2)
    floor: Floor = Floor.COLD  # how far it may fall, unless a person has set another (D1)
    hours: str = ""  # outside of which it is not loaded (C13); empty: none
    batch_hours: str = ""  # the same for batch work; empty: those of the settings
    is_optional: bool = False  # loads into free room or not at all, as a prefetch does (F7)


@dataclass(frozen=True, slots=True)
class CapabilitySpec:
    """Describes one capability, as configured."""

    name: str
    role: str  # a key of policies.ROLES
    engine: str
    models: tuple[ModelSpec, ...]
    downscale_to_zero: Span
    is_external: bool = False  # floors alone say what is resident; requests load nothing


# -- from node agents -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """Describes one device, as its node agent introduces it."""

    device: DeviceId
    kind: DeviceKind
    total_bytes: Bytes
    name: str = ""  # of a GPU: its kind, as NVML names it
    uuid: str = ""  # of a GPU: this very card; `device` is where it is counted
