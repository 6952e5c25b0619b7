"""What holders and devices are said to have."""

import pytest

from arbiter.core import events as ev
from arbiter.core.reports.status_messages import status_messages
from arbiter.units import TicketId
from tests.support.core_driver import CPU, CoreDriver


@pytest.mark.spec("K5")
def test_each_holder_has_a_sentence_of_what_it_holds_and_waits_for_and_each_device_its_sum() -> (
    None
):
    driver = CoreDriver(device=80, holders=("h", "g"))
    driver.resident(0, "a", 30)
    driver.beat(0, "a", inflight=1)
    driver.ask(2, "b", 60)
    said = status_messages(driver.snapshot())
    assert said == {
        CPU: f"The arbiter has lent 30.0 GiB of 80.0 GiB of {CPU} to 1 model;"
        " its node's queue has 1 ticket.",
        "h": f"h holds a (draining, 30.0 GiB on {CPU}) and waits for b (60.0 GiB).",
        "g": "g holds no model.",
    }
    driver.at(3, ev.Withdrawn(TicketId("b")))
    driver.lease(4, "train", 10)
    said = status_messages(driver.snapshot())
    assert said[CPU].endswith(f"lent 40.0 GiB of 80.0 GiB of {CPU} to 1 model and 1 lease.")
    assert said.keys() == {CPU, "h", "g"}, "a lease is no holder of a capability"
