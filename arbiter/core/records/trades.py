"""Remembers which model left for which, so that models that trade places are known (C13)."""

from collections import OrderedDict

from arbiter.core.types import ModelName
from arbiter.units import SECOND, Instant, Span, since

# As long as the share of time spent loading looks back.
REMEMBERED = Span(600 * SECOND)
KEPT_COUNT = 1_024  # pairs, 200 B each; a swap a second for a quarter of an hour


class Trades:
    """Keeps pairs of models of which one left for the other, and when it did last."""

    def __init__(self) -> None:
        self._at: OrderedDict[tuple[ModelName, ModelName], Instant] = OrderedDict()
        self._came: dict[ModelName, dict[ModelName, None]] = {}  # of `_at`, by the model that left

    def __bool__(self) -> bool:
        return bool(self._at)

    def note(self, left: ModelName, came: ModelName, at: Instant) -> None:
        """Notes that a model was asked to leave for another; the oldest pair beyond KEPT_COUNT is
        forgotten."""
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
