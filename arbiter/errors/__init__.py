"""
ArbiterError
  RequestError            the caller can act on it; crosses process borders; maps to one HTTP status
    UnknownCapability     404  not registered; names what is
    UnknownModel          404  the capability has no such model; names what it has
    UnknownRole           400  a capability names a role that no policy ranks; names those it knows
    UnknownTicket         404  neither on the books nor remembered
    CapabilityConflict    409  the same name registered differently
    NeverFits             507  larger than the whole budget: change the model or the budget
    OutsideHours          503  its model is not loaded at this time of day; says when it is
    DeadlineUnmet         503  cannot be, or was not, ready before its deadline
    QueueFull             429  the bounded queue of a model or of the arbiter is full
    ModelCoolingDown      503  its last load failed; says why and when to come back
    LoadFailed            503  the load behind this ticket failed
    EngineLost            503  the engine died under this request
    ReplicaLost           503  the replica that serves the model died; it is an EngineLost
    CapabilityFailed      503  its deployment is broken or has no application
    LeaseRefused          400  the terms of a lease, or its process, cannot be accepted
    UnknownLease          404  no such lease of this tenant
    HostRamShort          409  host RAM has no room for a copy of a model's files
    UnknownHostCopy       404  no node has such a copy
    GrowthRefused         409  a resident model would wait for bytes behind another that waits too
    SettingsConflict      409  the settings were changed by another caller meanwhile
    NotResident           409  a control plane decides what is resident, and this model is not
    RolePinned            409  a pinned model has the one place of its role on the node
    UnderPressure         503  real memory is short on every device that the model could go to
    GpusLost              503  its node has lost GPUs, and what is left does not suffice
    QuotaExceeded         429  more than this tenant or client may have at once
    RemoteBudgetSpent     429  a tenant's day at a remote has no room for this request
    EgressRefused         503  what leaves this machine cannot be written down, so nothing leaves
    EgressUnsettled       503  a cost is not written down; it stays reserved until told again
    TenantCoolingDown     429  on average the tenant holds more than it may, until that has fallen
    HolderQuarantined     503  this holder did not give memory back
    ArbiterClosing        503  shutdown has begun
    ArbiterUnavailable    503  the arbiter cannot be reached, so nothing may be loaded
    TicketClosed          409  the ticket has ended: released, killed or withdrawn
    TicketNotQueued       409  only a queued ticket can be raised or cancelled
    RequestCancelled      410  an operator has ended its wait
    TicketNotGranted      409  an engine was to be spawned under a ticket without a grant
    StaleEpoch            409  message of an earlier epoch of the arbiter
  ActorAbsent             neither arbiter nor agent of this name runs in the cluster
  AgentAway               a node's agent did not answer just now; the arbiter asks it again
  SlabUnusable            a file that should hold a slab is none, or cannot be mapped
  RowMisused              a slab's writer pinned, unpinned or freed a row out of turn: its bug
  StateFileInUse          another running system has the state file; names both ways out
  LedgerBroken            a bug in this package; the actor must crash, never repair
"""

from arbiter.errors.base import (
    ArbiterError,
    RequestError,
    error_fields,
)
from arbiter.errors.host_memory import (
    HostRamShort,
    RowMisused,
    SlabUnusable,
    UnknownHostCopy,
)
from arbiter.errors.models import (
    ENGINE_DIED,
    FILES_REPLACED,
    NAMES_TOLD,
    TRIED_AGAIN,
    CapabilityConflict,
    CapabilityFailed,
    EngineLost,
    LoadFailed,
    ModelCoolingDown,
    NotResident,
    ReplicaLost,
    RolePinned,
    UnknownCapability,
    UnknownModel,
    UnknownRole,
)
from arbiter.errors.service import (
    NEVER_JOINED,
    ActorAbsent,
    AgentAway,
    ArbiterClosing,
    ArbiterUnavailable,
    LedgerBroken,
    SettingsConflict,
    StaleEpoch,
    StateFileInUse,
)
from arbiter.errors.tenants import (
    EgressRefused,
    EgressUnsettled,
    HolderQuarantined,
    LeaseRefused,
    QuotaExceeded,
    RemoteBudgetSpent,
    TenantCoolingDown,
    UnknownLease,
)
from arbiter.errors.tickets import (
    DeadlineUnmet,
    GpusLost,
    GrowthRefused,
    NeverFits,
    OutsideHours,
    QueueFull,
    RequestCancelled,
    TicketClosed,
    TicketNotGranted,
    TicketNotQueued,
    UnderPressure,
    UnknownTicket,
)

__all__ = [
    "ENGINE_DIED",
    "FILES_REPLACED",
    "NAMES_TOLD",
    "NEVER_JOINED",
    "TRIED_AGAIN",
    "ActorAbsent",
    "AgentAway",
    "ArbiterClosing",
    "ArbiterError",
    "ArbiterUnavailable",
    "CapabilityConflict",
    "CapabilityFailed",
    "DeadlineUnmet",
    "EgressRefused",
    "EgressUnsettled",
    "EngineLost",
    "GpusLost",
    "GrowthRefused",
    "HolderQuarantined",
    "HostRamShort",
    "LeaseRefused",
    "LedgerBroken",
    "LoadFailed",
    "ModelCoolingDown",
    "NeverFits",
    "NotResident",
    "OutsideHours",
    "QueueFull",
    "QuotaExceeded",
    "RemoteBudgetSpent",
    "ReplicaLost",
    "RequestCancelled",
    "RequestError",
    "RolePinned",
    "RowMisused",
    "SettingsConflict",
    "SlabUnusable",
    "StaleEpoch",
    "StateFileInUse",
    "TenantCoolingDown",
    "TicketClosed",
    "TicketNotGranted",
    "TicketNotQueued",
    "UnderPressure",
    "UnknownCapability",
    "UnknownHostCopy",
    "UnknownLease",
    "UnknownModel",
    "UnknownRole",
    "UnknownTicket",
    "error_fields",
]
