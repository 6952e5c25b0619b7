"""Plain vLLM for comparisons: the engine as it is, kernel and all, but every request goes on to
vLLM's own queue at once."""

from deployments.engines.protocol import Config
from deployments.engines.vllm import engine

UNBOUNDED = 1 << 30


def build(config: Config) -> engine.VllmEngine:
    """Raises what the engine's own `build` raises."""
    made = engine.build(config)
    made.gate.window = UNBOUNDED
    return made
