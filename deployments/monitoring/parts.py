"""Who holds which part of a device's budget."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

GRANTED, COMING_BACK, FOREIGN, FREE = "granted", "coming_back", "foreign", "free"
UNNAMED = "other processes"


@dataclass(frozen=True, slots=True)
class Part:
    """Describes one part of a device's budget."""

    kind: str  # granted, coming_back, foreign or free
    label: str  # a model, a lease's name, the name of a process; empty for what is free
    size_bytes: int  # of the budget
    measured_bytes: int | None = None  # None: what is free is not measured
    ticket: str = ""  # empty: it belongs to none
    state: str = ""  # of the ticket
    capability: str = ""


def parts_of(device: Mapping[str, Any], tickets: list[dict[str, Any]]) -> Iterator[Part]:
    """Tickets in the order of the state, then foreign processes by name, then what is free."""
    name = device["device"]
    for ticket in tickets:
        charged = ticket["charged_bytes"].get(name, 0)
        if charged:
            yield _granted(ticket, charged, ticket["measured_bytes"].get(name, 0))
    yield from _foreign(device)
    if device["free_bytes"] > 0:
        yield Part(FREE, "", device["free_bytes"])


def _granted(ticket: Mapping[str, Any], charged: int, measured: int) -> Part:
    """Returns the part of a ticket. A ticket that drains still serves, so its bytes count as coming
    back only once it is RECLAIMING."""
    kind = COMING_BACK if ticket["state"] == "reclaiming" else GRANTED
    return Part(
        kind,
        ticket["model"],
        charged,
        measured,
        ticket["ticket"],
        ticket["state"],
        ticket["capability"],
    )


def _foreign(device: Mapping[str, Any]) -> Iterator[Part]:
    """Yields the foreign bytes that reduce the budget, by process. NVML names processes with all
    bytes that they hold. Where these are more than reduce the budget, each is scaled down alike."""
    held: dict[str, int] = {}
    for process in device["foreign_processes"]:
        label = process["name"] or f"pid {process['pid']}"
        held[label] = held.get(label, 0) + process["size_bytes"]
    unnamed_bytes, named = device["foreign_bytes"], sum(held.values())
    share = min(1.0, unnamed_bytes / named) if named else 0.0
    for label, size in sorted(held.items(), key=lambda row: (-row[1], row[0])):
        part = min(unnamed_bytes, round(size * share))
        unnamed_bytes -= part
        if part:
            yield Part(FOREIGN, label, part, size)
    if unnamed_bytes:
        yield Part(FOREIGN, UNNAMED, unnamed_bytes, unnamed_bytes)
