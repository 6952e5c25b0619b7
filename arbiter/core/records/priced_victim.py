"""Describes a lawful victim with its price, as a policy gave it (C3)."""

from dataclasses import dataclass, field

from arbiter.core.view import Key
from arbiter.units import Bytes, TicketId


@dataclass(slots=True)
class PricedVictim:
    """Describes a lawful victim and its price. Nothing writes to it, but it is not frozen: each
    price needs a new one, and a frozen dataclass takes four times as long to make."""

    ticket: TicketId
    freed_bytes: Bytes
    rank: Key
    cost_s: float  # adds up within one rank
    why: object = None  # as the policy has it; `str` of it is for people
    # Cheapest first; per byte within a rank, because bytes are what is bought.
    place: Key = field(init=False)

    def __post_init__(self) -> None:
        # Once, because each search of an order asks for it.
        self.place = (self.rank, self.cost_s / (self.freed_bytes or 1), self.ticket)
