"""Keeps finished requests until a heartbeat tells the arbiter of them (K1), so that a warm request
sends no message of its own.
"""

from collections import Counter, deque

from arbiter.core.events import FinishedRequest, Renewed, RequestTimes, Usage
from arbiter.core.histogram import SECONDS_BOUNDS, Histogram
from arbiter.core.types import ANYBODY, Client
from arbiter.units import Span, TicketId, in_seconds

# Kept between two heartbeats: 256 requests a second of one replica, 30 kB. What exceeds it is
# counted and told; a flood of runs is of use as a number only.
RUNS_MOST = 256
OUTCOMES = frozenset({"answered", "left"})  # any other outcome is the code of a refusal
CLIENTS_MOST = 256  # told apart between two heartbeats; further ones count for their tenant


class RequestLog:
    """Keeps the finished requests that no heartbeat has told the arbiter yet: one log per holder,
    on its event loop. `most`: how many it keeps one by one; beyond that they are only counted."""

    def __init__(self, most: int = RUNS_MOST) -> None:
        self._most = most
        self._finished: deque[FinishedRequest] = deque()
        self._dropped = 0
        self._requests: Counter[Client] = Counter()
        self._times: dict[str, Histogram] = {}  # by outcome

    def note(
        self,
        ticket: TicketId | None,
        model: str,
        took: Span,
        outcome: str,
        request: str,
        client: Client = ANYBODY,
        ran: Span | None = None,
    ) -> None:
        """Notes a request that has ended. `ran`: how long the model served it; None: it never
        did."""
        is_room = len(self._requests) < CLIENTS_MOST or client in self._requests
        self._requests[client if is_room else Client(client.tenant)] += 1
        kind = outcome if outcome in OUTCOMES else "refused"
        self._times.setdefault(kind, Histogram(SECONDS_BOUNDS)).note(in_seconds(took))
        if len(self._finished) < self._most:
            self._finished.append(FinishedRequest(ticket, model, took, outcome, request, ran))
        else:
            self._dropped += 1

    def untold(self) -> tuple[tuple[FinishedRequest, ...], int]:
        """Returns what the next heartbeat tells: single requests, and how many more were
        dropped."""
        return tuple(self._finished), self._dropped

    def usage(self) -> tuple[Usage, ...]:
        """Returns how many requests of each client the next heartbeat tells of."""
        return tuple(Usage(client, count) for client, count in self._requests.items())

    def times(self) -> tuple[RequestTimes, ...]:
        """Returns how long these requests took, as a histogram per outcome."""
        return tuple(RequestTimes(outcome, taken.read()) for outcome, taken in self._times.items())

    def forget_told(self, renewed: Renewed) -> None:
        """Drops what a heartbeat told that has arrived, so that the next one does not repeat it."""
        for _ in renewed.runs:
            self._finished.popleft()
        self._dropped -= renewed.runs_dropped_count
        self._requests -= Counter({u.client: u.requests_count for u in renewed.usage})
        for times in renewed.request_times:
            taken = self._times[times.outcome]
            taken.subtract(times.took)
            if taken.is_empty:  # its sum may differ from 0 by rounding
                del self._times[times.outcome]
