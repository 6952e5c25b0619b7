"""A drafter is a part of its target's ticket: bytes of the need, a line of the engine's config."""

from pathlib import Path
from typing import Any

import pytest

from arbiter.units import MIB, Bytes
from deployments.config.capability_section import CapabilityConfig
from deployments.config.load_plan import DRAFTER_WORKING_BYTES, plan
from deployments.config.schema import ConfigError, Table
from tests.support.model_files import safetensors

pytestmark = pytest.mark.spec("A13", "F9")


def models(folder: Path, **more: Any) -> dict[str, Any]:
    safetensors(folder, "a.safetensors", 100)
    return {
        "a": {"source": "x", "need": {"weights": 5}, "drafter": {"model": "b"}, **more},
        "b": {"source": str(folder), "need": {"weights": 3}},
    }


def capability(folder: Path, engine: str = "vllm", **more: Any) -> CapabilityConfig:
    raw = {"role": "text", "engine": engine, "models": models(folder, **more)}
    return CapabilityConfig.model_validate(raw)


def test_plan_of_a_target_carries_its_drafters_weights_and_workspace(tmp_path: Path) -> None:
    alone = capability(tmp_path, drafter=None)
    made, without = plan("a", capability(tmp_path)), plan("a", alone)
    assert made.need.drafter_bytes == 100 + DRAFTER_WORKING_BYTES
    assert made.need.device_bytes == without.need.device_bytes + made.need.drafter_bytes
    assert DRAFTER_WORKING_BYTES >= MIB and without.need.drafter_bytes == Bytes(0)


def test_engine_is_told_of_the_drafter_and_a_pair_cannot_sleep(tmp_path: Path) -> None:
    made = plan("a", capability(tmp_path, can_sleep=True))
    assert made.config["drafter"] == {"model": str(tmp_path), "tokens": 3}
    assert made.config["can_sleep"] is False and made.need.host_bytes == 0


def test_plan_of_a_target_has_the_same_model_alone(tmp_path: Path) -> None:
    made = plan("a", capability(tmp_path)).without_drafter
    without = plan("a", capability(tmp_path, drafter=None, can_sleep=False))
    assert made == without and without.without_drafter is None


def test_target_with_another_drafter_has_learned_figures_of_its_own(tmp_path: Path) -> None:
    """What one engine was seen to take says nothing of an engine that loads something else."""
    keys = {
        plan("a", capability(tmp_path, drafter=drafter)).settings_key
        for drafter in (None, {"model": "b"}, {"model": "b", "tokens": 5})
    }
    assert len(keys) == 3


def test_engine_that_loads_no_drafter_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no `drafter`"):
        plan("a", capability(tmp_path, engine="x:build"))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"drafter": {"model": "a"}}, "no other model"),
        ({"drafter": {"model": "z"}}, "no other model"),
        ({"adapters": {"folder": "f"}}, "takes no `adapters`"),
    ],
)
def test_impossible_drafter_is_refused_when_the_table_is_read(
    tmp_path: Path, more: dict[str, Any], words: str
) -> None:
    wrong: dict[str, Any] = {
        "capabilities": {
            "c": {"role": "text", "engine": "vllm", "models": models(tmp_path, **more)}
        }
    }
    with pytest.raises(ValueError, match=words):
        Table.model_validate(wrong)
