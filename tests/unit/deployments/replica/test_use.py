"""A request for a resident model is a counter on its holder and a line of its log, no message."""

from typing import Any

import pytest

from arbiter.client.request_log import RequestLog
from tests.unit.deployments.replica import test_residency as base


class OnlyLog:
    """A client of which a warm request may touch nothing but the log of finished requests."""

    def __init__(self) -> None:
        self.runs, self.touched = RequestLog(), []  # type: ignore[var-annotated]

    def __getattr__(self, name: str) -> Any:
        self.touched.append(name)
        raise AttributeError(name)


@pytest.mark.spec("A5", "N2")
async def test_warm_request_touches_nothing_of_the_client_but_its_log() -> None:
    async with base.holder() as (residency, arbiter, engine):
        await base.use(residency)
        residency._client = only = OnlyLog()
        engine.answer.set()
        async with residency.use("a") as use:
            parts = [part async for part in use.stream("POST", "/v1/x", {}, b"")]
        assert len(parts) == 2 and only.touched == []
        assert len(only.runs.waiting()[0]) == 1
        residency._client = arbiter
