"""The models of benchmarks.on_gpu, as they are made and as they are configured: two Llamas of 1.1
billion random weights, an encoder of 0.3 billion, and the tiny models of text and pictures.
"""

import tempfile
from pathlib import Path
from typing import Any

from models import shipped
from models.make_models import MEDIUM, TINY, Shape, default_folder, is_made, make

PORT = 18_430
ONE, TWO = (
    Shape(f"gpu-{name}", 24, 2048, 5504, heads=32, kv_heads=8, adapters=0, seed=seed)
    for name, seed in (("one", 1), ("two", 2))
)
WIDTH, LAYERS = 1024, 24  # of the encoder
STAYS_S = 600
# A Llama's cache is large beside its context of 0.7 GiB, which no sleep gives back: a model counts
# as asleep when nine tenths of its ticket have fallen. The room is for one of them, awake.
ARENA = "20 GiB"
NEED = {"weights": "2.2 GiB", "working": "10.2 GiB", "context": "0.8 GiB"}
GRAPHS = {"working": "11.2 GiB"}  # what a compiled model takes with its graphs
ENGINE_ARGS = {"max_model_len": 4096, "max_num_seqs": 32, "kv_cache_memory_bytes": "10 GiB"}
EAGER = {"enforce_eager": True}
DRAFTED, DRAFTING, UNSIZED = "drafted-chat", "drafting-chat", "unsized-chat"


def make_encoder(folder: Path) -> None:
    """A sentence-transformers model of random weights."""
    if (folder / "modules.json").exists():
        return
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import AutoTokenizer, BertConfig, BertModel

    tokenizer = AutoTokenizer.from_pretrained(default_folder() / ONE.name)
    tokenizer.model_max_length = 512
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=WIDTH // 64,
        intermediate_size=4 * WIDTH,
    )
    with tempfile.TemporaryDirectory() as plain:
        bert: Any = BertModel(config)
        bert.save_pretrained(plain)
        tokenizer.save_pretrained(plain)
        modules = [Transformer(plain), Pooling(WIDTH)]
        SentenceTransformer(modules=modules, device="cpu").save(str(folder))


def make_all() -> Path:
    """The models, made unless they are there; returns the encoder's folder."""
    shipped.unpack_all(default_folder())
    for shape in (TINY, MEDIUM, ONE, TWO):
        if not is_made(default_folder(), shape):
            make(default_folder(), shape)
    folder = default_folder() / "gpu-encoder"
    make_encoder(folder)
    return folder


def configured(encoder: Path, state_file: Path, *, is_compiled: bool = False) -> dict[str, Any]:
    """The whole configuration of Serve. `encoder`: its folder. `is_compiled`: the Llamas."""
    table = {
        "arbiter": {
            "state_file": str(state_file),
            "arenas": {"gpu": ARENA, "host": "64 GiB"},
        },
        "capabilities": {
            "chat": _capability(
                "text",
                "vllm",
                **_llamas(is_compiled),
                **{"small-chat": _chat()},
                **_drafted(),
                **_unsized(),
            ),
            "embedding": _capability(
                "embedding",
                "sentence_transformers",
                encoder={
                    "source": str(encoder),
                    "need": {"weights": "1.2 GiB", "working": "0.2 GiB", "context": "0.7 GiB"},
                },
            ),
            "vision": _capability("vision", "vllm", **{"tiny-describe": _describe()}),
            "image": _capability("image", "diffusers", **{"tiny-draw": _draw()}),
        },
    }
    front = {
        "name": "front",
        "route_prefix": "/",
        "import_path": "deployments.app:front",
        "deployments": [{"name": "front", "user_config": table}],
    }
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": PORT},
        "applications": [front],
    }


def _capability(role: str, engine: str, **models: Any) -> dict[str, Any]:
    times = {"keep_warm_s": STAYS_S, "downscale_to_zero_s": STAYS_S}
    return {"role": role, "engine": engine, **times, "models": models}


def _llamas(is_compiled: bool) -> dict[str, Any]:
    return {
        shape.name: {
            "source": f"made:{shape.name}",
            "need": NEED | GRAPHS if is_compiled else NEED,
            "engine_args": ENGINE_ARGS if is_compiled else {**ENGINE_ARGS, **EAGER},
        }
        for shape in (ONE, TWO)
    }


def _chat() -> dict[str, Any]:
    adapters = default_folder() / "small-chat-adapters"
    return {
        "source": "made:small-chat",
        "need": {"weights": "16 MiB", "working": "0.6 GiB", "context": "0.8 GiB"},
        "can_sleep": False,
        "adapters": {"folder": str(adapters), "slots": 8},
        "engine_args": {
            "max_model_len": 2048,
            "kv_cache_memory_bytes": "0.3 GiB",
            "max_num_seqs": 32,
            **EAGER,
        },
    }


def _drafted() -> dict[str, Any]:
    """A target whose drafter is the larger of the two, so that its leaving is seen."""
    sizes = {"max_model_len": 1024, "max_num_seqs": 8, "kv_cache_memory_bytes": "0.2 GiB"}
    need = {"weights": "32 MiB", "working": "0.6 GiB", "context": "0.8 GiB"}
    target = {"source": f"made:{TINY.name}", "can_sleep": False, "need": need}
    target |= {"drafter": {"model": DRAFTING}, "engine_args": {**sizes, **EAGER}}
    return {DRAFTED: target, DRAFTING: {"source": f"made:{MEDIUM.name}", "can_sleep": False}}


def _unsized() -> dict[str, Any]:
    """A model whose size its configuration leaves to the estimate."""
    sizes = {"max_model_len": 1024, "max_num_seqs": 8, "kv_cache_memory_bytes": "0.2 GiB"}
    args = {**sizes, **EAGER}
    return {UNSIZED: {"source": f"made:{TINY.name}", "can_sleep": False, "engine_args": args}}


def _describe() -> dict[str, Any]:
    sizes = {"max_model_len": 512, "max_num_seqs": 16, "kv_cache_memory_bytes": "64 MiB"}
    return {
        "source": "made:tiny-describe",
        "need": {"weights": "8 MiB", "working": "0.4 GiB", "context": "0.8 GiB"},
        "can_sleep": False,
        "engine_args": {**sizes, **EAGER, "limit_mm_per_prompt": {"image": 2}},
    }


def _draw() -> dict[str, Any]:
    return {
        "source": "made:tiny-draw",
        "need": {"weights": "8 MiB", "working": "0.2 GiB", "context": "0.7 GiB"},
        "engine_args": {"steps": 10, "guidance": 2.0, "max_batch": 8},
    }
