"""An arbiter without Ray."""

from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from arbiter.core import events as ev
from arbiter.protocol import ray_internals
from arbiter.server.node_agents import RayAgents
from arbiter.units import NodeId
from tests.support.local_arbiter import Running, running_in


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Running:
    async def look(
        self: RayAgents, feed: Callable[[ev.Event], None], known: Collection[NodeId]
    ) -> None: ...

    monkeypatch.setattr(RayAgents, "look", look)
    monkeypatch.setattr(ray_internals, "session_name", lambda: "session")
    monkeypatch.setattr(ray_internals, "note_state_file", lambda path: None)
    monkeypatch.setattr(ray_internals, "own_node", lambda: NodeId("n"))
    return running_in(tmp_path)
