"""Keeps what was weighed when victims were chosen, for a while, so that explain can say why."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from arbiter.core.records.priced_victim import PricedVictim
from arbiter.core.view import Key
from arbiter.units import Bytes, DeviceId, Instant, TicketId

KEPT_COUNT = 256  # evictions remembered, some kB each: an hour of one every fifteen seconds
WEIGHED_COUNT = 32  # candidates of one kept, cheapest first; a device seldom holds more


@dataclass(frozen=True, slots=True)
class ScoredVictim:
    """Describes a lawful candidate at the time, and its price."""

    ticket: TicketId
    model: str
    freed_bytes: Bytes
    rank: Key  # what no cost outweighs, lowest first; see ranking.price_victim and the policy
    cost_s: float
    is_chosen: bool
    why: str = ""  # what its cost comes from, in words; empty where the policy does not say


@dataclass(frozen=True, slots=True)
class EvictionRecord:
    """Describes one choice: the asker, what it lacked, the lawful options and the chosen."""

    at: Instant
    waiting: TicketId  # the asker
    waiting_model: str
    device: DeviceId
    short_bytes: Bytes  # what was missing
    policy: str
    options: tuple[PricedVictim, ...]  # lawful, cheapest first
    models: tuple[str, ...]  # of each option
    chosen: frozenset[TicketId]
    is_compaction: bool = (
        False  # the chosen are loaded again, smaller; `freed_bytes` is by how much
    )

    @property
    def weighed(self) -> tuple[ScoredVictim, ...]:
        """Returns the options with their prices; the chosen are shown however many there were."""
        rows = [
            ScoredVictim(
                o.ticket,
                model,
                o.freed_bytes,
                o.rank,
                o.cost_s,
                o.ticket in self.chosen,
                in_words(o.why),
            )
            for o, model in zip(self.options, self.models, strict=True)
        ]
        return tuple(row for n, row in enumerate(rows) if n < WEIGHED_COUNT or row.is_chosen)

    def concerns(self, ticket_id: TicketId) -> bool:
        """Says whether a ticket asked, left or was spared in this choice."""
        return ticket_id == self.waiting or any(o.ticket == ticket_id for o in self.options)


def in_words(why: object) -> str:
    """Returns what a policy says of a price, for people."""
    return "" if why is None else str(why)


class EvictionHistory:
    """Keeps the newest choices, oldest first."""

    def __init__(self) -> None:
        self._records: deque[EvictionRecord] = deque(maxlen=KEPT_COUNT)

    def add(self, choice: EvictionRecord) -> None:
        """Keeps one more choice; the oldest beyond KEPT_COUNT is forgotten."""
        self._records.append(choice)

    def about(self, ticket_id: TicketId) -> Iterator[EvictionRecord]:
        """Returns the choices in which a ticket asked, left or was spared."""
        return (choice for choice in self._records if choice.concerns(ticket_id))
