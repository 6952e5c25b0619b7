"""What a zygote does once so that no vLLM engine has to: name this module in its `--preload`.

Besides imports it rehearses what is the same for every engine: the argument parser, the schemas
of the OpenAI routes, the log setup, and vLLM's replacement of Triton kernels, which visits every
attribute of every module and would give each engine its own copy of 150 MB of shared heap.
"""

import importlib

from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging_if_needed
from vllm.platforms import current_platform

from deployments.engines import vllm_engine

MODULES = (
    "compressed_tensors",
    "deployments.engines.vllm_core",
    "transformers.models.auto.tokenization_auto",
    "vllm.distributed.elastic_ep.elastic_execute",
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
)
ON_CPU = (
    "deployments.engines.lora_cpu",
    "deployments.engines.vllm_cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
)


def rehearse() -> None:
    for module in (*MODULES, *(ON_CPU if current_platform.is_cpu() else ())):
        importlib.import_module(module)
    configure_logging_if_needed(LoggingConfig())
    vllm_engine.text_api()
    current_platform.register_triton_kernel_overrides()
    # Done for good: what an engine imports later takes the replaced kernels from their homes.
    platform = type(current_platform)
    platform.register_triton_kernel_overrides = classmethod(lambda cls: None)


rehearse()
