"""POST /v1/acquire at a replica: a use without a request to the engine."""

import asyncio
import json
from contextlib import aclosing
from typing import Any

import pytest

from deployments import messages
from deployments.replica.calls import acquired
from deployments.replica.held_model import HolderState
from tests.support import scripted_holder as base


def events(parts: list[messages.ResponseHead | bytes]) -> list[dict[str, Any]]:
    lines = [part for part in parts if isinstance(part, bytes) and part.startswith(b"data: ")]
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


@pytest.mark.spec("A7", "J7")
async def test_model_is_in_use_until_the_term_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acquired, "LOOK_S", 0.01)
    monkeypatch.setattr(acquired, "COMMENT_EVERY_S", 0.0)
    async with base.holder() as (residency, _, _):
        async with residency.use("a") as use:
            assert residency.models["a"].requests.inflight == 1
            parts = [part async for part in acquired.events(use, b'{"term_s": 0.05}')]
        assert residency.models["a"].requests.inflight == 0
    assert parts[0] == acquired.HEAD and b": held\n\n" in parts
    held, ended = events(parts)
    assert (held["state"], held["ticket"], held["model"]) == ("held", use.ticket, "a")
    assert (ended["state"], ended["reason"]) == ("ended", "term")


@pytest.mark.spec("A7", "A9", "J7")
async def test_use_outlasts_a_barrier_and_ends_with_its_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(acquired, "LOOK_S", 0.01)
    monkeypatch.setattr(acquired, "COMMENT_EVERY_S", 0.0)
    async with base.holder() as (residency, _, engine):
        async with residency.use("a") as use, aclosing(acquired.events(use, b"{}")) as parts:
            heard = [await anext(parts), await anext(parts)]
            residency.models["a"].move(HolderState.DRAINING)
            heard += [await anext(parts)]
            residency.models["a"].move(HolderState.RESIDENT)
            engine.dead.set()
            async with asyncio.timeout(60):
                heard += [part async for part in parts]
    assert heard[2] == b": held\n\n"
    assert [event["state"] for event in events(heard)] == ["held", "ended"]
    assert events(heard)[-1]["reason"] == "engine_lost"
