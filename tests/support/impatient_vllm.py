"""vLLM whose core has hung when it goes without a step for a second."""

from deployments.engines.protocol import Config
from deployments.engines.vllm import engine
from deployments.engines.vllm.engine_core import core_watch


def build(config: Config) -> engine.VllmEngine:
    """In the engine's own process, so that no other engine is as impatient."""
    core_watch.CPU_STEP_MOST_S = 1.0
    return engine.build(config)
