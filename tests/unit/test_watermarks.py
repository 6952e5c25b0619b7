"""Watermarks of host RAM and of devices: high and low, and nothing in between."""

from dataclasses import replace

import pytest

from arbiter import units
from arbiter.core import events as ev
from arbiter.core import types
from arbiter.core.settings import DEFAULTS, Settings, Watermarks
from arbiter.units import TicketId, seconds
from deployments.config.arbiter_section import ArbiterConfig
from deployments.config.schema import ConfigError, parse_table
from tests.unit.desk import CPU, HOST, PLAIN, Desk, granted, reaped, revoked
from tests.unit.test_gangs import Gpus

pytestmark = pytest.mark.spec("C4")
MARKED = replace(PLAIN, device_marks=Watermarks(0.90, 0.80))


def fall_asleep(desk: Desk, t: float, name: str, size: float) -> list[str]:
    """It is loaded and put to sleep for another. Whose engine is ended when it sleeps."""
    desk.resident(t, name, size, host=size)
    desk.engines[name] = {CPU: size}
    desk.read(t + 1)
    other = f"other-{name}"
    assert revoked(desk.ask(t + 20, other, 80, model="large")) == [(name, "swap", "asleep")]
    desk.at(t + 20, ev.Withdrawn(TicketId(other)))
    desk.engines[name] = {HOST: size}
    desk.at(t + 21, ev.Slept(TicketId(name)))
    out = desk.read(t + 22)
    assert desk.state_of(name) == "asleep"
    return reaped(out)


def asleep(host: float, sizes: dict[str, float]) -> tuple[Desk, list[str]]:
    desk, gone = Desk(device=80, host=host), []
    for number, (name, size) in enumerate(sizes.items()):
        gone += fall_asleep(desk, 100 * number, name, size)
        for ended in gone:
            desk.gone(100 * number + 30, ended)
    return desk, gone


def test_above_the_high_mark_sleepers_go_until_the_low_one_and_no_further() -> None:
    desk, gone = asleep(100, {"a": 10, "b": 10, "c": 10, "d": 10, "e": 58})
    assert gone == ["a", "b"]  # 98 of 100: without the one it is 88 yet, without both 78
    assert [desk.state_of(name) for name in "cde"] == ["asleep"] * 3
    assert desk.charged(HOST) == 78
    assert desk.last("eviction").data["reason"] == "fit"


def test_between_the_marks_nothing_happens() -> None:
    desk, gone = asleep(100, {"a": 30, "b": 30, "c": 30})
    assert gone == [] and desk.charged(HOST) == 90


def test_the_last_to_fall_asleep_stays_even_alone_above_the_mark() -> None:
    desk, gone = asleep(32, {"a": 31})
    assert gone == [] and desk.state_of("a") == "asleep"
    desk, gone = asleep(100, {"a": 15, "b": 80})
    assert gone == ["a"] and desk.state_of("b") == "asleep"


def test_a_sleeper_that_somebody_waits_for_stays() -> None:
    desk, _ = asleep(100, {"a": 40, "b": 40})
    desk.ask(300, "large", 80)  # so that there is no room to wake in
    desk.at(301, ev.Loaded(TicketId("large"), seconds(1)))
    desk.ask(302, "a", 40, host=40)
    desk.foreign[HOST] = 15  # 95 of 100
    assert reaped(desk.read(303)) == [] and desk.state_of("a") == "asleep"


def test_a_bed_that_is_kept_for_one_that_drains_counts_once_it_is_slept_in() -> None:
    desk, _ = asleep(100, {"a": 40, "b": 30})
    desk.resident(300, "c", 25, host=25)
    desk.engines["c"] = {CPU: 25}
    assert revoked(desk.ask(320, "other", 80, model="large")) == [("c", "swap", "asleep")]
    assert desk.charged(HOST) == 95 and desk.state_of("a") == desk.state_of("b") == "asleep"
    assert reaped(desk.at(321, ev.BarrierDropped(TicketId("c"), 1))) == []


# -- devices --------------------------------------------------------------------------------------


NAMES = "a b c d e large small text".split()


def crowded(settings: Settings) -> Desk:
    """76 of 80; all idle for long."""
    desk = Desk(device=80, settings=settings)
    for at, name in enumerate(NAMES):
        desk.resident(at, name, 9.5)
    desk.woke(50)
    return desk


def test_on_a_device_they_are_off_unless_switched_on() -> None:
    assert DEFAULTS.device_marks is None and ArbiterConfig().as_settings() == DEFAULTS
    assert revoked(crowded(PLAIN).ask(100, "vad", 6)) == [("a", "swap", "gone")]


def test_on_a_device_they_act_with_a_waiter_and_take_more_than_it_needs() -> None:
    desk = crowded(MARKED)
    assert all(desk.state_of(name) == "resident" for name in NAMES)
    assert revoked(desk.ask(100, "vad", 6)) == [("a", "swap", "gone"), ("b", "swap", "gone")]
    assert desk.woke(101) == []
    desk.at(102, ev.Released(TicketId("a"), "swap"))
    assert granted(desk.gone(103, "a")) == ["vad"]


def test_on_a_device_they_act_for_one_that_wants_to_grow() -> None:
    desk = crowded(MARKED)
    grow = ev.GrowthAsked(TicketId("text"), units.Bytes(6 << 30), seconds(30))
    assert [name for name, _, _ in revoked(desk.at(100, grow))] == ["a", "b"]


def test_on_a_device_they_take_nobody_more_urgent_than_who_waits() -> None:
    desk = Desk(device=80, settings=MARKED)
    desk.resident(0, "a", 78, priority=types.Priority.HIGH)
    assert revoked(desk.ask(100, "b", 6, priority=types.Priority.LOW)) == []


def test_nor_than_who_wants_to_grow() -> None:
    desk = Desk(device=80, settings=MARKED)
    desk.resident(0, "a", 68, priority=types.Priority.HIGH)
    desk.resident(1, "text", 9)
    grow = ev.GrowthAsked(TicketId("text"), units.Bytes(6 << 30), seconds(30))
    assert revoked(desk.at(100, grow)) == [] and "text" in desk.state.growing
    assert revoked(desk.ask(101, "b", 1)) == []  # something has changed there


def test_on_a_device_they_do_not_act_for_one_that_asks_for_bytes_of_another() -> None:
    desk = Gpus(100, 100, settings=MARKED)
    for name, size in (("a", 95), ("b", 50)):
        desk.want(0, name, size)
        desk.done(0, name)
    desk.ask(1, "c", 45, holder="k", priority=types.Priority.HIGH)
    desk.at(1, ev.Loaded(TicketId("c"), seconds(0)))
    assert (desk.home("a"), desk.home("b"), desk.home("c")) == ({"0": 95}, {"1": 50}, {"1": 45})
    grow = ev.GrowthAsked(TicketId("b"), units.Bytes(20 << 30), seconds(30))
    assert revoked(desk.at(100, grow)) == [] and "b" in desk.state.growing
    assert revoked(desk.want(101, "d", 1)) == []  # something has changed there


def test_on_a_device_they_do_not_act_for_one_that_is_too_large_for_it() -> None:
    desk = Gpus(100, 200, settings=MARKED)
    for name, size in (("a", 95), ("b", 150)):
        desk.want(0, name, size)
        desk.done(0, name)
    assert revoked(desk.want(100, "c", 120)) == [("b", "swap", "gone")]


# -- configuration --------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["host_marks", "device_marks"])
@pytest.mark.parametrize(
    ("marks", "wrong"),
    [
        ({"high": 0.7, "low": 0.8}, "low: Value error, low, 0.8, is above high, 0.7"),
        ({"low": 0.95}, "low: Value error, low, 0.95, is above high, 0.9"),
        ({"high": 90}, "high: Input should be less than or equal to 1"),
        ({"low": -0.1}, "low: Input should be greater than or equal to 0"),
        ({"middle": 0.5}, "middle: Extra inputs are not permitted"),
    ],
)
def test_marks_that_make_no_sense_are_refused_when_the_configuration_is_read(
    which: str, marks: dict[str, float], wrong: str
) -> None:
    with pytest.raises(ConfigError, match=f"user_config.arbiter.{which}.{wrong}"):
        parse_table({"arbiter": {which: marks}, "capabilities": {}})


def test_marks_are_settings_like_others() -> None:
    marks = {"host_marks": {"high": 1.0, "low": 1.0}, "device_marks": {"high": 0.95}}
    settings = parse_table({"arbiter": marks, "capabilities": {}}).arbiter.as_settings()
    assert settings.host_marks == Watermarks(1.0, 1.0)
    assert settings.device_marks == Watermarks(0.95, 0.80)
