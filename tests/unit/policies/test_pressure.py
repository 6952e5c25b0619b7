"""The pressure policy takes the worst of its sources."""

import pytest

from arbiter.core import types
from arbiter.core.view import MemoryReading, PressureMarks
from arbiter.units import Bytes
from policies.pressure import level

pytestmark = pytest.mark.spec("C5")


@pytest.mark.parametrize(
    ("kind", "free", "stalls", "expected"),
    [
        (types.DeviceKind.HOST, 15, 0, types.Level.NOMINAL),
        (types.DeviceKind.HOST, 14, 0, types.Level.LOW),
        (types.DeviceKind.CPU, 5, 0, types.Level.LOW),
        (types.DeviceKind.CPU, 4, 0, types.Level.CRITICAL),
        (types.DeviceKind.HOST, 90, 0.1, types.Level.LOW),
        (types.DeviceKind.HOST, 14, 0.7, types.Level.CRITICAL),
        (types.DeviceKind.GPU, 5, 0, types.Level.NOMINAL),  # of a reserve of 10
        (types.DeviceKind.GPU, 4, 0, types.Level.LOW),
        (types.DeviceKind.GPU, 1, 0, types.Level.CRITICAL),
    ],
)
def test_worst_pressure_source_wins(
    kind: types.DeviceKind, free: int, stalls: float, expected: types.Level
) -> None:
    assert level(MemoryReading(kind, Bytes(free), Bytes(100), Bytes(10), stalls)) is expected


@pytest.mark.parametrize(
    ("kind", "free", "stalls", "expected"),
    [
        (types.DeviceKind.CPU, 30, 0, types.Level.NOMINAL),
        (types.DeviceKind.CPU, 29, 0, types.Level.LOW),
        (types.DeviceKind.HOST, 9, 0, types.Level.CRITICAL),
        (types.DeviceKind.GPU, 7, 0, types.Level.LOW),
        (types.DeviceKind.GPU, 3, 0, types.Level.CRITICAL),
        (types.DeviceKind.CPU, 90, 0.1, types.Level.NOMINAL),
        (types.DeviceKind.CPU, 90, 0.2, types.Level.LOW),
        (types.DeviceKind.CPU, 90, 0.9, types.Level.CRITICAL),
    ],
)
def test_marks_of_the_settings_replace_the_defaults(
    kind: types.DeviceKind, free: int, stalls: float, expected: types.Level
) -> None:
    marks = PressureMarks(0.3, 0.1, 0.8, 0.4, 0.2, 0.9)
    assert level(MemoryReading(kind, Bytes(free), Bytes(100), Bytes(10), stalls, marks)) is expected
