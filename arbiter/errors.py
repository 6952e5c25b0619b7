"""
ArbiterError
  RequestError            the caller can act on it; crosses process borders; maps to one HTTP status
    UnknownCapability     404  not registered; names what is
    UnknownModel          404  the capability has no such model; names what it has
    UnknownRole           400  a capability names a role that no policy ranks; names those it knows
    UnknownTicket         404  neither on the books nor remembered
    CapabilityConflict    409  the same name registered differently
    NeverFits             507  larger than the whole budget: change the model or the budget
    DeadlineUnmet         503  cannot be served, or was not granted, before its deadline
    QueueFull             429  the bounded queue of a model or of the arbiter is full
    ModelCoolingDown      503  its last load failed; says why and when to come back
    LoadFailed            503  the load behind this ticket failed
    EngineLost            503  the engine died under this request
    CapabilityFailed      503  its deployment is broken or has no application
    LeaseRefused          400  a lease on terms, or for a process, that cannot be
    UnknownLease          404  no such lease of this tenant
    GrowthRefused         409  a resident that wants more would wait for one that does as well
    SettingsConflict      409  the settings were changed by somebody else meanwhile
    NotResident           409  somebody else says what is resident, and this model is not
    UnderPressure         503  real memory is short on every device it could go to
    QuotaExceeded         429  more than this tenant or client may have at once
    TenantCoolingDown     429  over what it may hold on average, until that has fallen
    HolderQuarantined     503  this holder did not give memory back
    ArbiterClosing        503  shutdown has begun
    ArbiterUnavailable    503  the arbiter cannot be reached, so nothing may be loaded
    TicketClosed          409  use after release
    StaleEpoch            409  message of an earlier life of the arbiter
  LedgerBroken            a bug in this package; the actor must crash, never repair
"""

from difflib import get_close_matches

from arbiter.units import Bytes, Epoch, Generation, HolderId, NodeId, TicketId, human

NAMES_TOLD = 20  # of what there is, in a message; more is for GET /v1/models


class ArbiterError(Exception):
    """Base of everything raised here. Subclasses pass every field to `super().__init__`, so that
    `args` survives pickling: Ray rebuilds the exception in the caller's process from it."""


class RequestError(ArbiterError):
    """Compares by value, so that a decision carrying one can be replayed and compared."""

    status_code = 503
    code = "request_refused"  # the `code` of OpenAI's error object
    retry_after_s: float | None = None
    param: str | None = None  # the field of the request that is at fault, where one is

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.args == getattr(other, "args", None)

    def __hash__(self) -> int:
        return hash((type(self), self.args))


def _names(names: tuple[str, ...]) -> str:
    some = ", ".join(names[:NAMES_TOLD]) if names else "none yet"
    return f"{some}, ..." if len(names) > NAMES_TOLD else some


class UnknownCapability(RequestError):
    status_code, code, param = 404, "capability_not_found", "model"

    def __init__(self, capability: str, known: tuple[str, ...]) -> None:
        super().__init__(capability, known)
        self.capability, self.known = capability, known

    def __str__(self) -> str:
        return f"no capability {self.capability!r} is registered; there is: {_names(self.known)}"


class UnknownModel(RequestError):
    status_code, code, param = 404, "model_not_found", "model"

    def __init__(self, model: str, capability: str, known: tuple[str, ...]) -> None:
        super().__init__(model, capability, known)
        self.model, self.capability, self.known = model, capability, known

    def __str__(self) -> str:
        where = f"{self.capability} serves" if self.capability else "this system serves"
        near = get_close_matches(self.model, self.known)
        hint = f" did you mean {' or '.join(near)}?" if near else ""
        return f"no model {self.model!r};{hint} {where}: {_names(self.known)}"


class UnknownTicket(RequestError):
    status_code, code = 404, "ticket_not_found"

    def __init__(self, ticket: TicketId) -> None:
        super().__init__(ticket)
        self.ticket = ticket

    def __str__(self) -> str:
        return f"no ticket {self.ticket!r} is on the books or remembered; see `arbiter status`"


class UnknownRole(RequestError):
    status_code, code = 400, "role_not_found"

    def __init__(self, role: str, capability: str, known: tuple[str, ...]) -> None:
        super().__init__(role, capability, known)
        self.role, self.capability, self.known = role, capability, known

    def __str__(self) -> str:
        return f"{self.capability} names no role {self.role!r}; there is: {_names(self.known)}"


class CapabilityConflict(RequestError):
    status_code, code = 409, "capability_conflict"

    def __init__(self, capability: str, difference: str) -> None:
        super().__init__(capability, difference)
        self.capability, self.difference = capability, difference

    def __str__(self) -> str:
        return (
            f"capability {self.capability!r} is already registered with other {self.difference};"
            " change it through the configuration, or register under another name"
        )


class NeverFits(RequestError):
    """The request exceeds the whole budget, so waiting cannot help."""

    status_code, code = 507, "never_fits"

    def __init__(self, ticket: TicketId, need_bytes: Bytes, budget_bytes: Bytes) -> None:
        super().__init__(ticket, need_bytes, budget_bytes)
        self.ticket, self.need_bytes, self.budget_bytes = ticket, need_bytes, budget_bytes

    def __str__(self) -> str:
        need, budget = human(self.need_bytes), human(self.budget_bytes)
        return f"{self.ticket} needs {need} of a {budget} budget; lower its footprint or raise it"


class DeadlineUnmet(RequestError):
    status_code, code = 503, "deadline_unmet"

    def __init__(
        self,
        ticket: TicketId,
        waited_s: float,
        retry_after_s: float,
        predicted_s: float | None = None,
    ) -> None:
        super().__init__(ticket, waited_s, retry_after_s, predicted_s)
        self.ticket, self.waited_s, self.retry_after_s = ticket, waited_s, retry_after_s
        self.predicted_s = predicted_s  # wait and load; then it was refused before it was too late

    def __str__(self) -> str:
        if self.predicted_s is not None:
            return (
                f"{self.ticket} would take {self.predicted_s:.1f} s, longer than it may;"
                f" ask again in {self.retry_after_s:.0f} s or allow a later deadline"
            )
        return (
            f"{self.ticket} was not granted within {self.waited_s:.1f} s;"
            f" ask again in {self.retry_after_s:.0f} s or allow a later deadline"
        )


class QueueFull(RequestError):
    status_code, code = 429, "queue_full"

    def __init__(self, what: str, waiting: int, bound: int, retry_after_s: float) -> None:
        super().__init__(what, waiting, bound, retry_after_s)
        self.what, self.waiting, self.bound = what, waiting, bound
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return (
            f"{self.waiting} tickets already wait for {self.what} (bound {self.bound});"
            f" ask again in {self.retry_after_s:.0f} s"
        )


class ModelCoolingDown(RequestError):
    status_code, code = 503, "model_cooling_down"

    def __init__(self, model: str, cause: str, retry_after_s: float) -> None:
        super().__init__(model, cause, retry_after_s)
        self.model, self.cause, self.retry_after_s = model, cause, retry_after_s

    def __str__(self) -> str:
        return f"{self.model} failed to load ({self.cause}); next try in {self.retry_after_s:.0f} s"


ENGINE_DIED = "the engine died while loading"  # the cause of a load that ended without a word


class LoadFailed(RequestError):
    status_code, code = 503, "load_failed"
    retry_after_s = 2.0  # the first cool-down; a longer one is told to who comes too early

    def __init__(self, model: str, cause: str, out_of_memory: bool) -> None:
        super().__init__(model, cause, out_of_memory)
        self.model, self.cause, self.out_of_memory = model, cause, out_of_memory

    def __str__(self) -> str:
        return f"{self.model} did not load: {self.cause}"


class EngineLost(RequestError):
    status_code, code = 503, "engine_lost"
    retry_after_s = 1.0

    def __init__(self, model: str, ticket: TicketId) -> None:
        super().__init__(model, ticket)
        self.model, self.ticket = model, ticket

    def __str__(self) -> str:
        return f"the engine of {self.model} ({self.ticket}) died under this request; send it again"


class CapabilityFailed(RequestError):
    status_code, code = 503, "capability_failed"
    retry_after_s = 30.0  # somebody has to mend it; probes commonly ask twice a minute

    def __init__(self, model: str, cause: str) -> None:
        super().__init__(model, cause)
        self.model, self.cause = model, cause

    def __str__(self) -> str:
        return f"the capability that serves {self.model} failed ({self.cause}); see `serve status`"


class LeaseRefused(RequestError):
    status_code, code = 400, "lease_refused"

    def __init__(self, field: str, cause: str) -> None:
        super().__init__(field, cause)
        self.field, self.cause = field, cause

    def __str__(self) -> str:
        return f"no lease: `{self.field}` {self.cause}"


class UnknownLease(RequestError):
    """Never heard of under this tenant, whoever else may have one of that name."""

    status_code, code = 404, "lease_not_found"

    def __init__(self, lease: str) -> None:
        super().__init__(lease)
        self.lease = lease

    def __str__(self) -> str:
        return f"no lease {self.lease!r}; `arbiter leases` shows those there are"


class GrowthRefused(RequestError):
    """It goes on with what it has."""

    status_code, code = 409, "growth_refused"

    def __init__(self, ticket: TicketId, more_bytes: Bytes, cause: str) -> None:
        super().__init__(ticket, more_bytes, cause)
        self.ticket, self.more_bytes, self.cause = ticket, more_bytes, cause

    def __str__(self) -> str:
        return f"{self.ticket} gets no {human(self.more_bytes)} more: {self.cause}"


class SettingsConflict(RequestError):
    status_code, code = 409, "settings_conflict"

    def __init__(self, given: Generation, current: Generation) -> None:
        super().__init__(given, current)
        self.given, self.current = given, current

    def __str__(self) -> str:
        return f"the settings are of generation {self.current} by now, not {self.given}; read again"


class NotResident(RequestError):
    status_code, code = 409, "not_resident"

    def __init__(self, model: str, capability: str, floor: str) -> None:
        super().__init__(model, capability, floor)
        self.model, self.capability, self.floor = model, capability, floor

    def __str__(self) -> str:
        return (
            f"{self.model} is not resident (its floor is {self.floor}), and {self.capability} loads"
            " nothing by itself; set its floor to device"
        )


class UnderPressure(RequestError):
    status_code, code = 503, "under_pressure"
    retry_after_s = 5.0  # a tick of the rule that makes room

    def __init__(self, node: NodeId, free_bytes: Bytes) -> None:
        super().__init__(node, free_bytes)
        self.node, self.free_bytes = node, free_bytes

    def __str__(self) -> str:
        return (
            f"memory is critically short on {self.node} ({human(self.free_bytes)} free);"
            " nothing but text is loaded there until that is over"
        )


class QuotaExceeded(RequestError):
    status_code, code = 429, "quota_exceeded"
    retry_after_s = 10.0  # when its own leases end is its own to know; a lapse takes this long

    def __init__(self, tenant: str, has: int, wants: int, bound: int, unit: str) -> None:
        super().__init__(tenant, has, wants, bound, unit)
        self.tenant, self.has, self.wants, self.bound, self.unit = tenant, has, wants, bound, unit

    def __str__(self) -> str:
        def said(count: int) -> str:
            return human(Bytes(count)) if self.unit == "bytes" else f"{count} {self.unit}"

        return (
            f"{self.tenant} has {said(self.has)} and asks for {said(self.wants)} more;"
            f" it may have {said(self.bound)}"
        )


class TenantCoolingDown(RequestError):
    status_code, code = 429, "tenant_cooling_down"

    def __init__(self, tenant: str, average: Bytes, bound: Bytes, retry_after_s: float) -> None:
        super().__init__(tenant, average, bound, retry_after_s)
        self.tenant, self.average_bytes, self.bound_bytes = tenant, average, bound
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        has, may, for_s = human(self.average_bytes), human(self.bound_bytes), self.retry_after_s
        return f"{self.tenant} held {has} on average, of {may}; it loads no more for {for_s:.0f} s"


class HolderQuarantined(RequestError):
    status_code, code = 503, "holder_quarantined"
    retry_after_s = 5.0  # what it keeps is asked for again this often

    def __init__(self, holder: HolderId, kept_bytes: Bytes) -> None:
        super().__init__(holder, kept_bytes)
        self.holder, self.kept_bytes = holder, kept_bytes

    def __str__(self) -> str:
        kept = human(self.kept_bytes)
        return f"{self.holder} did not give {kept} back; restart it, or free its memory by hand"


class ArbiterClosing(RequestError):
    code = "arbiter_closing"
    retry_after_s = 30.0  # the longest shutdown; then another may be started

    def __str__(self) -> str:
        return "the arbiter is shutting down and grants nothing; start it again to load models"


class ArbiterUnavailable(RequestError):
    code = "arbiter_unavailable"

    def __init__(self, waited_s: float, retry_after_s: float = 2.0) -> None:
        super().__init__(waited_s, retry_after_s)
        self.waited_s, self.retry_after_s = waited_s, retry_after_s

    def __str__(self) -> str:
        return (
            f"the arbiter was not reachable for {self.waited_s:.1f} s, so nothing may be loaded;"
            " it restarts by itself, or run `arbiter status` to see why not"
        )


class TicketClosed(RequestError):
    status_code, code = 409, "ticket_closed"

    def __init__(self, ticket: TicketId) -> None:
        super().__init__(ticket)
        self.ticket = ticket

    def __str__(self) -> str:
        return f"{self.ticket} was released; acquire the model again to use it"


class StaleEpoch(RequestError):
    status_code, code = 409, "stale_epoch"

    def __init__(self, sent: Epoch, current: Epoch) -> None:
        super().__init__(sent, current)
        self.sent, self.current = sent, current

    def __str__(self) -> str:
        return f"message of epoch {self.sent}, but the arbiter is in epoch {self.current}; rejoin"


class AgentAway(ArbiterError):
    """A node's agent did not answer just now. What was asked of it is asked again."""


class LedgerBroken(ArbiterError):
    """An accounting identity does not hold."""
