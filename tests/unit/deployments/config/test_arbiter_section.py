"""Settings of the arbiter in the configuration."""

import pytest

from arbiter.core.settings import Watermarks
from deployments.config.schema import ConfigError, parse_table

pytestmark = pytest.mark.spec("C4")


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


def test_watermarks_are_settings_like_others() -> None:
    marks = {"host_marks": {"high": 1.0, "low": 1.0}, "device_marks": {"high": 0.95}}
    settings = parse_table({"arbiter": marks, "capabilities": {}}).arbiter.as_settings()
    assert settings.host_marks == Watermarks(1.0, 1.0)
    assert settings.device_marks == Watermarks(0.95, 0.80)
