"""How often each model is used: one number a model that halves with time, so no history is kept.

A use counts 1 and fades as exp(-age / window); the sum is what would be counted in one window if
the rate stayed (an exponentially weighted Poisson rate times the window).
"""

from math import exp

from arbiter.units import Instant, Span

Name = tuple[str, str]  # capability and model


class Rates:
    def __init__(self, window: Span) -> None:
        self.window = window
        self._seen: dict[Name, tuple[float, Instant]] = {}

    def used(self, name: Name, times_count: int, now: Instant) -> None:
        self._seen[name] = (self.recent(name, now) + times_count, now)

    def recent(self, name: Name, now: Instant) -> float:
        """Uses in one window up to now; 0 for a model never used."""
        count, at = self._seen.get(name, (0.0, now))
        return count * exp((at - now) / self.window) if count else 0.0

    def forget(self, name: Name) -> None:
        self._seen.pop(name, None)
