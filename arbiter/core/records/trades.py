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
    """Keeps pairs of models, a victim and the asker for which it left, with the last time; and
    since when requests that gave up lately had waited."""

    def __init__(self) -> None:
        self._left_at: OrderedDict[tuple[ModelName, ModelName], Instant] = OrderedDict()
        self._askers: dict[ModelName, dict[ModelName, None]] = {}  # of `_left_at`, by victim
        self._revoked_for: dict[TicketId, ModelName] = {}  # the asker of a ticket that may leave
        self._gave_up: OrderedDict[Waiter, tuple[Instant, Instant]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._left_at)

    def note_revoked(self, ticket_id: TicketId, asker: ModelName) -> None:
        """Notes for which model a ticket was asked to leave."""
        self._revoked_for[ticket_id] = asker

    def note_stayed(self, ticket_id: TicketId) -> None:
        """Forgets that a ticket was asked to leave; safe for a ticket that was not."""
        self._revoked_for.pop(ticket_id, None)

    def note_left(self, ticket_id: TicketId, victim: ModelName, at: Instant) -> None:
        """Notes the trade of a ticket that leaves, if it was asked to; the oldest pair beyond
        KEPT_COUNT is forgotten."""
        if (asker := self._revoked_for.pop(ticket_id, None)) is not None:
            self._note_pair(victim, asker, at)

    def _note_pair(self, victim: ModelName, asker: ModelName, at: Instant) -> None:
        self._left_at[victim, asker] = at
        self._left_at.move_to_end((victim, asker))
        self._askers.setdefault(victim, {})[asker] = None
        if len(self._left_at) > KEPT_COUNT:
            (victim, asker), _ = self._left_at.popitem(last=False)
            del self._askers[victim][asker]
            if not self._askers[victim]:
                del self._askers[victim]

    def has_left_for(self, victim: ModelName, asker: ModelName, now: Instant) -> bool:
        """Says whether a model left for another lately."""
        at = self._left_at.get((victim, asker))
        return at is not None and since(at, now) < REMEMBERED

    def askers_of(self, victim: ModelName, now: Instant) -> list[ModelName]:
        """Returns the models for which a model left lately."""
        askers = self._askers.get(victim, ())
        return [asker for asker in askers if self.has_left_for(victim, asker, now)]

    def askers_among(
        self, victim: ModelName, models: AbstractSet[ModelName], now: Instant
    ) -> set[ModelName]:
        """Returns those of some models for which a model left lately. Asked of many tickets in the
        queue, nearly always in vain."""
        askers = self._askers.get(victim)
        if askers is None or askers.keys().isdisjoint(models):
            return set()
        return {asker for asker in askers.keys() & models if self.has_left_for(victim, asker, now)}

    # -- requests that give up and ask again ---------------------------------------------------

    def note_gave_up(self, waiter: Waiter, since_at: Instant, until: Instant) -> None:
        """Remembers until `until` since when a request had waited that gave up; the oldest beyond
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

    def note_granted(self, waiter: Waiter) -> None:
        """Has the next request of a holder for its model wait anew."""
        self._gave_up.pop(waiter, None)
