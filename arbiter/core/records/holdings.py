"""Counts whose the bytes on the books are: by client, by tenant, and by tenant on each device
(C10).

Only devices that compute count, because what sleeps in host RAM can always go.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from arbiter.core.types import Client
from arbiter.units import Bytes, TicketId


@dataclass(slots=True)
class Holdings:
    """Counts held bytes. The ledger keeps it; zero is not listed."""

    by_client: Counter[Client] = field(default_factory=Counter)
    by_tenant: Counter[str] = field(default_factory=Counter)
    tickets: dict[str, dict[TicketId, None]] = field(default_factory=dict)  # of each tenant
    unsettled: dict[Client, Bytes] = field(default_factory=dict)  # held before it changed

    def post(self, client: Client, ticket_id: TicketId, more: int, on_device: Counter[str]) -> None:
        """Adds so many bytes of a ticket, or takes them off, on a device whose own count is
        given."""
        tenant = client.tenant
        held = self.by_client[client]
        self.unsettled.setdefault(client, Bytes(held))
        if held + more:
            self.by_client[client] = held + more
        else:
            del self.by_client[client]
        _add(self.by_tenant, tenant, more)
        _add(on_device, tenant, more)
        own = self.tickets.setdefault(tenant, {})
        if more > 0:
            own[ticket_id] = None
        else:
            own.pop(ticket_id, None)
            if not own:
                del self.tickets[tenant]


def _add(counts: Counter[Any], key: Any, more: int) -> None:
    counts[key] += more
    if not counts[key]:
        del counts[key]
