"""Finished requests on their way to the event log (K1): they travel with the heartbeat, so a
warm request still sends nothing of its own.
"""

from collections import Counter, deque

from arbiter.core.events import FinishedRequest, Usage
from arbiter.core.types import ANYBODY, Client
from arbiter.units import Span, TicketId

# Kept between two heartbeats: 256 requests a second of one replica, 30 kB. What exceeds it is
# counted and told; a flood of runs is of use as a number only.
RUNS_MOST = 256
CLIENTS_MOST = 256  # told apart between two heartbeats; further ones count for their tenant


class RequestLog:
    """One per holder, on its event loop."""

    def __init__(self, most: int = RUNS_MOST) -> None:
        self._most = most
        self._kept: deque[FinishedRequest] = deque()
        self._dropped = 0
        self._requests: Counter[Client] = Counter()

    def note(
        self,
        ticket: TicketId | None,
        model: str,
        took: Span,
        outcome: str,
        request: str,
        client: Client = ANYBODY,
    ) -> None:
        is_room = len(self._requests) < CLIENTS_MOST or client in self._requests
        self._requests[client if is_room else Client(client.tenant)] += 1
        if len(self._kept) < self._most:
            self._kept.append(FinishedRequest(ticket, model, took, outcome, request))
        else:
            self._dropped += 1

    def waiting(self) -> tuple[tuple[FinishedRequest, ...], int]:
        """What the next heartbeat says: runs, and how many were dropped."""
        return tuple(self._kept), self._dropped

    def usage(self) -> tuple[Usage, ...]:
        """And how many requests of each client."""
        return tuple(Usage(client, count) for client, count in self._requests.items())

    def said(
        self, runs: tuple[FinishedRequest, ...], dropped: int, usage: tuple[Usage, ...] = ()
    ) -> None:
        """A heartbeat with these has arrived, so the next one does not repeat them."""
        for _ in runs:
            self._kept.popleft()
        self._dropped -= dropped
        self._requests -= Counter({u.client: u.requests_count for u in usage})
