"""Seconds of a load nobody has seen yet (SPEC A17, A21): a line through the loads that were seen.

    seconds = start + bytes / bandwidth

fitted by least squares with weights that fade with each newer load, so that a disk that became slow
is learned. One line for each capability, because start is its engine's.
"""

from arbiter.units import SECOND, Bytes, Span

FADE_FRACTION = 0.02  # of every older load's weight, with each newer: fifty loads count
APART_FRACTION = 0.05  # sizes that spread less than this of their mean show no bandwidth


class Fit:
    """Weighted sums of x = GB and y = seconds."""

    def __init__(self) -> None:
        self.weight = self.x = self.y = self.xx = self.xy = 0.0

    def add(self, x: float, y: float) -> None:
        keep = 1 - FADE_FRACTION
        self.weight = keep * self.weight + 1
        self.x, self.y = keep * self.x + x, keep * self.y + y
        self.xx, self.xy = keep * self.xx + x * x, keep * self.xy + x * y

    def at(self, x: float) -> float:
        """Never below a tenth of the mean, nor falling with size: then it is no bandwidth."""
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        spread = self.xx / self.weight - mean_x**2
        slope = 0.0
        if spread > (APART_FRACTION * mean_x) ** 2:
            slope = max(0.0, (self.xy / self.weight - mean_x * mean_y) / spread)
        return max(mean_y / 10, mean_y + slope * (x - mean_x))


class Predictor:
    def __init__(self) -> None:
        self._fits: dict[str, Fit] = {}  # by capability

    def loaded(self, capability: str, size: Bytes, took: Span) -> None:
        self._fits.setdefault(capability, Fit()).add(size / 1e9, took / SECOND)

    def seconds(self, capability: str, size: Bytes) -> Span:
        """0 when no load of the capability was seen."""
        fit = self._fits.get(capability)
        return Span(round(fit.at(size / 1e9) * SECOND)) if fit else Span(0)
