"""The line of waiting tickets, in the order the admission policy gives."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from arbiter.events import Priority
from arbiter.units import Instant, TicketId
from arbiter.view import Key, Waiter


@dataclass(frozen=True, slots=True)
class Waiting:
    waiter: Waiter
    key: Key  # its place, by the policy, fixed when it joined
    model: str  # capability and model: what the per-model bound counts
    deadline: Instant | None


class Line:
    def __init__(self, place_of: Callable[[Waiter], Key]) -> None:
        self._place_of = place_of
        self._order: list[tuple[Key, TicketId]] = []
        self._waiting: dict[TicketId, Waiting] = {}
        self._per_model: Counter[str] = Counter()
        self._turn = 0

    def add(
        self,
        ticket: TicketId,
        model: str,
        now: Instant,
        deadline: Instant | None,
        priority: Priority,
    ) -> None:
        self._turn += 1
        self._enter(Waiter(ticket, now, self._turn, priority), model, deadline)

    def hurry(self, ticket: TicketId, priority: Priority) -> None:
        """It waits, and somebody more urgent waits for it too."""
        old = self._waiting[ticket]
        if priority < old.waiter.priority:
            self.drop(ticket)
            self._enter(replace(old.waiter, priority=priority), old.model, old.deadline)

    def _enter(self, waiter: Waiter, model: str, deadline: Instant | None) -> None:
        waiting = Waiting(waiter, self._place_of(waiter), model, deadline)
        self._waiting[waiter.ticket] = waiting
        self._per_model[model] += 1
        insort(self._order, (waiting.key, waiter.ticket))

    def drop(self, ticket: TicketId) -> None:
        if waiting := self._waiting.pop(ticket, None):
            self._per_model[waiting.model] -= 1
            del self._order[bisect_left(self._order, (waiting.key, ticket))]

    def is_ahead(self, ticket: TicketId, other: TicketId) -> bool:
        """Both wait; `ticket` comes first."""
        return (self._waiting[ticket].key, ticket) < (self._waiting[other].key, other)

    def find(self, ticket: TicketId) -> Waiting | None:
        return self._waiting.get(ticket)

    def tickets(self) -> list[TicketId]:
        return [ticket for _, ticket in self._order]

    def count(self, model: str) -> int:
        return self._per_model[model]

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, ticket: TicketId) -> bool:
        return ticket in self._waiting
