"""Refusals about capabilities and models: their names, their loads, and their engines."""

from dataclasses import field
from difflib import get_close_matches

from arbiter.errors.base import RequestError, error_fields
from arbiter.units import NodeId, TicketId

# Of what there is, in a message: a terminal's height, not 10,000 adapters. GET /v1/models has all.
NAMES_TOLD = 20


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
class CapabilityFailed(RequestError):
    status_code, code = 503, "capability_failed"
    retry_after_s = 30.0  # a person has to mend it; probes commonly ask twice a minute

    model: str
    cause: str

    def __str__(self) -> str:
        return f"the capability that serves {self.model} failed ({self.cause}); see `serve status`"


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
class RolePinned(RequestError):
    """A pinned model never leaves for another of its exclusion group, so waiting cannot help."""

    status_code, code = 409, "role_pinned"

    model: str
    role: str
    node: NodeId
    pinned: str

    def __str__(self) -> str:
        return (
            f"{self.model} is not loaded on {self.node}, where one model of the role {self.role} is"
            f" resident at a time and {self.pinned} is pinned; unpin it, or take {self.role} out of"
            " `one_resident_roles`"
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
FILES_REPLACED = "its files were replaced while they were read"
# Causes that may be gone at once: a first load that failed of them is tried again.
TRIED_AGAIN = frozenset({ENGINE_DIED, FILES_REPLACED})


@error_fields
class LoadFailed(RequestError):
    status_code, code = 503, "load_failed"
    retry_after_s = 2.0  # the first cool-down; ModelCoolingDown tells of a longer one

    model: str
    cause: str
    out_of_memory: bool

    def __str__(self) -> str:
        do = "correct that in its files or settings, then send the request again"
        if self.out_of_memory:
            do = "send the request again, which asks for more memory, or lower what it is to need"
        return f"{self.model} did not load: {self.cause.rstrip('.')}; {do}"


@error_fields
class EngineLost(RequestError):
    status_code, code = 503, "engine_lost"
    retry_after_s = 1.0

    model: str
    ticket: TicketId | None = None  # None: the request was under no ticket

    def __str__(self) -> str:
        ticket = f" ({self.ticket})" if self.ticket else ""
        return f"the engine of {self.model}{ticket} died under this request; send it again"


class ReplicaLost(EngineLost):
    """The replica died, and with it the engines that it held. Of the same code: a client does the
    same about it."""

    def __str__(self) -> str:
        return f"the replica that serves {self.model} died under this request; send it again"
