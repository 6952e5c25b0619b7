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
    DeadlineUnmet         503  cannot be served, or was not granted, before its deadline
    QueueFull             429  the bounded queue of a model or of the arbiter is full
    ModelCoolingDown      503  its last load failed; says why and when to come back
    LoadFailed            503  the load behind this ticket failed
    EngineLost            503  the engine died under this request
    CapabilityFailed      503  its deployment is broken or has no application
    LeaseRefused          400  a lease on terms, or for a process, that cannot be
    UnknownLease          404  no such lease of this tenant
    HostRamShort          409  host RAM has no room for a copy of a model's files
    UnknownHostCopy       404  no node has such a copy
    GrowthRefused         409  a resident that wants more would wait for another that does
    SettingsConflict      409  the settings were changed by another caller meanwhile
    NotResident           409  a control plane says what is resident, and this model is not
    UnderPressure         503  real memory is short on every device it could go to
    QuotaExceeded         429  more than this tenant or client may have at once
    RemoteBudgetSpent     429  a tenant's day at a remote has no room for this request
    EgressRefused         503  what leaves this machine cannot be written down, so nothing leaves
    EgressUnsettled       503  what it cost is not written down; it stays reserved, to be told again
    TenantCoolingDown     429  over what it may hold on average, until that has fallen
    HolderQuarantined     503  this holder did not give memory back
    ArbiterClosing        503  shutdown has begun
    ArbiterUnavailable    503  the arbiter cannot be reached, so nothing may be loaded
    TicketClosed          409  use after release
    TicketNotQueued       409  it is to be raised or cancelled, and does not wait
    RequestCancelled      410  an operator has ended its wait
    TicketNotGranted      409  an engine was to be spawned under a ticket without a grant
    StaleEpoch            409  message of an earlier epoch of the arbiter
  AgentAway               a node's agent did not answer just now; what was asked is asked again
  SlabUnusable            a file that should hold a slab is none, or cannot be mapped
  RowMisused              a slab's writer pinned, unpinned or freed a row out of turn: its bug
  LedgerBroken            a bug in this package; the actor must crash, never repair
"""

from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, Self, TypeVar, dataclass_transform

from arbiter.units import Bytes, Epoch, Generation, HolderId, NodeId, TicketId, human

# Of what there is, in a message: a terminal's height, not 10,000 adapters. GET /v1/models has all.
NAMES_TOLD = 20

E = TypeVar("E", bound=Exception)


@dataclass_transform(eq_default=False)
def error_fields(kind: type[E]) -> type[E]:
    """Makes an error a dataclass, for its fields only: errors compare as ArbiterError says, and
    print as exceptions do, because the hash of a recording is made of that."""
    return dataclass(eq=False, repr=False)(kind)


class ArbiterError(Exception):
    """Base of everything raised here. Compares by value, so that a decision carrying one can be
    replayed and compared. Pickles by its fields, from which Ray rebuilds it in the caller's
    process."""

    def values(self) -> tuple[Any, ...]:
        """Returns its fields; the arguments where it is no dataclass."""
        return (
            tuple(getattr(self, f.name) for f in fields(self)) if is_dataclass(self) else self.args
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.values()

    def unraised(self) -> Self:
        """Returns an equal error that was never raised, to be kept: an error that was raised holds
        the frames through which it went, and all that these refer to."""
        return type(self)(*self.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ArbiterError) and (
            (type(self), self.values()) == (type(other), other.values())
        )

    def __hash__(self) -> int:
        return hash((type(self), self.values()))


class RequestError(ArbiterError):
    """An answer that the caller can act on; it maps to one HTTP status."""

    status_code = 503
    code = "request_refused"  # the `code` of OpenAI's error object
    retry_after_s: float | None = None
    param: str | None = None  # the field of the request that is at fault, where one is


def _names(names: tuple[str, ...]) -> str:
    some = ", ".join(names[:NAMES_TOLD]) if names else "none yet"
    return f"{some}, ..." if len(names) > NAMES_TOLD else some


@error_fields
class UnknownCapability(RequestError):
    status_code, code, param = 404, "capability_not_found", "model"

    capability: str
    known: tuple[str, ...]

    def __str__(self) -> str:
        return f"no capability {self.capability!r} is registered; there is: {_names(self.known)}"


@error_fields
class UnknownModel(RequestError):
    status_code, code, param = 404, "model_not_found", "model"

    model: str
    capability: str
    known: tuple[str, ...]

    def __str__(self) -> str:
        where = f"{self.capability} serves" if self.capability else "this system serves"
        near = get_close_matches(self.model, self.known)
        hint = f" did you mean {' or '.join(near)}?" if near else ""
        return f"no model {self.model!r};{hint} {where}: {_names(self.known)}"


@error_fields
class UnknownTicket(RequestError):
    status_code, code = 404, "ticket_not_found"

    ticket: TicketId

    def __str__(self) -> str:
        return f"no ticket {self.ticket!r} is on the books or remembered; see `arbiter status`"


@error_fields
class UnknownRole(RequestError):
    status_code, code = 400, "role_not_found"

    role: str
    capability: str
    known: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"capability {self.capability!r} names role {self.role!r}, which no policy ranks;"
            f" there is: {_names(self.known)}"
        )


@error_fields
class CapabilityConflict(RequestError):
    status_code, code = 409, "capability_conflict"

    capability: str
    difference: str  # names of the fields that differ

    def __str__(self) -> str:
        return (
            f"capability {self.capability!r} is already registered with other {self.difference};"
            " change it through the configuration, or register under another name"
        )


@error_fields
class NeverFits(RequestError):
    """The request exceeds the whole budget, so waiting cannot help."""

    status_code, code = 507, "never_fits"

    ticket: TicketId
    need_bytes: Bytes
    budget_bytes: Bytes

    def __str__(self) -> str:
        need, budget = human(self.need_bytes), human(self.budget_bytes)
        return f"{self.ticket} needs {need} of a {budget} budget; lower its footprint or raise it"


@error_fields
class DeadlineUnmet(RequestError):
    status_code, code = 503, "deadline_unmet"

    ticket: TicketId
    waited_s: float
    retry_after_s: float = field()
    predicted_s: float | None = None  # wait and load, of a ticket refused before it was too late

    def __str__(self) -> str:
        if self.predicted_s is not None:
            return (
                f"{self.ticket} needs about {self.predicted_s:.1f} s, more than its deadline;"
                f" ask again in {self.retry_after_s:.0f} s or allow a later deadline"
            )
        return (
            f"{self.ticket} was not granted within {self.waited_s:.1f} s;"
            f" ask again in {self.retry_after_s:.0f} s or allow a later deadline"
        )


@error_fields
class OutsideHours(RequestError):
    status_code, code = 503, "outside_hours"

    model: str
    hours: str
    retry_after_s: float = field()

    def __str__(self) -> str:
        return (
            f"{self.model} is loaded {self.hours} only; ask again in {self.retry_after_s:.0f} s,"
            " or allow a deadline after that"
        )


@error_fields
class QueueFull(RequestError):
    status_code, code = 429, "queue_full"

    what: str  # a model, or the arbiter
    waiting: int
    bound: int
    retry_after_s: float = field()

    def __str__(self) -> str:
        return (
            f"{self.waiting} tickets already wait for {self.what} (bound {self.bound});"
            f" ask again in {self.retry_after_s:.0f} s"
        )


@error_fields
class ModelCoolingDown(RequestError):
    status_code, code = 503, "model_cooling_down"

    model: str
    cause: str
    retry_after_s: float = field()

    def __str__(self) -> str:
        return f"{self.model} failed to load ({self.cause}); next try in {self.retry_after_s:.0f} s"


ENGINE_DIED = "the engine died while loading"  # the cause of a load that ended without a word


@error_fields
class LoadFailed(RequestError):
    status_code, code = 503, "load_failed"
    retry_after_s = 2.0  # the first cool-down; ModelCoolingDown tells of a longer one

    model: str
    cause: str
    out_of_memory: bool

    def __str__(self) -> str:
        return f"{self.model} did not load: {self.cause}"


@error_fields
class EngineLost(RequestError):
    status_code, code = 503, "engine_lost"
    retry_after_s = 1.0

    model: str
    ticket: TicketId

    def __str__(self) -> str:
        return f"the engine of {self.model} ({self.ticket}) died under this request; send it again"


@error_fields
class CapabilityFailed(RequestError):
    status_code, code = 503, "capability_failed"
    retry_after_s = 30.0  # a person has to mend it; probes commonly ask twice a minute

    model: str
    cause: str

    def __str__(self) -> str:
        return f"the capability that serves {self.model} failed ({self.cause}); see `serve status`"


@error_fields
class LeaseRefused(RequestError):
    status_code, code = 400, "lease_refused"

    field: str
    cause: str

    def __str__(self) -> str:
        return f"no lease: `{self.field}` {self.cause}"


@error_fields
class HostRamShort(RequestError):
    """No copy of a model's files is made (D4); its engine reads the files."""

    status_code, code = 409, "host_ram_short"

    copy: str  # of what
    need_bytes: Bytes
    free_bytes: Bytes

    def __str__(self) -> str:
        need, free = human(self.need_bytes), human(self.free_bytes)
        return f"no host copy of {self.copy}: it needs {need} of host RAM, and {free} are free"


@error_fields
class UnknownHostCopy(RequestError):
    status_code, code = 404, "host_copy_not_found"

    key: str

    def __str__(self) -> str:
        return f"no host copy {self.key!r}; `arbiter copies` shows those there are"


@error_fields
class UnknownLease(RequestError):
    """This tenant never had a lease of that name, whether or not another tenant has."""

    status_code, code = 404, "lease_not_found"

    lease: str

    def __str__(self) -> str:
        return f"no lease {self.lease!r}; `arbiter leases` shows those there are"


@error_fields
class GrowthRefused(RequestError):
    """The resident goes on with what it has."""

    status_code, code = 409, "growth_refused"

    ticket: TicketId
    more_bytes: Bytes
    cause: str

    def __str__(self) -> str:
        return f"{self.ticket} gets no {human(self.more_bytes)} more: {self.cause}"


@error_fields
class SettingsConflict(RequestError):
    status_code, code = 409, "settings_conflict"

    given: Generation
    current: Generation

    def __str__(self) -> str:
        return (
            f"the settings are of generation {self.current} by now, not {self.given};"
            " read them again and repeat the change"
        )


@error_fields
class NotResident(RequestError):
    status_code, code = 409, "not_resident"

    model: str
    capability: str
    floor: str

    def __str__(self) -> str:
        return (
            f"{self.model} is not resident (its floor is {self.floor}), and {self.capability} loads"
            " nothing by itself; set its floor to device"
        )


@error_fields
class UnderPressure(RequestError):
    status_code, code = 503, "under_pressure"
    retry_after_s = 5.0  # a tick of the rule that makes room

    node: NodeId
    free_bytes: Bytes

    def __str__(self) -> str:
        return (
            f"memory is critically short on {self.node} ({human(self.free_bytes)} free);"
            " nothing but text is loaded there until that is over"
        )


@error_fields
class QuotaExceeded(RequestError):
    status_code, code = 429, "quota_exceeded"
    retry_after_s = 10.0  # we cannot know when the tenant's leases end; a lapse takes 10 s

    tenant: str
    has: int
    wants: int
    bound: int
    unit: str

    def __str__(self) -> str:
        def amount(count: int) -> str:
            return human(Bytes(count)) if self.unit == "bytes" else f"{count} {self.unit}"

        return (
            f"{self.tenant} has {amount(self.has)} and asks for {amount(self.wants)} more;"
            f" it may have {amount(self.bound)}"
        )


@error_fields
class TenantCoolingDown(RequestError):
    status_code, code = 429, "tenant_cooling_down"

    tenant: str
    average_bytes: Bytes
    bound_bytes: Bytes
    retry_after_s: float = field()

    def __str__(self) -> str:
        has, may, for_s = human(self.average_bytes), human(self.bound_bytes), self.retry_after_s
        return f"{self.tenant} held {has} on average, of {may}; it loads no more for {for_s:.0f} s"


@error_fields
class RemoteBudgetSpent(RequestError):
    status_code, code = 429, "remote_budget_spent"

    remote: str
    tenant: str
    has: float
    wants: float
    bound: float
    unit: str  # tokens, money
    retry_after_s: float = field()

    def __str__(self) -> str:
        return (
            f"{self.tenant} has spent or reserved {self.has:g} {self.unit} at {self.remote} today"
            f" and asks for up to {self.wants:g} more; it may have {self.bound:g} a day (UTC)"
        )


@error_fields
class EgressRefused(RequestError):
    code, retry_after_s = "egress_not_recorded", 30.0  # a person has to mend the state file

    remote: str
    cause: str

    def __str__(self) -> str:
        return (
            f"nothing was sent to {self.remote}, because its budget cannot be kept: {self.cause};"
            " make the arbiter's state file writable"
        )


@error_fields
class EgressUnsettled(RequestError):
    code, retry_after_s = "egress_not_settled", 30.0  # a person has to mend the state file

    remote: str
    cause: str

    def __str__(self) -> str:
        return (
            f"what a request to {self.remote} cost is not written down, so its highest price stays"
            f" reserved: {self.cause}; make the arbiter's state file writable"
        )


@error_fields
class HolderQuarantined(RequestError):
    status_code, code = 503, "holder_quarantined"
    retry_after_s = 5.0  # what it keeps is asked for again this often

    holder: HolderId
    kept_bytes: Bytes

    def __str__(self) -> str:
        kept = human(self.kept_bytes)
        return f"{self.holder} did not give {kept} back; restart it, or free its memory by hand"


class ArbiterClosing(RequestError):
    code = "arbiter_closing"
    retry_after_s = 30.0  # the longest shutdown; then another may be started

    def __str__(self) -> str:
        return "the arbiter is shutting down and grants nothing; start it again to load models"


@error_fields
class ArbiterUnavailable(RequestError):
    code = "arbiter_unavailable"

    waited_s: float
    retry_after_s: float = 2.0

    def __str__(self) -> str:
        return (
            f"the arbiter was not reachable for {self.waited_s:.1f} s, so nothing may be loaded;"
            " it restarts by itself, or run `arbiter status` to see why not"
        )


@error_fields
class TicketClosed(RequestError):
    status_code, code = 409, "ticket_closed"

    ticket: TicketId

    def __str__(self) -> str:
        return f"{self.ticket} was released; acquire the model again to use it"


@error_fields
class TicketNotQueued(RequestError):
    status_code, code = 409, "ticket_not_queued"

    ticket: TicketId
    state: str

    def __str__(self) -> str:
        return f"{self.ticket} does not wait: it is {self.state}; `arbiter explain` says more"


@error_fields
class RequestCancelled(RequestError):
    """An operator has ended the wait. Not a status after which clients ask again by themselves."""

    status_code, code = 410, "cancelled"

    ticket: TicketId

    def __str__(self) -> str:
        return f"an operator cancelled {self.ticket} while it waited; ask again if it is needed"


@error_fields
class TicketNotGranted(RequestError):
    """A node agent refuses to spawn an engine under this ticket (A3)."""

    status_code, code = 409, "ticket_not_granted"

    ticket: TicketId
    node: NodeId

    def __str__(self) -> str:
        return (
            f"no engine is spawned under {self.ticket!r}: the arbiter granted no such ticket on"
            f" {self.node}; request the model, and spawn under the ticket of its grant"
        )


NEVER_JOINED = Epoch(0)  # believed in by a holder that the arbiter does not know


@error_fields
class StaleEpoch(RequestError):
    status_code, code = 409, "stale_epoch"

    sent: Epoch
    current: Epoch

    def __str__(self) -> str:
        return f"message of epoch {self.sent}, but the arbiter is in epoch {self.current}; rejoin"


class AgentAway(ArbiterError):
    """A node's agent did not answer just now. What was asked of it is asked again."""


@error_fields
class SlabUnusable(ArbiterError):
    """Contents that are damaged do not raise this: they are as if they were not there."""

    path: str
    cause: str

    def __str__(self) -> str:
        return f"{self.path} cannot be used as a slab: {self.cause}; a node agent creates slabs"


@error_fields
class RowMisused(ArbiterError):
    key: str  # in hexadecimal
    cause: str

    def __str__(self) -> str:
        return f"row of key {self.key}: {self.cause}; this is a bug of the process that writes it"


class LedgerBroken(ArbiterError):
    """An accounting identity does not hold."""
