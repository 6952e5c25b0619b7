"""How short of real memory a device or node is (C5): by what is physically free, never by what
is charged, for the point is to notice what the books do not know of.
"""

from arbiter.core.types import DeviceKind, Level
from arbiter.core.view import MemoryReading
from arbiter.units import Bytes

# Of host RAM, available / total (C5).
RAM_LOW_FRACTION, RAM_CRITICAL_FRACTION = 0.15, 0.05
# Of a GPU: shares of the reserve, which is what is not ours to plan with (C5).
RESERVE_LOW_FRACTION, RESERVE_CRITICAL_FRACTION = 0.5, 0.2
# Share of time in which some task waited for memory, 10 s average. systemd-oomd kills at 60 % by
# default; a tenth of that is memory that is short already.
STALL_LOW_FRACTION, STALL_CRITICAL_FRACTION = 0.06, 0.6


def level(gauge: MemoryReading) -> Level:
    """The worst of what the device's free bytes and the kernel's stalls say. A CPU device is a
    budget of host RAM, so what is free of it is what is free of the RAM."""
    return max(_by_free(gauge), _by_stalls(gauge.stalled_fraction))


def _by_free(gauge: MemoryReading) -> Level:
    if gauge.kind is DeviceKind.GPU:
        reserve = gauge.reserve_bytes
        return _below(gauge.free_bytes, reserve, RESERVE_LOW_FRACTION, RESERVE_CRITICAL_FRACTION)
    return _below(gauge.free_bytes, gauge.total_bytes, RAM_LOW_FRACTION, RAM_CRITICAL_FRACTION)


def _below(free: Bytes, whole: Bytes, low: float, critical: float) -> Level:
    if free < whole * critical:
        return Level.CRITICAL
    return Level.LOW if free < whole * low else Level.NOMINAL


def _by_stalls(fraction: float) -> Level:
    if fraction >= STALL_CRITICAL_FRACTION:
        return Level.CRITICAL
    return Level.LOW if fraction >= STALL_LOW_FRACTION else Level.NOMINAL
