"""An arbiter's actor in the test's own process, without Ray."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from arbiter.protocol.messages import AgentSettings, StartConfig
from arbiter.server.actor import ArbiterActor
from deployments.config.boot import configuration
from deployments.config.schema import parse_table

TABLE = {"capabilities": {"c": {"role": "text", "engine": "m:f", "models": {"a": {"source": "x"}}}}}
Running = Callable[..., AbstractAsyncContextManager[ArbiterActor]]


def running_in(folder: Path) -> Running:
    """Runs one arbiter after the other, or beside it: each is the next epoch of the same session
    until it is closed. Takes a table and what StartConfig takes."""

    @asynccontextmanager
    async def run(table: dict[str, Any] = TABLE, **options: Any) -> AsyncIterator[ArbiterActor]:
        agent = AgentSettings("no.zygote", folder=str(folder / "n"))
        options = {"state_file": str(folder / "state"), **options}
        actor = ArbiterActor(StartConfig(configuration(parse_table(table)), agent, **options))
        yield actor
        await actor.close(0)

    return run
