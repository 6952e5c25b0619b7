"""What each holder holds and waits for, and what the arbiter has lent, in a sentence each (K5)."""

from collections.abc import Iterable

from arbiter.core.records.ticket import State
from arbiter.core.reports.snapshot import DeviceView, StateView, TicketView
from arbiter.core.types import LEASE, DeviceKind
from arbiter.units import Bytes, DeviceId, human

MOST_NAMED = 12  # models of one holder: beyond that a sentence is a table


def status_messages(view: StateView) -> dict[str, str]:
    """Returns a sentence for each device that computes, by its name, and for each holder of a
    capability."""
    computing = [row for row in view.devices if row.kind is not DeviceKind.HOST]
    messages: dict[str, str] = {row.device: _lent(row, view) for row in computing}
    held: dict[str, list[TicketView]] = {
        row.holder: [] for row in view.holders if row.capability != LEASE
    }
    for ticket in view.tickets:
        if ticket.lease is None and ticket.holder in held:
            held[ticket.holder].append(ticket)
    return messages | {holder: _held(holder, tickets) for holder, tickets in held.items()}


def _lent(device: DeviceView, view: StateView) -> str:
    on = [t for t in view.tickets if _charged(t, device.device)]
    leases = sum(ticket.lease is not None for ticket in on)
    to = [_count(len(on) - leases, "model")] + [_count(leases, "lease")] * bool(leases)
    waiting = sum(t.node == device.node and t.state == State.QUEUED.value for t in view.tickets)
    queued = f"; its node's queue has {_count(waiting, 'ticket')}" if waiting else ""
    of = f"{human(device.charged_bytes)} of {human(device.budget_bytes)} of {device.device}"
    return f"The arbiter has lent {of} to {' and '.join(to)}{queued}."


def _held(holder: str, tickets: list[TicketView]) -> str:
    waits = [t for t in tickets if t.state == State.QUEUED.value]
    held = [t for t in tickets if t.state != State.QUEUED.value]
    holds = _named(f"{t.model} ({t.state}, {_sizes(t)})" for t in held) or "no model"
    wants = _named(f"{t.model} ({human(t.need_bytes)})" for t in waits)
    return f"{holder} holds {holds}{f' and waits for {wants}' if wants else ''}."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _named(parts: Iterable[str]) -> str:
    names = list(parts)
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED] + [f"{more} more"] * (more > 0))


def _sizes(ticket: TicketView) -> str:
    sizes = [f"{human(one.size_bytes)} on {one.device}" for one in ticket.charged if one.size_bytes]
    return " and ".join(sizes) or "nothing charged"


def _charged(ticket: TicketView, device: DeviceId) -> Bytes:
    return Bytes(sum(one.size_bytes for one in ticket.charged if one.device == device))
