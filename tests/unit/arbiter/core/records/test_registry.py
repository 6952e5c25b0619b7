"""A capability that Python registered lasts until it is unregistered (A2)."""

from dataclasses import replace

import pytest

from arbiter.core import events as ev
from arbiter.core.decisions import LoadModel
from arbiter.core.types import CapabilitySpec, Floor
from arbiter.errors import NAMES_TOLD, CapabilityConflict, UnknownCapability
from arbiter.units import HolderId, TicketId
from tests.support.core_driver import CoreDriver, capability, granted, refusal, revoked, s

pytestmark = pytest.mark.spec("A2")
VAD = capability("vad", "vad", ("silero",))


def registered() -> CoreDriver:
    driver = CoreDriver()
    driver.at(0, ev.CapabilityRegistered(VAD))
    return driver


def known(driver: CoreDriver) -> set[str]:
    return set(driver.arbiter.replica_targets(s(9)))


def test_registration_outlives_a_change_of_the_table() -> None:
    driver = registered()
    driver.resident(0, "v", 1, capability="vad", model="silero")
    driver.at(1, ev.CapabilitiesSet((driver.table[0],)))
    assert known(driver) == {"text", "vad"} and driver.state_of("v") == "resident"
    assert granted(driver.ask(2, "w", 1, capability="vad", model="silero")) == ["w"]


def test_unregistered_capability_refuses_requests_and_its_models_leave_when_idle() -> None:
    driver = registered()
    driver.resident(0, "v", 1, capability="vad", model="silero")
    assert revoked(driver.at(1, ev.CapabilityUnregistered("vad"))) == [("v", "idle", "gone")]
    error = refusal(driver.ask(2, "w", 1, capability="vad", model="silero"))
    assert error == UnknownCapability("vad", ("embedding", "text"))
    driver.at(3, ev.Released(TicketId("v"), "manual"))
    driver.gone(4, "v")
    assert driver.last("model_removed").data["model"] == "silero"
    assert driver.arbiter.registered == ()


@pytest.mark.parametrize("name", ["vda", "text"])
def test_unregistering_what_python_did_not_register_names_what_it_did(name: str) -> None:
    driver = registered()
    with pytest.raises(UnknownCapability) as caught:
        driver.at(1, ev.CapabilityUnregistered(name))
    assert caught.value.known == ("vad",)
    assert known(driver) == {"text", "embedding", "vad"}


def test_table_that_differs_from_a_registration_is_refused_as_a_whole() -> None:
    driver = registered()
    other: CapabilitySpec = replace(VAD, engine="another")
    with pytest.raises(CapabilityConflict, match="other engine"):
        driver.at(1, ev.CapabilitiesSet((other,)))
    assert known(driver) == {"text", "embedding", "vad"}
    driver.at(2, ev.CapabilitiesSet((VAD,)))  # the same may be in both
    assert known(driver) == {"vad"}


def test_registration_of_what_the_table_has_outlives_the_table() -> None:
    driver = CoreDriver()
    embedding = driver.table[1]
    driver.at(0, ev.CapabilityRegistered(embedding))
    assert driver.arbiter.registered == (embedding,)
    driver.at(1, ev.CapabilitiesSet((driver.table[0],)))
    assert known(driver) == {"text", "embedding"}
    driver.at(2, ev.CapabilityUnregistered("embedding"))
    assert known(driver) == {"text"}


def test_registration_that_differs_from_the_table_is_refused() -> None:
    driver = CoreDriver()
    with pytest.raises(CapabilityConflict, match="other engine"):
        driver.at(0, ev.CapabilityRegistered(replace(driver.table[1], engine="another")))
    assert driver.arbiter.registered == ()


@pytest.mark.spec("D9")
def test_capability_registered_again_keeps_its_resident_and_what_was_learned_of_it() -> None:
    driver = registered()
    driver.resident(0, "v", 1, capability="vad", model="silero")
    driver.beat(1, "v", inflight=1)
    driver.at(2, ev.CapabilityUnregistered("vad"))
    driver.at(3, ev.CapabilityRegistered(VAD))
    assert revoked(driver.beat(4, "v")) == []
    assert driver.state_of("v") == "resident"
    driver.at(5, ev.Released(TicketId("v"), "manual"))
    driver.gone(6, "v")
    assert "model_removed" not in driver.kinds()


@pytest.mark.spec("D1")
def test_configured_floor_of_a_registered_capability_is_acted_on_at_once() -> None:
    driver = CoreDriver()
    driver.join(0, "g", capability="vad")
    floored = replace(VAD, models=(replace(VAD.models[0], floor=Floor.DEVICE),))
    load = LoadModel(HolderId("g"), "silero")
    assert driver.at(1, ev.CapabilityRegistered(floored)) == [load]


def test_error_shows_that_there_are_more_names_than_it_tells() -> None:
    driver = CoreDriver()
    many = capability("many", "text", tuple(f"m{n:02}" for n in range(NAMES_TOLD + 5)))
    driver.at(0, ev.CapabilityRegistered(many))
    error = refusal(driver.ask(1, "x", 1, capability="many", model="m99"))
    assert str(error).endswith(", ...") and str(error).count("m") > NAMES_TOLD
