"""Pins beyond the budget are reported."""

import pytest

from tests.support.core_driver import (
    CPU,
    CoreDriver,
    gib,
)


@pytest.mark.spec("B2")
def test_pins_beyond_the_budget_are_reported() -> None:
    driver = CoreDriver(device=80, pinned="a")
    driver.resident(0, "a", 60)
    assert "pinned_overcommit" not in driver.kinds()
    driver.see_node(1, 50, 0)
    told = driver.last("pinned_overcommit")
    assert (told.size_bytes, told.data["device"]) == (gib(10), CPU)
    late = CoreDriver(device=50, pinned="a")
    late.ask(0, "a", 60)
    assert late.last("pinned_overcommit").size_bytes == gib(10)
