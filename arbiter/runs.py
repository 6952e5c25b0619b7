"""Finished requests on their way to the event log (SPEC K1): they travel with the heartbeat, so a
warm request still sends nothing of its own.
"""

from collections import deque

from arbiter.events import Run
from arbiter.units import Span, TicketId

# Kept between two heartbeats: 256 requests a second of one replica, 30 kB. What exceeds it is
# counted and told; a flood of runs is of use as a number only.
RUNS_MOST = 256


class Runs:
    """One per holder, on its event loop."""

    def __init__(self, most: int = RUNS_MOST) -> None:
        self._most = most
        self._kept: deque[Run] = deque()
        self._dropped = 0

    def note(
        self, ticket: TicketId | None, model: str, took: Span, outcome: str, request: str
    ) -> None:
        if len(self._kept) < self._most:
            self._kept.append(Run(ticket, model, took, outcome, request))
        else:
            self._dropped += 1

    def waiting(self) -> tuple[tuple[Run, ...], int]:
        """What the next heartbeat says: runs, and how many were dropped."""
        return tuple(self._kept), self._dropped

    def said(self, runs: tuple[Run, ...], dropped: int) -> None:
        """A heartbeat with these has arrived; what it said is not said again."""
        for _ in runs:
            self._kept.popleft()
        self._dropped -= dropped
