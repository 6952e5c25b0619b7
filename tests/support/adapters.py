"""Adapters for tests, good and bad, without PEFT: a config and a safetensors file."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file


def write(
    folder: Path, shapes: Mapping[str, tuple[int, int]], rank: int = 8, **config: Any
) -> Path:
    """LoRA of random weights for modules of (out, in) each; `config` overrides its fields."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(rank)
    tensors = {}
    for module, (out, into) in shapes.items():
        for matrix, shape in (("lora_A", (rank, into)), ("lora_B", (out, rank))):
            values = generator.normal(0, 0.05, shape).astype(np.float32)
            tensors[f"base_model.model.{module}.{matrix}.weight"] = values
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = sorted({module.rsplit(".", 1)[-1] for module in shapes})
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    return folder


def rewrite_header(file: Path, change: Any) -> None:
    """The same data under another header."""
    raw = file.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
