"""Keeps when each device was loading models, for the share of its time that this took (C13)."""

from collections import deque
from collections.abc import Iterable

from arbiter.units import SECOND, DeviceId, Instant, Span

WINDOW = Span(600 * SECOND)
KEPT_COUNT = 512  # loads of one device: one a second for most of the window


class LoadingTimes:
    """Keeps the loads of the last ten minutes, by device."""

    def __init__(self) -> None:
        self._loads: dict[DeviceId, deque[tuple[Instant, Instant]]] = {}

    def note(self, devices: Iterable[DeviceId], began: Instant, ended: Instant) -> None:
        """Notes a load or wake that is over, however it ended."""
        for device in devices if ended > began else ():
            loads = self._loads.setdefault(device, deque(maxlen=KEPT_COUNT))
            loads.append((began, ended))
            while loads[0][1] <= ended - WINDOW:
                loads.popleft()

    def forget(self, device: DeviceId) -> None:
        """Forgets the loads of a device that has left."""
        self._loads.pop(device, None)

    def fraction(self, device: DeviceId, now: Instant, under_way: Iterable[Instant] = ()) -> float:
        """Returns the share of the last ten minutes in which the device was loading. `under_way`:
        when the loads that go on began. Loads at the same time count once."""
        first = now - WINDOW
        spans = [*self._loads.get(device, ()), *((began, now) for began in under_way)]
        loading, until = 0, first
        for began, ended in sorted(spans):
            loading += max(0, ended - max(began, until))
            until = max(until, ended)
        return loading / WINDOW
