"""What the arbiter tells a client: its state, its events, and what a request would bring about."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Device:
    """One device and its account."""

    device: str
    node: str
    kind: str
    budget_bytes: int  # what may be lent
    charged_bytes: int
    free_bytes: int
    pressure: str  # nominal, low, critical


@dataclass(frozen=True, slots=True)
class Ticket:
    """One model on one holder, or a lease."""

    ticket: str
    capability: str
    model: str
    state: str
    inflight: int
    charged_bytes: Mapping[str, int]  # by device


@dataclass(frozen=True, slots=True)
class Waiting:
    """A ticket in the queue."""

    position: int
    ticket: str
    model: str
    waited_s: float
    predicted_s: float | None  # until it serves; None: nothing is known


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A copy of models' files in the host RAM of a node, which its engines share."""

    key: str
    node: str
    models: tuple[str, ...]
    users: tuple[str, ...]  # tickets of the engines that have it open
    size_bytes: int
    is_leaving: bool  # with the last of its users
    socket: str  # at which processes of the node agent's group are handed it; else empty


@dataclass(frozen=True, slots=True)
class ModelResidency:
    """Where a model is, and where it is to be."""

    model: str
    capability: str
    level: str  # device, loading, host or cold
    floor: str  # the lowest level to which it may go: device, host or cold
    host_copy_bytes: int
    loading_s: float | None  # how long its load has been under way; None: none is


@dataclass(frozen=True, slots=True)
class Status:
    """The arbiter's state. `plain` has all of it, as `arbiter status --json` shows it."""

    sequence: int  # of the last event: subscribe from here
    devices: tuple[Device, ...]
    tickets: tuple[Ticket, ...]
    queue: tuple[Waiting, ...]
    plain: Row

    def of_model(self, model: str) -> tuple[Ticket, ...]:
        """The tickets of one model."""
        return tuple(ticket for ticket in self.tickets if ticket.model == model)


@dataclass(frozen=True, slots=True)
class Event:
    """One event of the arbiter's log; `fields` differ by its kind."""

    sequence: int
    kind: str
    fields: Row


@dataclass(frozen=True, slots=True)
class Plan:
    """What a request would bring about; it changes nothing."""

    answer: str  # now, after_evicting, not_before, never
    model: str
    need_bytes: int
    wait_s: float | None  # until its load may begin; None: nothing is known
    load_s: float
    victims: tuple[str, ...]  # the models that would leave
    sentences: tuple[str, ...]  # the same for a person, a sentence each
    plain: Row

    def __str__(self) -> str:
        return " ".join(self.sentences)


def status(reply: Row) -> Status:
    return Status(
        reply["sequence"],
        tuple(_taken(Device, row) for row in reply["devices"]),
        tuple(_taken(Ticket, row) for row in reply["tickets"]),
        tuple(_taken(Waiting, row) for row in reply["queue"]),
        reply,
    )


def host_copy(reply: Row) -> HostCopy:
    return HostCopy(
        reply["key"],
        reply["node"],
        tuple(model for _, model in reply["models"]),
        tuple(reply["users"]),
        reply["size_bytes"],
        reply["is_leaving"],
        reply["socket"],
    )


def residency(reply: Row) -> dict[str, ModelResidency]:
    rows = ((model, {"model": model, **row}) for model, row in reply["models"].items())
    return {model: _taken(ModelResidency, row) for model, row in rows}


def event(reply: Row) -> Event:
    return Event(reply["seq"], reply["kind"], reply)


def plan(reply: Row) -> Plan:
    return Plan(
        reply["answer"],
        reply["model"],
        reply["need_bytes"],
        reply["wait_s"],
        reply["load_s"],
        tuple(row["model"] for row in reply["victims"]),
        tuple(reply["sentences"]),
        reply,
    )


def _taken(kind: Any, row: Row) -> Any:
    """The fields of a row that the class names."""
    return kind(**{name: row[name] for name in kind.__dataclass_fields__})
