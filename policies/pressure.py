"""Says how short of real memory a device or node is (C5): by what is physically free, never by what
is charged, because the policy must notice memory that the books do not know of.
"""

from arbiter.core.types import DeviceKind, Level
from arbiter.core.view import MemoryReading
from arbiter.units import Bytes


def level(gauge: MemoryReading) -> Level:
    """Returns the worse of two levels, by the device's free bytes and by the kernel's stalls. A CPU
    device is a budget of host RAM, so what is free of it is what is free of the RAM."""
    return max(_by_free(gauge), _by_stalls(gauge))


def _by_free(gauge: MemoryReading) -> Level:
    marks = gauge.marks
    if gauge.kind is DeviceKind.GPU:
        low, critical = marks.reserve_low_fraction, marks.reserve_critical_fraction
        return _below(gauge.free_bytes, gauge.reserve_bytes, low, critical)
    low, critical = marks.ram_low_fraction, marks.ram_critical_fraction
    return _below(gauge.free_bytes, gauge.total_bytes, low, critical)


def _below(free: Bytes, whole: Bytes, low: float, critical: float) -> Level:
    if free < whole * critical:
        return Level.CRITICAL
    return Level.LOW if free < whole * low else Level.NOMINAL


def _by_stalls(gauge: MemoryReading) -> Level:
    if gauge.stalled_fraction >= gauge.marks.stall_critical_fraction:
        return Level.CRITICAL
    is_low = gauge.stalled_fraction >= gauge.marks.stall_low_fraction
    return Level.LOW if is_low else Level.NOMINAL
