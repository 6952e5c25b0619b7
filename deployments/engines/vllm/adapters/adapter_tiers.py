"""Which adapters should be in slots, which have an image, by their uses in the last minute.

Pure. An adapter with HOT_USES in WINDOW_S belongs into a slot, with one use into the slab. That
says what stays and what is brought ahead of its next request, never what may be used: a request
for a cold adapter loads it at once (F3).
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

HOT_USES, WARM_USES = 10, 1  # F3
WINDOW_S = 60.0
# Uses of one adapter that are remembered; adapters with more count as equally busy.
_MOST_USES = 100
# Images made in one rebalance: each reads a file, 3 ms of processor time for 0.19 MB, in which the
# engine makes no step (docs/benchmarks.md).
MOST_STAGED = 32


class RecentUses:
    """The uses of each adapter in the last WINDOW_S; times are in seconds of one clock."""

    def __init__(self) -> None:
        self._times: dict[str, deque[float]] = {}

    def note(self, adapter: str, now_s: float) -> None:
        self._times.setdefault(adapter, deque(maxlen=_MOST_USES)).append(now_s)

    def counts(self, now_s: float) -> dict[str, int]:
        """Uses within the window, by adapter, the least used first. Forgets older uses."""
        for adapter, times in list(self._times.items()):
            while times and times[0] <= now_s - WINDOW_S:
                times.popleft()
            if not times:
                del self._times[adapter]
        counts = {adapter: len(times) for adapter, times in self._times.items()}
        return dict(sorted(counts.items(), key=lambda item: (item[1], item[0])))

    def forget(self, adapter: str) -> None:
        self._times.pop(adapter, None)

    def clear(self) -> None:
        self._times.clear()


@dataclass(frozen=True, slots=True)
class View:
    """Where adapters are. `uses`: as `RecentUses.counts` has them; `fixed`: those that run or are
    pinned, which keep their slots."""

    slots: int
    hot: frozenset[str]  # in slots
    warm: frozenset[str]  # with an image
    fixed: frozenset[str]
    uses: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class TierMoves:
    """What to bring: into slots, and into the slab. The most used come first."""

    promote: list[str]
    stage: list[str]


def moves(view: View) -> TierMoves:
    """What a rebalance brings, without taking a slot from an adapter that is as busy or runs."""
    busy = [adapter for adapter, uses in view.uses.items() if uses >= HOT_USES][::-1]
    stays = view.hot & (set(busy) | view.fixed)
    room = max(0, view.slots - len(stays | view.fixed))
    promote = [adapter for adapter in busy if adapter not in view.hot][:room]
    has_place = view.hot | view.warm | set(promote)
    used = [a for a, uses in view.uses.items() if uses >= WARM_USES and a not in has_place]
    return TierMoves(promote, used[::-1][:MOST_STAGED])


def kept(fixed: frozenset[str], uses: Mapping[str, int]) -> list[str]:
    """Returns the adapters that should not lose their slots, the `fixed` ones last, which must not.
    `fixed` and `uses`: as in a View."""
    busy = [adapter for adapter, count in uses.items() if count >= HOT_USES]
    return [*(adapter for adapter in busy if adapter not in fixed), *sorted(fixed)]
