"""Engines of vLLM over a slab of KV that a test holds: what they are asked, and what is stored."""

from pathlib import Path
from random import Random
from typing import Any

from arbiter.units import MIB
from tests.support.engine_host import Child, until
from tests.support.slabs import path_of

VLLM = "deployments.engines.vllm.engine:build"
BLOCK = 128  # tokens, of the CPU build
LONG = 1_300  # tokens: ten blocks and a part of one
STORED = LONG // BLOCK


def prompt(seed: int, tokens: int = LONG) -> list[int]:
    return [Random(seed * 10_000 + place).randrange(10, 2000) for place in range(tokens)]


def config(model: Path, slab: int | None, **more: Any) -> dict[str, Any]:
    adapters = {f"a{i}": str(model.parent / f"{model.name}-adapters" / f"a{i}") for i in range(2)}
    args = {
        "dtype": "float32",
        "kv_cache_memory_bytes": 64 * MIB,
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "enable_prompt_tokens_details": True,
        "enable_lora": True,
        "max_loras": 2,
        "max_lora_rank": 16,
        "lora_modules": adapters,
        **more,
    }
    given: dict[str, Any] = {"model": str(model), "served_name": "tiny", "engine_args": args}
    if slab is not None:
        given["slabs"] = {"kv": {"path": path_of(slab)}}
    return given


def facts(child: Child) -> dict[str, int]:
    status, said = child.call("GET", "/slab")
    assert status == 200, said
    found: dict[str, int] = said["kv"]
    return found


def await_rows(child: Child, count: int) -> None:
    """The blocks of the last step are stored in the next one, after the answer."""
    until(lambda: facts(child)["ready"] >= count, 60)
