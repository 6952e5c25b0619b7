"""What is known of each engine library without importing it, and what each needs before any load.

A new engine of this repository is one row of ENGINES. Where the arguments of an engine decide how
much memory it takes, its row names an estimate of its own.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from arbiter.core.types import Need, Split
from arbiter.units import MIB, Bytes, Content
from deployments.config.fields import parse_size
from deployments.config.model_files import (
    adapter_slots,
    picture_bytes,
    sees,
    slot_size,
    weights_bytes,
)
from deployments.config.model_section import ModelConfig
from deployments.config.schema import ConfigError

Arguments = Mapping[str, Any]  # `engine_args`
# From the kind, the folder of the model and its configuration; raises ConfigError.
Estimate = Callable[["EngineKind", str, ModelConfig], Need]
SlabContents = Callable[[str, ModelConfig], tuple[Content, ...]]  # from folder and configuration


def no_cache(arguments: Arguments) -> Bytes:
    """The cache of an engine that allocates none of a configured size: 0."""
    return Bytes(0)


def kv_cache(arguments: Arguments) -> Bytes:
    """vLLM's `kv_cache_memory_bytes`, which it allocates when it loads."""
    return Bytes(parse_size(arguments.get("kv_cache_memory_bytes", 0)))


def no_contents(path: str, model: ModelConfig) -> tuple[Content, ...]:
    """What an engine keeps that writes no slab: nothing."""
    return ()


def vllm_contents(path: str, model: ModelConfig) -> tuple[Content, ...]:
    """KV blocks, unless the model's configuration says no, images of adapters where it has some,
    and pictures of a model that sees."""
    kept = {
        Content.KV: model.keep_kv,
        Content.ADAPTER: model.adapters is not None,
        Content.PICTURE: sees(Path(path)),
    }
    return tuple(content for content, is_kept in kept.items() if is_kept)


def weights_and_cache(kind: "EngineKind", path: str, model: ModelConfig) -> Need:
    """Weights, the engine's overhead, and its cache where it has one."""
    weights = weights_bytes(Path(path))
    cache = kind.cache_bytes(model.engine_args)
    return Need(
        weights_bytes=weights,
        working_bytes=Bytes(kind.working_bytes + cache),
        context_bytes=kind.context_bytes,
        gpu_context_bytes=kind.gpu_context_bytes,
        host_bytes=weights if model.can_sleep else Bytes(0),
        least_bytes=Bytes(weights + cache) if cache else Bytes(0),
    )


def weights_cache_and_slots(kind: "EngineKind", path: str, model: ModelConfig) -> Need:
    """Adds to weights and cache: caches of pictures, and slots of adapters, with as many adapters
    again in vLLM's own cache on the host, which without a GPU is the same RAM; with one it is
    slack."""
    need = weights_and_cache(kind, path, model)
    pictures = picture_bytes(Path(path), model.engine_args)
    need = replace(need, working_bytes=Bytes(need.working_bytes + pictures))
    if model.adapters is None:
        return need
    slots_bytes = adapter_slots(path, model) * slot_size(path, model.adapters.max_rank)
    return replace(need, working_bytes=Bytes(need.working_bytes + 2 * slots_bytes))


def file_and_engine(ending: str) -> Estimate:
    """Makes the estimate for models in one large file of that ending, which is no safetensors. A
    model without such a file has no weights: its source may be a word that the engine knows
    (`espeak-ng`)."""

    def estimate(kind: "EngineKind", path: str, model: ModelConfig) -> Need:
        files = [Path(path)] if path.endswith(ending) else Path(path).glob(f"*{ending}")
        return Need(
            weights_bytes=Bytes(sum(file.stat().st_size for file in files)),
            working_bytes=kind.working_bytes,
            context_bytes=kind.context_bytes,
            gpu_context_bytes=kind.gpu_context_bytes,
        )

    return estimate


@dataclass(frozen=True, slots=True)
class EngineKind:
    """One engine library. Bytes are what the node agent measured of the embedded models on the CPU
    build (docs/benchmarks.md), where no comment says otherwise."""

    entry: str  # `module:function`, called in the engine's process
    preload: tuple[str, ...]  # modules the zygote imports so that a start is short
    context_bytes: Bytes  # what a live but empty engine process holds
    working_bytes: Bytes  # activations and buffers under traffic, caches apart
    # The same on a GPU; 0: it computes there on none
    gpu_context_bytes: Bytes = Bytes(0)
    takes_turns: bool = False  # computes under a dispatch lock where the model names one
    program: str = ""  # has to be on the PATH
    split: Split = Split.NONE  # over several devices, where one is too small (B5)
    takes_prewarms: bool = False  # may take POST /prewarm (deployments.requests.prefixes)
    takes_drafters: bool = False  # loads a drafter beside its model
    merges_adapters: bool = False  # loads a model with an adapter added to its weights (F7)
    slab_contents: SlabContents = no_contents  # which slabs of the node's pool it writes (E1)
    # Files of a model that it can load from a copy in host RAM (D4), as for Path.glob; none: it
    # keeps its weights to itself
    copies: tuple[str, ...] = ()
    cache_bytes: Callable[[Arguments], Bytes] = no_cache
    estimate: Estimate = weights_and_cache


# CUDA's context with PyTorch's kernels: NVML showed 0.7 GiB on an H200 (docs/benchmarks.md).
GPU_CONTEXT = Bytes(700 * MIB)
SAFETENSORS = ("**/*.safetensors",)
WEIGHTS = (*SAFETENSORS, "**/*.gguf", "**/*.onnx", "**/*.bin")  # of an engine that is not known

ENGINES: dict[str, EngineKind] = {
    "vllm": EngineKind(
        "deployments.engines.vllm.engine:build",
        ("deployments.engines.vllm.preload",),
        context_bytes=Bytes(100 * MIB),
        gpu_context_bytes=GPU_CONTEXT,
        working_bytes=Bytes(96 * MIB),
        split=Split.EQUAL,  # tensor parallel
        takes_prewarms=True,
        takes_drafters=True,
        merges_adapters=True,
        slab_contents=vllm_contents,
        copies=SAFETENSORS,
        cache_bytes=kv_cache,
        estimate=weights_cache_and_slots,
    ),
    "sentence_transformers": EngineKind(
        "deployments.engines.sentence_transformers:build",
        ("deployments.engines.sentence_transformers",),
        context_bytes=Bytes(56 * MIB),
        gpu_context_bytes=GPU_CONTEXT,
        working_bytes=Bytes(32 * MIB),
        takes_turns=True,
        split=Split.PROPORTIONAL,  # transformers' device_map
        copies=SAFETENSORS,
    ),
    "faster_whisper": EngineKind(
        "deployments.engines.audio.faster_whisper:build",
        ("deployments.engines.audio.faster_whisper",),
        context_bytes=Bytes(50 * MIB),
        gpu_context_bytes=GPU_CONTEXT,  # not measured
        working_bytes=Bytes(96 * MIB),  # of a minute of sound, with the times of its words
        estimate=file_and_engine(".bin"),
        copies=("**/*.bin",),
    ),
    "vits": EngineKind(
        "deployments.engines.audio.vits:build",
        ("deployments.engines.audio.vits",),  # not onnxruntime, whose import starts a thread
        context_bytes=Bytes(84 * MIB),
        working_bytes=Bytes(128 * MIB),  # of one long clause
        estimate=file_and_engine(".onnx"),
    ),
    "kokoro": EngineKind(
        "deployments.engines.audio.kokoro:build",
        ("deployments.engines.audio.kokoro",),
        context_bytes=Bytes(120 * MIB),  # with the styles of fifty voices
        working_bytes=Bytes(320 * MIB),  # of one long clause
        estimate=file_and_engine(".onnx"),
    ),
    "silero": EngineKind(
        "deployments.engines.audio.silero:build",
        ("deployments.engines.audio.silero",),
        context_bytes=Bytes(16 * MIB),
        working_bytes=Bytes(32 * MIB),
    ),
    "diffusers": EngineKind(
        "deployments.engines.diffusers.engine:build",
        ("deployments.engines.diffusers.preload",),
        context_bytes=Bytes(70 * MIB),
        gpu_context_bytes=GPU_CONTEXT,
        # Eight pictures of 64x64 in a batch. Those of real models take gigabytes: give a `need`.
        working_bytes=Bytes(24 * MIB),
        takes_turns=True,
        estimate=weights_cache_and_slots,
        copies=SAFETENSORS,
    ),
    "llama_server": EngineKind(
        "deployments.engines.llama_server:build",
        ("aiohttp",),
        context_bytes=Bytes(64 * MIB),  # not measured, like those of any engine outside this table
        working_bytes=Bytes(64 * MIB),
        program="llama-server",
        copies=("**/*.gguf",),
    ),
}


def engine_kind(engine: str) -> EngineKind:
    """`engine`: a name in ENGINES, or `module:function`, of which only those arguments are known
    that vLLM names alike. Raises ConfigError."""
    if kind := ENGINES.get(engine):
        if kind.program and shutil.which(kind.program) is None:
            raise ConfigError(f"engine {engine!r} needs {kind.program!r} on the PATH")
        return kind
    if ":" in engine:
        overhead = Bytes(64 * MIB)
        return EngineKind(
            engine,
            (),
            overhead,
            overhead,
            takes_prewarms=True,
            copies=WEIGHTS,
            cache_bytes=kv_cache,
            estimate=weights_cache_and_slots,
        )
    names = ", ".join(sorted(ENGINES))
    raise ConfigError(f"no engine {engine!r}; there is: {names}, or write `module:function`")
