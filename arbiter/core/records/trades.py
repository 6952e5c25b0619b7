"""Remembers which model left for which, so that models that trade places are known (C13)."""

from collections import OrderedDict
from collections.abc import Set as AbstractSet

from arbiter.core.types import ModelName
from arbiter.units import SECOND, HolderId, Instant, Span, TicketId, since

# As long as the share of time spent loading looks back.
REMEMBERED = Span(600 * SECOND)
KEPT_COUNT = 1_024  # pairs, 200 B each; a swap a second for a quarter of an hour

Waiter = tuple[HolderId, str]  # a holder and its model


class Trades:
    """Keeps pairs of models of which one left for the other, when it did last, and since when
    requests that gave up lately had waited."""

    def __init__(self) -> None:
        self._at: OrderedDict[tuple[ModelName, ModelName], Instant] = OrderedDict()
        self._came: dict[ModelName, dict[ModelName, None]] = {}  # of `_at`, by the model that left
        self._asked: dict[TicketId, ModelName] = {}  # to leave, and for which model
        self._gave_up: OrderedDict[Waiter, tuple[Instant, Instant]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._at)

    def asked(self, ticket: TicketId, came: ModelName) -> None:
        """Notes that a ticket was asked to leave for a model."""
        self._asked[ticket] = came

    def stayed(self, ticket: TicketId) -> None:
        """Forgets that a ticket was asked to leave; safe for a ticket that was not."""
        self._asked.pop(ticket, None)

    def left(self, ticket: TicketId, model: ModelName, at: Instant) -> None:
        """Notes the trade of a ticket that leaves, if it was asked to; the oldest pair beyond
        KEPT_COUNT is forgotten."""
        if (came := self._asked.pop(ticket, None)) is not None:
            self._note(model, came, at)

    def _note(self, left: ModelName, came: ModelName, at: Instant) -> None:
        self._at[left, came] = at
        self._at.move_to_end((left, came))
        self._came.setdefault(left, {})[came] = None
        if len(self._at) > KEPT_COUNT:
            (left, came), _ = self._at.popitem(last=False)
            del self._came[left][came]
            if not self._came[left]:
                del self._came[left]

    def has_left_for(self, left: ModelName, came: ModelName, now: Instant) -> bool:
        """Says whether a model left for another lately."""
        at = self._at.get((left, came))
        return at is not None and since(at, now) < REMEMBERED

    def came_for(self, left: ModelName, now: Instant) -> list[ModelName]:
        """Returns the models for which a model left lately."""
        return [came for came in self._came.get(left, ()) if self.has_left_for(left, came, now)]

    def came_among(
        self, left: ModelName, models: AbstractSet[ModelName], now: Instant
    ) -> set[ModelName]:
        """Returns those of some models for which a model left lately. Asked of many tickets in the
        queue, nearly always in vain."""
        known = self._came.get(left)
        if known is None or known.keys().isdisjoint(models):
            return set()
        return {came for came in known.keys() & models if self.has_left_for(left, came, now)}

    # -- requests that give up and ask again ---------------------------------------------------

    def gave_up(self, waiter: Waiter, since_at: Instant, until: Instant) -> None:
        """Remembers for a time since when a request had waited that gave up; the oldest beyond
        KEPT_COUNT is forgotten."""
        self._gave_up[waiter] = (since_at, until)
        self._gave_up.move_to_end(waiter)
        if len(self._gave_up) > KEPT_COUNT:
            self._gave_up.popitem(last=False)

    @property
    def have_given_up(self) -> bool:
        """Says whether any request is remembered that gave up."""
        return bool(self._gave_up)

    def waits_since(self, waiter: Waiter, asked_at: Instant) -> Instant:
        """Returns since when a request has waited that asked at `asked_at`, with what it had waited
        when it gave up shortly before."""
        if (gave_up := self._gave_up.get(waiter)) is None:
            return asked_at
        began, until = gave_up
        return min(began, asked_at) if asked_at <= until else asked_at

    def granted(self, waiter: Waiter) -> None:
        """Has the next request of a holder for its model wait anew."""
        self._gave_up.pop(waiter, None)
