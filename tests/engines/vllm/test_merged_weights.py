"""An adapter is added to the weights that it changes, or the load says why not."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deployments.engines.protocol import EngineLoadFailed
from deployments.engines.vllm.adapters import merged_weights
from tests.support.adapters import write

pytestmark = pytest.mark.spec("F7")
SHAPES = {"layers.0.q_proj": (12, 8)}
NAME, OTHER = "layers.0.q_proj.weight", "layers.0.norm.weight"


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4 / 2**0.5),
        ({"alpha_pattern": {"q_proj": 6}}, 3.0),
    ],
)
def test_product_is_added_with_the_scale_that_a_slot_has(
    tmp_path: Path, config: dict[str, object], scale: float
) -> None:
    adapter = write(tmp_path / "a", SHAPES, rank=2, **config)
    pair = load_file(adapter / "adapter_model.safetensors")
    a, b = (pair[f"base_model.model.layers.0.q_proj.lora_{of}.weight"] for of in "AB")
    base = {OTHER: torch.ones(8), NAME: torch.randn(12, 8)}
    got = dict(merged_weights.merged(base.items(), adapter, torch.float32))
    torch.testing.assert_close(got[NAME], base[NAME] + scale * (b @ a))
    assert got[OTHER] is base[OTHER]


@pytest.mark.parametrize(
    ("base", "why"),
    [
        ({NAME: torch.zeros(12, 8, dtype=torch.int8)}, "quantized"),
        ({OTHER: torch.ones(8)}, f"no {NAME}"),
    ],
)
def test_weights_without_a_plain_place_for_the_product_fail_the_load(
    tmp_path: Path, base: dict[str, torch.Tensor], why: str
) -> None:
    adapter = write(tmp_path / "a", SHAPES)
    with pytest.raises(EngineLoadFailed, match=why):
        list(merged_weights.merged(base.items(), adapter, torch.float32))


def test_load_format_of_a_persons_choice_and_a_merge_exclude_each_other() -> None:
    config = {"merged": "/a", "engine_args": {"load_format": "dummy"}}
    with pytest.raises(EngineLoadFailed, match="load_format"):
        merged_weights.arguments(config)
