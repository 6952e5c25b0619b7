"""For how long a replica is wanted."""

from dataclasses import replace

import pytest

from arbiter.core import events as ev
from arbiter.core.state import CoreState
from arbiter.core.types import Floor
from arbiter.units import TicketId
from tests.support.core_driver import CoreDriver, s


@pytest.mark.spec("H0")
def test_a_replica_is_wanted_while_a_ticket_is_open_and_for_a_while_after() -> None:
    driver = CoreDriver(holders=())
    assert driver.arbiter.replica_targets(s(0)) == {"text": 0, "embedding": 0}
    driver.join(0, "h")
    driver.ask(10, "a", 10)
    assert driver.arbiter.replica_targets(s(9_000)) == {"text": 1, "embedding": 0}
    driver.at(20, ev.Released(TicketId("a"), "idle"))
    driver.gone(33, "a")
    assert driver.arbiter.replica_targets(s(332))["text"] == 1
    assert driver.arbiter.replica_targets(s(333))["text"] == 0
    driver.sleep_until(333)
    assert driver.timers == [s(333)]


@pytest.mark.spec("H0")
def test_timer_is_set_for_when_a_replica_is_no_longer_wanted() -> None:
    driver = CoreDriver(holders=())
    driver.join(0, "h")
    rung = [t for t in range(1, 400) if driver.fire_timer(t) == [] and s(300) in driver.timers]
    assert max(rung) >= 290


@pytest.mark.spec("C8")
def test_a_pinned_model_wants_a_replica_from_the_start() -> None:
    assert CoreDriver(pinned="vad", holders=()).arbiter.replica_targets(s(0))["text"] == 1


@pytest.mark.spec("N2")
def test_targets_are_told_without_a_walk_over_all_floors(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = CoreDriver()
    text, embedding = driver.table
    on_device = tuple(replace(m, floor=Floor.DEVICE) for m in text.models)
    driver.at(0, ev.CapabilitiesSet((replace(text, models=on_device), embedding)))
    by_hand = CoreDriver()
    by_hand.at(0, ev.CapabilitiesSet((replace(text, models=on_device), embedding)))
    for model in text.models:
        by_hand.at(0, ev.FloorSet("text", model.name, Floor.HOST))
    monkeypatch.setattr(CoreState, "all_floors", lambda _: pytest.fail("it walks all floors"))
    assert driver.arbiter.replica_targets(s(10_000)) == {"text": 1, "embedding": 0}
    assert by_hand.arbiter.replica_targets(s(10_000)) == {"text": 0, "embedding": 0}
