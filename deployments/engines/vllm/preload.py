"""What a zygote does once so that no vLLM engine has to: name this module in its `--preload`.

Besides imports it rehearses what is the same for every engine: the argument parser, the schemas
of the OpenAI routes, the log setup, and vLLM's replacement of Triton kernels, which visits every
attribute of every module and would give each engine its own copy of 150 MB of shared heap.

What an engine would look up again and again and cannot change is looked up here: which processors
there are (a run of `lscpu`, three times an engine) and which plugins are installed (250 small
files, three times), which come from disk again where they have not been read for a while.
"""

import importlib
import importlib.metadata
from functools import cache
from typing import Any

from vllm.config import model as model_config
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging_if_needed
from vllm.platforms import current_platform
from vllm.utils import cpu_resource_utils

from deployments.engines.vllm import engine

MODULES = (
    "anyio._backends._asyncio",
    "anyio.streams.memory",
    "anyio.streams.stapled",
    "compressed_tensors",
    "deployments.engines.vllm.engine_core.core_process",
    "transformers.models.auto.tokenization_auto",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.entrypoints.cohere.api_router",
    "vllm.entrypoints.generate.api_router",
    "vllm.entrypoints.openai.chat_completion.batch_serving",
    "vllm.entrypoints.scale_out.derender.serving",
    "vllm.entrypoints.scale_out.render.serving",
    "vllm.entrypoints.scale_out.token_in_token_out.serving",
    "vllm.entrypoints.serve.utils.sse_keep_alive",
    "vllm.lora.worker_manager",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.llama",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.plugins.lora_resolvers.hf_hub_resolver",
    "vllm.renderers.hf",
    "vllm.transformers_utils.chat_templates",
    "vllm.v1.core.kv_cache_manager",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.metrics.reader",
    "vllm.v1.pool.flash_maxsim",
)
ON_CPU = (
    "deployments.engines.vllm.adapters.lora_cpu",
    "deployments.engines.vllm.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
)


def rehearse() -> None:
    for module in (*MODULES, *(ON_CPU if current_platform.is_cpu() else ())):
        importlib.import_module(module)
    remember_processors()
    remember_plugins()
    # An engine reads its generation_config.json eight times; it has one model.
    model_config.try_get_generation_config = cache(model_config.try_get_generation_config)
    configure_logging_if_needed(LoggingConfig())
    engine.text_api()
    current_platform.register_triton_kernel_overrides()
    # Done for good: what an engine imports later takes the replaced kernels from their homes.
    platform = type(current_platform)
    platform.register_triton_kernel_overrides = classmethod(lambda cls: None)


def remember_processors() -> None:
    """Which there are; which of them this process may use is still asked each time."""
    cpu_resource_utils._get_cpu_list = cache(cpu_resource_utils._get_cpu_list)
    if current_platform.is_cpu():
        cpu_resource_utils.get_allowed_cpu_list()


def remember_plugins() -> None:
    """A package installed later is not seen, as little as its modules would be: both need a new
    zygote."""
    installed: Any = importlib.metadata.entry_points()
    importlib.metadata.entry_points = installed.select


rehearse()
