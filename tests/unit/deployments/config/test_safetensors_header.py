"""What the headers of safetensors files say of an adapter's slot."""

from pathlib import Path

import pytest

from deployments.config.safetensors_header import linear_shapes, slot_bytes
from tests.support.adapters import write


@pytest.mark.spec("F2")
def test_a_slot_costs_both_matrices_of_every_module_at_the_largest_rank() -> None:
    """Llama 3.1 8B at rank 16: 80 MiB for the layers, 8 for embedding and head."""
    layer = {"q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "o": (4096, 4096),
             "gate": (14336, 4096), "up": (14336, 4096), "down": (4096, 14336)}  # fmt: skip
    layers = {f"{n}.{name}": shape for n in range(32) for name, shape in layer.items()}
    assert slot_bytes(layers, 16) == 80 << 20
    both = layers | {"embed": (128256, 4096), "head": (128256, 4096)}
    assert slot_bytes(both, 64) == (320 << 20) + 2 * 64 * 2 * (128256 + 4096)


def test_modules_are_read_from_the_base_models_headers(tmp_path: Path) -> None:
    write(tmp_path, {"layers.0.q_proj": (12, 8)})
    found = linear_shapes(tmp_path)
    assert found["base_model.model.layers.0.q_proj.lora_A"] == (8, 8)
