"""vLLM's arguments for a model, as `vllm serve` would read them: our defaults, the configured
`engine_args`, and what sleep, adapters, drafter and slabs need.
"""

import math
from argparse import Namespace
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.cpu_resource_utils import get_allowed_cpu_list

from deployments.engines import command_line, pickles
from deployments.engines.protocol import Config, EngineLoadFailed
from deployments.engines.vllm.adapters import merged_weights
from deployments.engines.vllm.kv import kv_offload
from deployments.engines.vllm.pictures import picture_slab

_PICKLED_FORMATS = ("pt", "npcache")
# vLLM does not start unless this part of a GPU is free, whatever it is to take: by default 0.92, so
# that no model would load beside another. What is free is the arbiter's to judge.
_LEAST_PART = 0.01
_GPU_WORKER = "deployments.engines.vllm.worker.gpu_worker.SleepingGpuWorker"
_CPU_WORKER = "deployments.engines.vllm.worker.cpu_worker.SleepingCpuWorker"
# In vLLM's `additional_config`: the CPU worker sleeps in the node's copy of the model's files.
SHARES_COPY = "shares_copy"


def on_cpu() -> bool:
    """Whether vLLM computes on the CPU in this process."""
    return bool(current_platform.is_cpu())


def compute_threads(config: Config) -> int | None:
    """The configured number; else, without a GPU, as many as `vllm serve` would bind on this node:
    one for each core of the first memory node except the scheduler's, divided by the processes."""
    if "threads" in config:
        return int(config["threads"])
    if not on_cpu():
        return None
    cpus = get_allowed_cpu_list()
    cores = {cpu.physical_core for cpu in cpus if cpu.numa_node == cpus[0].numa_node}
    return max(1, (len(cores) - 1) // processes_count(config))


def arguments(config: Config) -> Namespace:
    """The namespace that `vllm serve` would have. Raises EngineLoadFailed that names a bad
    argument."""
    options = {**_defaults(config), **config.get("engine_args", {})}
    options |= merged_weights.arguments(config)
    _refuse_pickles(config, options)
    if "kv_cache_memory_bytes" not in options:
        raise EngineLoadFailed("BadConfig", "engine_args: kv_cache_memory_bytes is required", False)
    ways = processes_count(config) if on_cpu() else len(config.get("parts", []))
    if ways > 1:  # vLLM counts KV bytes per GPU, or per process of a CPU, a ticket in total
        options["kv_cache_memory_bytes"] = int(options["kv_cache_memory_bytes"]) // ways
    if isinstance(modules := options.get("lora_modules"), dict):
        options["lora_modules"] = [f"{adapter}={folder}" for adapter, folder in modules.items()]
    words = [word for item in options.items() for word in command_line.words(*item)]
    return parser().parse_args(words)


@cache
def parser() -> FlexibleArgumentParser:
    """vLLM's own, once per process or zygote: it reads the source of every config class."""
    made = make_arg_parser(FlexibleArgumentParser())
    made.error = _refuse_arguments
    return made


def _refuse_arguments(message: str) -> NoReturn:
    raise EngineLoadFailed("BadConfig", f"engine_args: {message}", False)


def _refuse_pickles(config: Config, options: dict[str, Any]) -> None:
    """Has vLLM read safetensors only, in which its quantized models are too. Raises
    EngineLoadFailed."""
    if (form := options.get("load_format")) in _PICKLED_FORMATS:
        raise EngineLoadFailed("BadConfig", f"engine_args: load_format {form} reads pickles", False)
    if form in (None, "auto", "hf"):
        options["load_format"] = "safetensors"
    for model in (config, config.get("drafter")):
        if model is not None:
            pickles.refuse(Path(model["model"]))


def _defaults(config: Config) -> dict[str, Any]:
    shared = {
        "model": config["model"],
        "served_model_name": config.get("served_name", config["model"]),
        "disable_log_stats": True,
        "disable_fastapi_docs": True,
        "scheduling_policy": "priority",  # that of the caller; see batch_hold.py
        "enable_prompt_tokens_details": True,  # a client sees what it saved by a prefix
        # None exists: an engine fetches nothing, should a URL get past the front
        # (deployments.front.inference.pictures).
        "allowed_media_domains": ["media.invalid"],
        **_adapter_arguments(config),
        **_drafter_arguments(config),
        **picture_slab.arguments(config),
        **kv_offload.arguments(config),
    }
    if ways := len(config.get("parts", [])):
        shared["tensor_parallel_size"] = ways
    if not on_cpu():
        return shared | {
            "enable_sleep_mode": config.get("can_sleep", True),
            "gpu_memory_utilization": _LEAST_PART,
            **({"worker_cls": _GPU_WORKER} if current_platform.is_cuda_alike() else {}),
        }
    return shared | {
        "enforce_eager": True,  # nothing is compiled; with explicit KV bytes no warm-up
        # The only worker of `uni` would wait without end for the others of its group.
        "distributed_executor_backend": "mp" if processes_count(config) > 1 else "uni",
        "worker_cls": _CPU_WORKER,
    }


def processes_count(config: Config) -> int:
    """How many processes a CPU computes the model with: one for each part of it."""
    options = config.get("engine_args", {})
    if parts := len(config.get("parts", [])):
        return parts
    return math.prod(
        int(options.get(f"{kind}_parallel_size") or 1) for kind in ("tensor", "pipeline")
    )


def _adapter_arguments(config: Config) -> dict[str, Any]:
    if "adapters" not in config:
        return {}
    section = config["adapters"]
    return {
        "enable_lora": True,
        "max_loras": section["slots"],
        # What is in no slot is warm in the slab. deployments.config.engine_kinds charges as much.
        "max_cpu_loras": section["slots"],
        "max_lora_rank": section["max_rank"],
    }


def _drafter_arguments(config: Config) -> dict[str, Any]:
    if "drafter" not in config:
        return {}
    section = config["drafter"]
    return {
        "speculative_config": {
            "method": "draft_model",
            "model": section["model"],
            "num_speculative_tokens": section["tokens"],
        }
    }
