"""What is guessed of a model of which nothing was measured."""

import pytest

from arbiter.core import events as ev
from arbiter.core.decisions import Grant
from arbiter.core.records import estimates
from arbiter.core.records.estimates import Estimates, ModelKey
from arbiter.core.settings import DEFAULTS
from arbiter.core.types import ModelName, Need
from arbiter.units import Bytes, TicketId, in_seconds, seconds
from tests.support.core_driver import CPU, CoreDriver, gib


@pytest.mark.spec("A17")
@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 16),
        ("Qwen/Qwen3-0.6B", 1.2),
        ("HuggingFaceTB/SmolLM2-135M", 0.27),
        ("mistralai/Mixtral-8x7B-v0.1", 112),
        ("Qwen/Qwen3-30B-A3B-FP8", 30 * 1.12),
        ("TheBloke/Llama-2-13B-AWQ", 6.5 * 1.12),
        ("some/model-fp32-1b", 4),
    ],
)
def test_parameter_count_and_precision_in_a_model_name_give_bytes(
    name: str, gigabytes: float
) -> None:
    assert estimates.of_name(name) == pytest.approx(gigabytes * 1e9)


@pytest.mark.spec("A17")
@pytest.mark.parametrize("name", ["small-chat", "all-MiniLM-L6-v2", "gpt-4b2x", "v1.5", "A3B"])
def test_model_name_without_a_parameter_count_gives_no_estimate(name: str) -> None:
    assert estimates.of_name(name) is None


@pytest.mark.spec("A17")
def test_files_count_by_their_kind_and_unknown_kinds_not_at_all() -> None:
    sizes = {"a.gguf": 1000, "deep/B.SAFETENSORS": 1000, "README.md": 5000}
    assert estimates.of_files(sizes) == 2400
    assert estimates.of_files({"README.md": 5000}) is None


@pytest.mark.spec("A17")
def test_measured_overhead_of_a_capability_is_added_to_its_next_computed_need() -> None:
    driver = CoreDriver()
    driver.resident(0, "a", 30, explicit=False)
    driver.engines["a"] = {CPU: 36}
    for t in (1, 2):
        driver.read(t)
    [computed] = driver.ask(3, "b", 20, explicit=False)
    [said] = driver.ask(4, "c", 5)
    assert isinstance(computed, Grant) and computed.devices[0].size_bytes == gib(26)
    assert isinstance(said, Grant) and said.devices[0].size_bytes == gib(5)


@pytest.mark.spec("A17")
def test_least_bytes_of_an_engine_are_not_learned_away_before_it_fills_them() -> None:
    driver = CoreDriver()
    driver.resident(0, "a", 30, explicit=False, least=22)
    driver.engines["a"] = {CPU: 12}
    for t in (1, 2):
        driver.read(t)
    [same] = driver.ask(3, "a1", 30, explicit=False, least=22)
    assert isinstance(same, Grant) and same.devices[0].size_bytes == gib(22)


@pytest.mark.spec("A17")
def test_unfilled_engine_does_not_make_other_models_look_smaller() -> None:
    known = estimates.Estimates(DEFAULTS)
    one, other = (estimates.ModelKey("text", name, "") for name in "ab")
    need = Need(Bytes(20), working_bytes=Bytes(10), least_bytes=Bytes(28))
    known.saw_overhead(one, need, Bytes(12))
    assert known.size(other, need, need_is_explicit=False).device_bytes == 28
    small = Need(Bytes(5), working_bytes=Bytes(10))
    assert known.size(other, small, need_is_explicit=False).device_bytes == 13


@pytest.mark.spec("A17")
def test_learned_overhead_may_be_negative_but_not_below_the_weights() -> None:
    driver = CoreDriver()
    driver.resident(0, "a", 30, explicit=False)
    driver.engines["a"] = {CPU: 25}
    for t in (1, 2):
        driver.read(t)
    [grant] = driver.ask(3, "b", 20, explicit=False)  # all of it weights
    assert isinstance(grant, Grant) and grant.devices[0].size_bytes == gib(20)


KEY = ModelKey("text", "a", "settings")


def expected_s(*took_s: float) -> float:
    """Of the next load, after these."""
    known = Estimates(DEFAULTS)
    for s in took_s:
        known.loaded(KEY, seconds(s))
    return in_seconds(known.load_time(KEY))


@pytest.mark.spec("A17")
def test_two_loads_in_five_that_took_ten_times_as_long_do_not_count() -> None:
    assert expected_s(2.0) == 2.0
    assert expected_s(2.0, 1.9, 20.0, 2.1, 20.0) == 2.1


@pytest.mark.spec("A17")
def test_slower_load_time_is_expected_after_three_loads() -> None:
    assert expected_s(2.0, 2.0, 2.0, 2.0, 2.0, 9.0, 9.0) == 2.0
    assert expected_s(2.0, 2.0, 2.0, 2.0, 2.0, 9.0, 9.0, 9.0) == 9.0


@pytest.mark.spec("A17")
def test_exported_estimates_restore_the_expected_times() -> None:
    known, later = Estimates(DEFAULTS), Estimates(DEFAULTS)
    for s in (1.0, 3.0, 2.0):
        known.loaded(KEY, seconds(s))
        known.woke(KEY, seconds(s / 10))
    later.restore(known.export())
    assert (later.load_time(KEY), later.wake_time(KEY)) == (seconds(2), seconds(0.2))
    later.forget_model(ModelName("text", "a"))
    assert (later.load_time(KEY), later.wake_time(KEY)) == (0, 0)
    assert [row for row in later.export() if row["model"]] == []


@pytest.mark.spec("A17")
def test_learned_values_survive_as_plain_rows() -> None:
    estimates = Estimates(DEFAULTS)
    estimates.saw_peak(KEY, Bytes(1000))
    estimates.loaded(KEY, seconds(3))
    estimates.woke(KEY, seconds(1))
    again = Estimates(DEFAULTS)
    again.restore(estimates.export())
    assert again.export() == estimates.export()
    assert again.export()[0] == {
        "version": 1, "capability": "text", "model": "a", "settings_key": "settings",
        "peak_bytes": 1000, "corrected_bytes": 0, "settled_bytes": 0,
        "loads_ns": [seconds(3)], "wakes_ns": [seconds(1)], "runs_ns": [],
    }  # fmt: skip
    assert again.size(KEY, Need(Bytes(10)), False).device_bytes == 1050
    again.did_not_sleep(KEY)
    assert not again.can_sleep(KEY)
    again.forget(KEY)
    assert again.can_sleep(KEY)
    assert [row["model"] for row in again.export()] == [""]  # what holds for the capability


@pytest.mark.spec("A17")
def test_a_lower_reading_does_not_lower_a_peak_and_other_settings_learn_apart() -> None:
    estimates = Estimates(DEFAULTS)
    estimates.saw_peak(KEY, Bytes(1000))
    estimates.saw_peak(KEY, Bytes(500))
    assert estimates.size(KEY, Need(Bytes(10)), False).source == "learned"
    assert estimates.size(KEY, Need(Bytes(10)), False).device_bytes == 1050
    other = ModelKey("text", "a", "fp8")
    assert estimates.size(other, Need(Bytes(10)), False).source == "computed"


@pytest.mark.spec("A12")
def test_a_correction_lasts_until_a_load_succeeds() -> None:
    estimates = Estimates(DEFAULTS)
    estimates.ran_out(KEY, Bytes(1000))
    assert estimates.size(KEY, Need(Bytes(10)), True).device_bytes == 1250
    estimates.loaded(KEY, seconds(1))
    assert estimates.size(KEY, Need(Bytes(10)), True).device_bytes == 10


def test_an_arbiter_hands_its_learning_to_the_next() -> None:
    driver, successor = CoreDriver(), CoreDriver()
    driver.ask(0, "a", 1)
    driver.at(3, ev.Loaded(TicketId("a"), seconds(3)))
    successor.arbiter.restore_learned(driver.arbiter.export_learned())
    assert successor.arbiter.export_learned() == driver.arbiter.export_learned()


@pytest.mark.spec("A17", "J1")
def test_times_of_a_model_are_those_of_its_slowest_settings() -> None:
    known = Estimates(DEFAULTS)
    short, long = (ModelKey("text", "a", settings) for settings in ("1", "2"))
    known.loaded(short, seconds(2))
    known.loaded(long, seconds(5))
    known.woke(short, seconds(1))
    assert known.times() == {ModelName("text", "a"): (seconds(5), seconds(1))}
