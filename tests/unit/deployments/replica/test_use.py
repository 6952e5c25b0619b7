"""A request for a resident model is a counter on its holder and a line of its log, no message."""

import asyncio
from typing import Any

import pytest

from arbiter.client.request_log import RequestLog
from arbiter.errors import LoadFailed
from deployments.replica.use import outcome_of
from tests.support import scripted_holder as base


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "answered"),
        (asyncio.CancelledError(), "left"),
        (GeneratorExit(), "left"),
        (LoadFailed("m", "broken", False), "load_failed"),
        (KeyError("a bug"), "failed"),
    ],
)
def test_an_outcome_is_a_word(error: Any, outcome: str) -> None:
    assert outcome_of(error) == outcome


class OnlyLog:
    """A client of which a warm request may touch nothing but the log of finished requests."""

    def __init__(self) -> None:
        self.request_log, self.touched = RequestLog(), []  # type: ignore[var-annotated]

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
        assert len(only.request_log.untold()[0]) == 1
        residency._client = arbiter
