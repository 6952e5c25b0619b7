"""Keeps when to look again, and at what: one time per subject, in a heap. Pure; the clock is
outside.
"""

import heapq

from arbiter.units import Instant

NEVER = Instant(2**63 - 1)  # 292 years
Subject = tuple[str, str]  # kind and id: ("ticket", id), ("holder", id), ("node", id), ...
SPARE_COUNT = 64  # places of a small heap that may be stale: it is made anew seldom


class Timers:
    """Holds one time per subject. A timer may be due early, never late: a subject whose time moved
    away is looked at once for nothing and sets its timer again. So each subject has about one place
    in the heap."""

    def __init__(self) -> None:
        self._at: dict[Subject, Instant] = {}
        self._heap: list[tuple[Instant, Subject]] = []

    def set(self, subject: Subject, at: Instant) -> None:
        """Sets the time of a subject, if that is sooner than the time it has."""
        armed = self._at.get(subject)
        if armed is None or at < armed:
            self._at[subject] = at
            heapq.heappush(self._heap, (at, subject))
            # A time that was replaced stays in the heap until it is due, which may be in a year.
            if len(self._heap) > 2 * len(self._at) + SPARE_COUNT:
                self._heap = [(at, subject) for subject, at in self._at.items()]
                heapq.heapify(self._heap)

    def at(self, subject: Subject) -> Instant:
        """Returns the time of a subject; NEVER where none is set."""
        return self._at.get(subject, NEVER)

    def __contains__(self, subject: Subject) -> bool:
        return subject in self._at

    def due(self, now: Instant) -> list[Subject]:
        """Takes out and returns the subjects that are due, earliest first."""
        fired: list[Subject] = []
        while self._heap and self._heap[0][0] <= now:
            at, subject = heapq.heappop(self._heap)
            if self._at.get(subject) == at:
                del self._at[subject]
                fired.append(subject)
        return fired

    def next(self) -> Instant | None:
        """Returns the earliest time of any subject; None without one."""
        while self._heap and self._at.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
