"""Words that events and rules share: what may be said of a device, a model, a request."""

from dataclasses import dataclass
from enum import Enum, IntEnum

from arbiter.units import Bytes, DeviceId, Span


class DeviceKind(Enum):
    GPU = "gpu"
    CPU = "cpu"  # a budget of host RAM that stands in for a device on a node without one
    HOST = "host"  # host RAM for sleeping weights, caches and page pools


class Priority(IntEnum):
    """How urgent a request is (C2): the lowest number goes first. A model carries that of its
    last request."""

    URGENT = 1
    HIGH = 5
    NORMAL = 10
    LOW = 20
    BATCH = 40


class Level(IntEnum):
    """How short of real memory a device is (C5)."""

    NOMINAL = 0
    LOW = 1
    CRITICAL = 2


class Floor(Enum):
    """How far a model may fall (D1)."""

    COLD = "cold"
    HOST = "host"  # asleep at least
    DEVICE = "device"


class Split(Enum):
    """How a model larger than one device may lie on several (B5)."""

    NONE = "none"
    EQUAL = "equal"  # tensor parallel
    PROPORTIONAL = "proportional"  # layers by what each device has free


class Phase(Enum):
    """What a holder says of one of its tickets. The arbiter's own states are in ledger.State."""

    LOADING = "loading"
    RESIDENT = "resident"
    DRAINING = "draining"  # barrier up, requests still in flight
    UNLOADING = "unloading"  # nothing in flight, engine going to sleep or away
    ASLEEP = "asleep"


@dataclass(frozen=True, slots=True)
class Client:
    """On whose account something happens (C10)."""

    tenant: str = "default"  # of the API key, so nobody can choose it
    name: str = ""  # as the client calls itself (`x_client_id`), which it can


ANYBODY = Client()  # of whom nothing is known


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    device: DeviceId
    size_bytes: Bytes


@dataclass(frozen=True, slots=True)
class Need:
    """Peak bytes of one model on one device, by part (A3)."""

    weights_bytes: Bytes
    working_bytes: Bytes = Bytes(0)  # KV cache and activations
    scratch_bytes: Bytes = Bytes(0)
    context_bytes: Bytes = Bytes(0)  # what a live but empty engine process holds
    drafter_bytes: Bytes = Bytes(0)  # a drafter's weights and workspace in the same process (F9)
    host_bytes: Bytes = Bytes(0)  # charged to host RAM while asleep; 0 means it cannot sleep
    # What it will take however little of it was seen in use: weights, and the KV cache an engine
    # was told to have, which it fills behind its first answers. Nothing less is learned.
    least_bytes: Bytes = Bytes(0)

    @property
    def device_bytes(self) -> Bytes:
        return Bytes(
            self.weights_bytes
            + self.working_bytes
            + self.scratch_bytes
            + self.context_bytes
            + self.drafter_bytes
        )


@dataclass(frozen=True, slots=True)
class LeaseConditions:
    """On what terms a process outside Serve holds device memory (A15)."""

    tenant: str
    term: Span  # until it ends whatever the heartbeats say; what is left of it when repeated
    notice: Span  # from being asked for the bytes until it must be gone
    preemptible: bool = False  # may be asked for its bytes so that others may come


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model of a capability, as configured."""

    name: str
    keep_warm: Span  # idle time after which it goes with nobody asking; negative: never
    pinned: bool = False  # never a victim
    allow_oversize: bool = False  # loads even where it is larger than the whole budget (B6)
    dispatch_lock: str = ""  # its engine computes only while it holds this lock of its node
    shared_scratch_bytes: Bytes = Bytes(0)  # beyond its ticket, while it holds that lock (B2)


@dataclass(frozen=True, slots=True)
class CapabilitySpec:
    name: str
    role: str  # a key of policies.ROLES
    engine: str
    models: tuple[ModelSpec, ...]
    downscale_to_zero: Span
    is_external: bool = False  # somebody else says what is resident; requests load nothing


# -- from node agents -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    device: DeviceId
    kind: DeviceKind
    total_bytes: Bytes
    name: str = ""  # of a GPU: its kind, as NVML names it
    uuid: str = ""  # of a GPU: this very card; `device` is where it is counted
