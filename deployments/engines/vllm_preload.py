"""What a zygote imports so that a vLLM engine starts without importing (`--preload`)."""


import deployments.engines.lora_cpu
import deployments.engines.vllm_cpu_worker
import deployments.engines.vllm_engine  # noqa: F401
