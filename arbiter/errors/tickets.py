"""Refusals of tickets: why one is not granted, and what cannot be done with it."""

from dataclasses import field

from arbiter.errors.base import RequestError, error_fields
from arbiter.units import Bytes, NodeId, TicketId, human


@error_fields
class UnknownTicket(RequestError):
    status_code, code = 404, "ticket_not_found"

    ticket: TicketId

    def __str__(self) -> str:
        return f"no ticket {self.ticket!r} is on the books or remembered; see `arbiter status`"


@error_fields
class NeverFits(RequestError):
    """The request exceeds the whole budget, so waiting cannot help."""

    status_code, code = 507, "never_fits"

    ticket: TicketId
    need_bytes: Bytes
    budget_bytes: Bytes

    def __str__(self) -> str:
        need, budget = human(self.need_bytes), human(self.budget_bytes)
        return (
            f"{self.ticket} needs {need} of a {budget} budget; ask for less (of a model its `need`"
            " or `engine_args`), or lend more (`arbiter.arenas`, `arbiter.arena`)"
        )


@error_fields
class DeadlineUnmet(RequestError):
    status_code, code = 503, "deadline_unmet"

    what: str  # a ticket; without one the model or task that was asked for
    waited_s: float
    retry_after_s: float = field()
    predicted_s: float | None = None  # wait and load, of a ticket refused before it was too late

    def __str__(self) -> str:
        if self.predicted_s is not None:
            return (
                f"{self.what} needs about {self.predicted_s:.1f} s, more than its deadline;"
                f" ask again in {self.retry_after_s:.0f} s or allow a later deadline"
            )
        return (
            f"{self.what} was not ready within {self.waited_s:.1f} s;"
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
class UnderPressure(RequestError):
    status_code, code = 503, "under_pressure"
    retry_after_s = 5.0  # a tick of the rule that makes room

    node: NodeId
    free_bytes: Bytes

    def __str__(self) -> str:
        return (
            f"memory is critically short on {self.node} ({human(self.free_bytes)} free);"
            " until that is over only models of roles that pressure spares (`spared`; by default"
            f" text) are loaded there: ask again in {self.retry_after_s:.0f} s, or end what fills"
            " its memory (`arbiter status`)"
        )


@error_fields
class GpusLost(RequestError):
    status_code, code = 503, "gpus_lost"
    retry_after_s = 30.0  # a person has to mend it; probes commonly ask twice a minute

    node: NodeId

    def __str__(self) -> str:
        return f"GPUs of {self.node} that this needs are off their bus; see `dmesg` there"


@error_fields
class GrowthRefused(RequestError):
    """The resident goes on with what it has."""

    status_code, code = 409, "growth_refused"

    ticket: TicketId
    more_bytes: Bytes
    cause: str

    def __str__(self) -> str:
        return (
            f"{self.ticket} gets no {human(self.more_bytes)} more and goes on with what it has:"
            f" {self.cause}"
        )


@error_fields
class TicketClosed(RequestError):
    status_code, code = 409, "ticket_closed"

    what: str  # a ticket; without one the model that was asked for

    def __str__(self) -> str:
        return f"{self.what} was released; acquire the model again to use it"


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
