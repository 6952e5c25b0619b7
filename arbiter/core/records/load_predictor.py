"""Predicts the seconds of a load that was never seen (A17, A21), by a line through those that were:

    seconds = start + bytes / bandwidth

fitted by least squares with weights that fade with each newer load, so that a disk that became slow
is learned. One line for each capability, because start is its engine's.
"""

from arbiter.units import SECOND, Bytes, Span

FADE_FRACTION = 0.02  # of every older load's weight, with each newer: fifty loads count
APART_FRACTION = 0.05  # sizes that spread less than this of their mean show no bandwidth


class LoadTimeFit:
    """Keeps weighted sums of x = GB and y = seconds."""

    def __init__(
        self, weight: float = 0, x: float = 0, y: float = 0, xx: float = 0, xy: float = 0
    ) -> None:
        self.weight = weight
        self.x = x
        self.y = y
        self.xx = xx
        self.xy = xy

    def add(self, x: float, y: float) -> None:
        """Adds one load; every older load loses FADE_FRACTION of its weight."""
        keep = 1 - FADE_FRACTION
        self.weight = keep * self.weight + 1
        self.x = keep * self.x + x
        self.y = keep * self.y + y
        self.xx = keep * self.xx + x * x
        self.xy = keep * self.xy + x * y

    def export(self) -> list[float]:
        """Returns the arguments that make an equal fit."""
        return [self.weight, self.x, self.y, self.xx, self.xy]

    def at(self, x: float) -> float:
        """Returns the seconds for `x` GB, never below a tenth of the mean, nor falling with size:
        that would be no bandwidth."""
        mean_x = self.x / self.weight
        mean_y = self.y / self.weight
        spread = self.xx / self.weight - mean_x**2
        slope = 0.0
        if spread > (APART_FRACTION * mean_x) ** 2:
            slope = max(0.0, (self.xy / self.weight - mean_x * mean_y) / spread)
        return max(mean_y / 10, mean_y + slope * (x - mean_x))


class Predictor:
    """Predicts the seconds of a first load from other loads of its capability."""

    def __init__(self) -> None:
        self.fits: dict[str, LoadTimeFit] = {}  # by capability

    def loaded(self, capability: str, size: Bytes, took: Span) -> None:
        """Learns one load of a capability."""
        self.fits.setdefault(capability, LoadTimeFit()).add(size / 1e9, took / SECOND)

    def seconds(self, capability: str, size: Bytes) -> Span:
        """Returns the seconds for so many bytes; 0 when no load of the capability was seen."""
        fit = self.fits.get(capability)
        return Span(round(fit.at(size / 1e9) * SECOND)) if fit else Span(0)
