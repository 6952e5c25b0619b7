"""vLLM's engine in a process that believes it has another version of vLLM."""

import vllm

from deployments.engines.protocol import Config
from deployments.engines.vllm.engine import VllmEngine
from deployments.engines.vllm.engine import build as unchanged


def build(config: Config) -> VllmEngine:
    vllm.__version__ = "0.0.1"
    return unchanged(config)
