"""What a decision says of itself."""

import pytest

from arbiter.core.decisions import Reason


@pytest.mark.spec("A9", "C5")
def test_busy_holder_refuses_only_revokes_that_take_idle_models() -> None:
    refused = {reason for reason in Reason if reason.only_if_idle}
    idle_only = {Reason.PRESSURE, Reason.IDLE, Reason.MANUAL, Reason.FREE, Reason.HOURS}
    assert refused == idle_only | {Reason.COMPACT}


@pytest.mark.spec("A9", "A20")
@pytest.mark.parametrize("reason", [Reason.SWAP, Reason.FIT, Reason.SHUTDOWN, Reason.TERM])
def test_busy_holder_drains_behind_the_barrier_for_every_other_reason(reason: Reason) -> None:
    assert not reason.only_if_idle
