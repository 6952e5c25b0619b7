"""What crosses process borders besides events: answers, commands to holders, what the arbiter is
started with, and what a node agent needs to spawn an engine.

Instants never do: a deadline travels as the Span that is left of it.
"""

import hashlib
import re
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from arbiter.core import events as ev
from arbiter.core import settings, types, view
from arbiter.core.decisions import Reason, Tier
from arbiter.core.events import CapabilitiesSet
from arbiter.core.settings import Settings, Timeouts
from arbiter.core.types import DeviceBytes
from arbiter.core.view import Policies
from arbiter.errors import ArbiterError, error_fields
from arbiter.units import Bytes, Content, Epoch, Generation, NodeId, Span, TicketId

NAME, NAMESPACE = "arbiter", "arbiter"

Plain = dict[str, Any]  # JSON-able


@error_fields
class VersionMismatch(ArbiterError):
    """Says that an arbiter of other code runs, and holders of that code live."""

    running: str
    ours: str
    holders: int

    def __str__(self) -> str:
        return (
            f"the arbiter runs {self.running} with {self.holders} holders, this is {self.ours};"
            " run `arbiter upgrade`, or stop what uses the old version"
        )


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Holds what a node agent is started with. It names modules that `arbiter` itself may not
    import."""

    zygote_module: str
    preload: tuple[str, ...] = ()
    folder: str | None = None  # of sockets; None: /tmp/arbiter-<uid>/<node>
    spares_count: int = 0  # idle Ray workers to keep at hand, see arbiter.node.spare_workers
    spares_since_unix_s: float = 0.0  # those from before have imported replaced code
    gpus: str = "arbiter.node.nvml:find_gpus"  # what finds those of a node
    pool_bytes: Bytes | None = None  # of slabs on a node; None: a tenth of its RAM; 0: no pool
    slabs_folder: str | None = None  # for files of idle slabs (G4); None: no files
    disk_bytes: Bytes | None = None  # of these files; None: see arbiter.node.slab_files; 0: none
    sweep_s: float = 300.0  # between two looks for slabs and files that have expired (G4)
    # Each has in `@TENANT` what engines copied of a tenant, which leaves with the tenant (E6).
    tenant_folders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Configuration:
    """Holds all that a person set; kept across restarts of the arbiter."""

    settings: Settings
    policies: Policies
    capabilities: CapabilitiesSet
    table: Plain = field(default_factory=dict)  # in force; handed to holders at join
    written: Plain = field(default_factory=dict)  # as the front read it from its file last
    generation: Generation = Generation(0)  # counts changes of it, by file or at runtime

    def numbered(self, generation: int) -> "Configuration":
        """This configuration as it came from a file, with its generation."""
        return replace(self, written=self.table, generation=Generation(generation))


@dataclass(frozen=True, slots=True)
class StartConfig:
    """Holds what the arbiter actor is created with. A stored configuration wins over the one in
    here."""

    configuration: Configuration
    agent: AgentSettings
    state_file: str | None = None  # None: state_path.default_path()
    event_file: str | None = None  # JSON lines, if wanted
    replay_module: str | None = None  # replays the last day (arbiter.server.day_replays), if wanted
    replay_s: float = 1_800.0  # between two such replays
    # Accounts and usage are written once in so many looks at the nodes, of which there is one a
    # second. A crash loses what came since; each write has some 100 kB.
    usage_looks_count: int = 10


@dataclass(frozen=True, slots=True)
class JoinReply:
    """Answers Joined. `timeouts`: those in force, some of which end the holder's own waits."""

    epoch: Epoch
    table: Plain
    timeouts: Timeouts


@dataclass(frozen=True, slots=True)
class Granted:
    ticket: TicketId
    devices: tuple[DeviceBytes, ...]
    load_within: Span
    predicted: Span
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class LeaseCall:
    """Says what an outside process says of its lease, in full, each time: it asks, beats and
    rejoins with the same words (A15)."""

    lease: str  # its client's name for it, one among those of the tenant
    size_bytes: Bytes
    terms: types.LeaseConditions
    label: str  # what people call it
    node: NodeId | None = None  # None: the only one there is
    pid: int | None = None  # whose tree is measured; None: the lease counts as granted, no more
    # As granted; empty while it waits. The arbiter goes by its own record and reads it no more. It
    # stays because a front of older code outlives an upgrade, and a pickle has its fields by place.
    devices: tuple[DeviceBytes, ...] = ()
    deadline: Span | None = None
    users_count: int = 0  # of a host copy: engines that have it open (D4)
    seen: str = ""  # the state it knows; answered when there is another
    wait: Span = Span(0)  # for at most this long

    @property
    def ticket(self) -> TicketId:
        return lease_ticket(self.terms.tenant, self.lease)


# What a client may name its lease: it is part of a ticket's name, so it has no separators.
LEASE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def lease_ticket(tenant: str, lease: str) -> TicketId:
    """Returns a name that no client chooses, so that none can name an engine's ticket, or another
    tenant's lease. What follows the last colon is the client's: see `LEASE_NAME`."""
    return TicketId(f"lease:{tenant}:{lease}")


@dataclass(frozen=True, slots=True)
class LeaseState:
    """Answers a LeaseCall. `state`: queued, held, leaving (the memory is to be back within `left`),
    ended."""

    ticket: TicketId
    state: str
    devices: tuple[DeviceBytes, ...] = ()
    left: Span | None = None  # until it must be gone
    reason: str | None = None  # why it is to leave, or has ended
    node: NodeId | None = None
    lapse: Span | None = None  # without a call for so long it is over


@dataclass(frozen=True, slots=True)
class RevokeCommand:
    ticket: TicketId
    reason: Reason
    to: Tier
    barrier: Span


@dataclass(frozen=True, slots=True)
class WaitEstimate:
    """Tells a queued ticket's holder how long it takes until it serves, as estimated when it joined
    the queue."""

    ticket: TicketId
    predicted: Span


@dataclass(frozen=True, slots=True)
class ReloadCommand:
    model: str


@dataclass(frozen=True, slots=True)
class WithdrawCommand:
    """Calls off a load without a request. Requests that wait for the model keep it going."""

    model: str


@dataclass(frozen=True, slots=True)
class PurgeCommand:
    """Has the ticket's engine empty its caches. `only_slabs`: its caches stay, and its slabs give
    back what they have beyond their limits and erase the rows that are to be erased."""

    ticket: TicketId
    only_slabs: bool = False


@dataclass(frozen=True, slots=True)
class ForgetTenantCommand:
    """Has the holder forget what it remembers of a tenant's requests, and its engines unload the
    tenant's own adapters."""

    tenant: str


@dataclass(frozen=True, slots=True)
class PrewarmCommand:
    """Has the ticket's engine warm the stable prefixes of its model, because a person begins to
    speak."""

    ticket: TicketId


CacheCommand = PurgeCommand | PrewarmCommand | ForgetTenantCommand


class ModelSize(Enum):
    """Names the sizes between which a resident model may change (A14)."""

    FIRST = "first"  # as it was loaded
    GROWN = "grown"
    WITHOUT_DRAFTER = "without_drafter"  # as it was loaded otherwise (F9)


@dataclass(frozen=True, slots=True)
class Resize:
    """Has the holder change the size of a resident model: by hand, or because a drafter must go."""

    model: str
    size: ModelSize


@dataclass(frozen=True, slots=True)
class ConfigChanged:
    """Tells holders that the configuration has changed."""

    table: Plain


@dataclass(frozen=True, slots=True)
class Egress:
    """Describes a request that is about to leave for a remote (J5). Has no part of the request."""

    id: str  # of this one sending; a repeated message has the same
    remote: str
    model: str
    tenant: str
    size_bytes: Bytes  # of the body
    tokens_count: int  # expected at most: prompt and answer
    money_micros: int  # millionths of the currency of the operator's prices
    most_tokens_count: int | None  # of this tenant at this remote in a day; None: no bound
    most_money_micros: int | None


@dataclass(frozen=True, slots=True)
class EgressEnd:
    """Says what came of an Egress."""

    egress: Egress
    outcome: str  # answered, refused, left, or a failure of deployments.remotes.breaker
    answer_bytes: Bytes
    prompt_tokens_count: int
    answer_tokens_count: int
    money_micros: int
    took: Span


@dataclass(frozen=True, slots=True)
class DaySpent:
    """Says what a tenant has spent at a remote today, and what requests under way have reserved."""

    tokens_count: int
    money_micros: int


Command = (
    RevokeCommand
    | WaitEstimate
    | ReloadCommand
    | WithdrawCommand
    | PurgeCommand
    | ForgetTenantCommand
    | PrewarmCommand
    | Resize
    | ConfigChanged
)


@dataclass(frozen=True, slots=True)
class SequencedCommand:
    """Holds a command with its number in the holder's mailbox; it is sent again until
    acknowledged."""

    sequence: int
    command: Command


@dataclass(frozen=True, slots=True)
class SlabRequest:
    """Names what an engine keeps in the node's pool beyond its own life (E1)."""

    content: Content
    owner: str  # capability/model: erased with it
    key: str  # an engine is lent an idle slab of the same content, owner and key, if there is one
    caps: tuple[tuple[str, float], ...] = ()  # tenants, and the part of its rows each may have (E6)

    @property
    def place(self) -> tuple[Content, str, str]:
        """Returns what has to be equal for an engine to find what another one left. A slab has one
        owner, with which it is erased, so two models with the same settings have two slabs."""
        return self.content, self.owner, self.key


@dataclass(frozen=True, slots=True)
class CopyRequest:
    """Names files of a model that engines of a node load from one copy in host RAM (D4)."""

    owner: types.ModelName
    folder: str  # of the model, or its one file
    patterns: tuple[str, ...]  # of the files in it, as for Path.glob
    for_group: bool = False  # the copy may be opened by the user's group, not by the user alone


@dataclass(frozen=True, slots=True)
class SpawnSpec:
    """Holds what the node agent passes to the zygote. Where slabs are asked for and the pool has
    room, the engine's configuration has `slabs` in addition: by content the `socket` at which the
    engine of the `ticket` is handed it, the `file` that was saved of an earlier one, and `caps` by
    tenant. Where a copy is asked for and host RAM has room, it has `copy`: the `socket` at which
    the engine is handed it, and its `key`."""

    entry: str
    config: Plain
    devices: tuple[DeviceBytes, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    slabs: tuple[SlabRequest, ...] = ()  # of different contents
    copy: CopyRequest | None = None


@dataclass(frozen=True, slots=True)
class Spawned:
    """Describes an engine's process, as the node agent tells of it. `waited`: for the copy of its
    files in host RAM, which is made once, and for a zygote; neither is a part of what a load
    takes."""

    path: str  # of its socket
    waited: Span


def agent_name(node: NodeId) -> str:
    return f"arbiter-agent-{node}"


def node_of(ray_node_id: str) -> NodeId:
    """Returns our name of a node, short enough for socket paths and tables; 48 random bits tell
    nodes apart."""
    return NodeId(ray_node_id[:12])


def package_version() -> str:
    try:
        return version("serve-arbiter")
    except PackageNotFoundError:  # run from a checkout
        return "0.0.0+checkout"


def messages() -> list[Any]:
    """Returns every dataclass that crosses a process border or is kept in the state file, with the
    dataclasses of its fields."""
    names = [v for where in (types, ev, settings, view) for v in vars(where).values()]
    kinds = [v for v in (*globals().values(), *names) if isinstance(v, type) and is_dataclass(v)]
    return sorted(set(kinds), key=lambda kind: kind.__name__)


def protocol_hash() -> str:
    """Changes with any field of any message, so that old code never talks to new."""
    lines = (
        f"{k.__name__}({','.join(f'{f.name}:{f.type}' for f in fields(k))})" for k in messages()
    )
    return hashlib.sha256(";".join(lines).encode()).hexdigest()[:12]


def identity() -> str:
    """Returns package version and protocol, as compared in the handshake."""
    return f"{package_version()}/{protocol_hash()}"
