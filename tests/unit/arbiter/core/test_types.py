"""What a model needs: the sum of its parts, each of which is charged."""

from dataclasses import replace

import pytest

from arbiter.core.types import Need
from arbiter.units import Bytes

WHOLE = Need(*(Bytes(1 << n) for n in range(5)), host_bytes=Bytes(1 << 9))
PARTS = ("weights_bytes", "working_bytes", "scratch_bytes", "context_bytes", "drafter_bytes")


@pytest.mark.spec("A3", "F9")
@pytest.mark.parametrize("part", PARTS)
def test_each_part_of_a_need_is_of_the_device_and_host_ram_is_not(part: str) -> None:
    without = replace(WHOLE, **{part: Bytes(0)})
    assert WHOLE.device_bytes == 0b11111
    assert WHOLE.device_bytes - without.device_bytes == getattr(WHOLE, part)
