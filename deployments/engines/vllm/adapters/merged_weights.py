"""A copy of the base with an adapter merged into it (F7): vLLM reads the base's files, and
each weight that the adapter changes gets its product added on the way. Nothing is written to disk.

    W + scale * B @ A       in float32, then in the type in which the engine computes

The sum is rounded to that type, which the product in a slot is not: in float32 the two answer the
same, in bfloat16 within its bound (tests/golden/test_text_golden.py).
"""

import json
from collections.abc import Generator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from deployments.adapters.catalogue import CONFIG, WEIGHTS
from deployments.adapters.validate import parted
from deployments.engines.protocol import Config, EngineLoadFailed

FORMAT = "merged_adapter"
_PLAIN = (torch.float32, torch.float16, torch.bfloat16)
_OURS = ("load_format", "model_loader_extra_config")

Weights = Iterable[tuple[str, torch.Tensor]]


def arguments(config: Config) -> dict[str, Any]:
    """vLLM's arguments for `config["merged"]`, the folder of a checked adapter; empty without one.
    Raises EngineLoadFailed."""
    if "merged" not in config:
        return {}
    if taken := [name for name in _OURS if name in config.get("engine_args", {})]:
        why = f"engine_args: with {taken[0]} no adapter can be merged into the weights"
        raise EngineLoadFailed("BadConfig", why, False)
    return {"load_format": FORMAT, "model_loader_extra_config": {"adapter": config["merged"]}}


@register_model_loader(FORMAT)
class MergingLoader(DefaultModelLoader):
    """vLLM's own loader of safetensors, with an adapter's products added to what it reads."""

    def __init__(self, load_config: LoadConfig) -> None:
        extra = dict(load_config.model_loader_extra_config)
        self.adapter = Path(extra.pop("adapter"))
        plain = replace(load_config, load_format="safetensors", model_loader_extra_config=extra)
        super().__init__(plain)

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Raises EngineLoadFailed."""
        weights = super().get_all_weights(model_config, model)
        yield from merged(weights, self.adapter, model_config.dtype)


def merged(
    weights: Weights, adapter: Path, dtype: torch.dtype
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Yields every weight by its name, shapes [out, in]. Raises EngineLoadFailed for a weight that
    is quantized, and for a weight of the adapter that the base lacks."""
    products = _products(adapter)
    for name, weight in weights:
        product = products.pop(name.removesuffix(".weight"), None)
        if product is None:
            yield name, weight
        elif weight.dtype not in _PLAIN:
            raise EngineLoadFailed(
                "MergeFailed", f"{name} is {weight.dtype}: it is quantized", False
            )
        else:
            a, b, scale = product
            yield name, (weight.float() + scale * (b.float() @ a.float())).to(dtype)
    if products:
        raise EngineLoadFailed(
            "MergeFailed", f"the base's files have no {min(products)}.weight", False
        )


def _products(adapter: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor, float]]:
    """Returns by module A [rank, in], B [out, rank], and the scale, which vLLM computes for slots
    too."""
    helper = PEFTHelper.from_dict(json.loads((adapter / CONFIG).read_text()))
    matrices: dict[str, dict[str, torch.Tensor]] = {}
    for tensor, values in load_file(adapter / WEIGHTS).items():
        module, matrix = parted(adapter.name, tensor)
        matrices.setdefault(module, {})[matrix] = values
    return {
        module: (pair["lora_A"], pair["lora_B"], helper.get_rank_and_scaling(module)[1])
        for module, pair in matrices.items()
    }
