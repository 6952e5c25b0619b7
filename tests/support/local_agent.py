"""A node agent in the test's own process, without Ray."""

from pathlib import Path
from typing import Any

from arbiter.node.agent import NodeAgent
from arbiter.protocol.messages import AgentSettings, SpawnSpec
from arbiter.units import NodeId

ZYGOTE = "deployments.engines.zygote"
BROKEN_ZYGOTE = "tests.support.failing_zygote"
FAKE_ENGINE = SpawnSpec(
    "tests.support.fake_engine:FakeEngine", {"served_name": "m", "engine_args": {}}
)
START_S = 90  # of a zygote with its imports


def agent_in(folder: Path, zygote_module: str = ZYGOTE, **more: Any) -> NodeAgent:
    """The agent of node `n`; its caller closes it. `more`: settings."""
    settings = AgentSettings(zygote_module, folder=str(folder / "n"), **more)
    return NodeAgent(NodeId("n"), settings, str(folder))
