"""Words that events and rules share: what may be said of a device, a model, a request."""

from dataclasses import dataclass
from enum import Enum, IntEnum


class DeviceKind(Enum):
    GPU = "gpu"
    CPU = "cpu"  # a budget of host RAM that stands in for a device on a node without one
    HOST = "host"  # host RAM for sleeping weights, caches and page pools


class Priority(IntEnum):
    """How urgent a request is (SPEC C2): the lowest number goes first. A model carries that of its
    last request."""

    URGENT = 1
    HIGH = 5
    NORMAL = 10
    LOW = 20
    BATCH = 40


class Level(IntEnum):
    """How short of real memory a device is (SPEC C5)."""

    NOMINAL = 0
    LOW = 1
    CRITICAL = 2


class Floor(Enum):
    """How far a model may fall (SPEC D1)."""

    COLD = "cold"
    HOST = "host"  # asleep at least
    DEVICE = "device"


class Split(Enum):
    """How a model larger than one device may lie on several (SPEC B5)."""

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
    """On whose account something happens (SPEC C10)."""

    tenant: str = "default"  # of the API key, so nobody can choose it
    name: str = ""  # as the client calls itself (`x_client_id`), which it can


ANYBODY = Client()  # of whom nothing is known
