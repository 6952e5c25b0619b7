"""Settings of the arbiter in the configuration."""

import pytest

from arbiter.core.settings import DEFAULTS, Watermarks
from arbiter.core.view import PressureMarks, Role
from arbiter.units import GIB, seconds
from deployments.config.schema import ConfigError, parse_table
from policies import bundle


@pytest.mark.spec("C4")
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
def test_invalid_watermarks_are_refused_when_the_configuration_is_read(
    which: str, marks: dict[str, float], wrong: str
) -> None:
    with pytest.raises(ConfigError, match=f"user_config.arbiter.{which}.{wrong}"):
        parse_table({"arbiter": {which: marks}, "capabilities": {}})


@pytest.mark.spec("C4")
def test_watermarks_are_settings_like_others() -> None:
    marks = {"host_marks": {"high": 1.0, "low": 1.0}, "device_marks": {"high": 0.95}}
    settings = parse_table({"arbiter": marks, "capabilities": {}}).arbiter.as_settings()
    assert settings.host_marks == Watermarks(1.0, 1.0)
    assert settings.device_marks == Watermarks(0.95, 0.80)


@pytest.mark.spec("C5")
def test_marks_of_pressure_are_settings_and_those_not_named_stay() -> None:
    given = {"ram": {"low": 0.3, "critical": 0.1}, "stalls": {"low": 0.2, "critical": 0.4}}
    table = parse_table({"arbiter": {"pressure_marks": given}, "capabilities": {}})
    marks = PressureMarks(0.3, 0.1, 0.5, 0.2, 0.2, 0.4)
    assert table.arbiter.as_settings().pressure_marks == marks
    default = parse_table({"capabilities": {}}).arbiter.as_settings()
    assert default.pressure_marks == PressureMarks() == DEFAULTS.pressure_marks


@pytest.mark.spec("C5")
@pytest.mark.parametrize(
    ("marks", "wrong"),
    [
        ({"ram": {"low": 0.1, "critical": 0.2}}, "ram.critical: .*0.2, is above low, 0.1"),
        ({"gpu": {"low": 2, "critical": 0.2}}, "gpu.low: Input should be less"),
        ({"stalls": {"low": 0.5, "critical": 0.2}}, "stalls.critical: .*0.2, is below low, 0.5"),
        ({"stalls": {"low": 0, "critical": 0.2}}, "stalls.low: Input should be greater"),
        ({"disk": {"low": 0.5, "critical": 0.2}}, "disk: Extra inputs"),
    ],
)
def test_marks_of_pressure_that_make_no_sense_are_refused(
    marks: dict[str, dict[str, float]], wrong: str
) -> None:
    with pytest.raises(ConfigError, match=f"user_config.arbiter.pressure_marks.{wrong}"):
        parse_table({"arbiter": {"pressure_marks": marks}, "capabilities": {}})


@pytest.mark.spec("A6", "A9")
@pytest.mark.parametrize(
    ("given", "refusal_s"), [({"barrier_s": 0.5}, 0.5), ({}, 10), ({"barrier_s": 60}, 10)]
)
def test_busy_victim_is_left_alone_as_long_as_a_barrier_lasts_and_ten_seconds_at_most(
    given: dict[str, float], refusal_s: float
) -> None:
    timeouts = parse_table({"arbiter": given, "capabilities": {}}).arbiter.as_settings().timeouts
    assert timeouts.barrier == seconds(given.get("barrier_s", 10))
    assert timeouts.refusal == seconds(refusal_s)


WIKI = {"rank": 12, "act": "pages of the wiki are missing"}


@pytest.mark.spec("C1")
def test_a_new_role_is_one_line_and_a_model_of_it_keeps_its_seconds() -> None:
    role = WIKI | {"keep_warm_s": 7, "evict_cost_s": 2.5}
    chat = {"role": "wiki", "engine": "vllm", "models": {"m": {"source": "hf:a/m"}}}
    table = parse_table({"arbiter": {"roles": {"wiki": role}}, "capabilities": {"w": chat}})
    assert bundle(table.arbiter.as_settings()).roles["wiki"] == Role(
        12, "pages of the wiki are missing", keep_warm_s=7, evict_cost_s=2.5
    )
    (spec,) = table.as_event().capabilities
    assert (spec.role, spec.models[0].keep_warm) == ("wiki", seconds(7))


@pytest.mark.spec("C1")
@pytest.mark.parametrize(
    ("role", "wrong"),
    [
        ({"rank": -1, "act": "x"}, "roles.wiki.rank: Input should be greater than or equal to 0"),
        ({"rank": 1}, "roles.wiki.act: Field required"),
        (WIKI | {"cost": 1}, "roles.wiki.cost: Extra inputs are not permitted"),
    ],
)
def test_a_wrong_role_is_refused_by_its_field(role: dict[str, object], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        parse_table({"arbiter": {"roles": {"wiki": role}}, "capabilities": {}})


@pytest.mark.spec("A11")
def test_an_exclusion_group_may_be_a_role_of_the_configuration() -> None:
    table = {"roles": {"wiki": WIKI}, "one_resident_roles": ["wiki"]}
    settings = parse_table({"arbiter": table, "capabilities": {}}).arbiter.as_settings()
    assert settings.one_resident_roles == {"wiki"}
    with pytest.raises(ConfigError, match="no role 'wiki'; there is: asr, drafter"):
        parse_table({"arbiter": {"one_resident_roles": ["wiki"]}, "capabilities": {}})


@pytest.mark.spec("B2", "B3")
def test_shares_of_a_device_are_settings() -> None:
    table = {"arena": 0.8, "wiggle": 0.2, "pool": 0.5, "gpu_margin": "1GiB"}
    settings = parse_table({"arbiter": table, "capabilities": {}}).arbiter.as_settings()
    assert (settings.arena_fraction, settings.wiggle_fraction) == (0.8, 0.2)
    assert (settings.pool_fraction, settings.gpu_margin_bytes) == (0.5, GIB)
    assert parse_table({"capabilities": {}}).arbiter.as_settings() == DEFAULTS


@pytest.mark.spec("D7")
def test_schedule_and_least_waste_of_compaction_are_set_in_the_table() -> None:
    table = {"compact_least": "8 MiB", "compact_every_loads": 20}
    settings = parse_table({"arbiter": table, "capabilities": {}}).arbiter.as_settings()
    assert (settings.compact_least_bytes, settings.compact_every_loads_count) == (8 << 20, 20)
