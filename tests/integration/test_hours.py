"""Hours of models and of batch work, on a real cluster (C13)."""

import asyncio
from typing import Any

import pytest

from arbiter.client.admin import call_arbiter
from arbiter.core.types import Priority
from arbiter.errors import OutsideHours
from deployments.config import boot
from deployments.config.schema import parse_table
from tests.support.hours import away_s, hours_away, hours_now
from tests.support.live_arbiter import WITHIN_S, LiveArbiter, capability, live_arbiter, model

pytestmark = pytest.mark.usefixtures("cluster")
DAY_S = 24 * 3600.0


async def configure(d: LiveArbiter, **models: dict[str, Any]) -> None:
    """Another table, for which nothing restarts."""
    arbiter = d.table.model_dump(mode="json", exclude_defaults=True)["arbiter"]
    table = {"arbiter": arbiter, "capabilities": {"chat": capability(**models)}}
    await call_arbiter("configure", boot.configuration(parse_table(table)))


def shown(state: dict[str, Any]) -> set[tuple[str, str, str, bool]]:
    """The windows in a state, and whether they are open."""
    return {(row["work"], row["model"], row["hours"], row["is_open"]) for row in state["hours"]}


@pytest.mark.spec("C13")
async def test_outside_their_hours_a_model_leaves_and_is_refused_and_batch_work_waits() -> None:
    free = {"a": model(50), "b": model(50)}
    async with live_arbiter({"chat": capability(**free)}) as d:
        holder = d.holder()
        assert await holder.ask.remote("a") == 200
        away = hours_away()
        await configure(d, a=free["a"] | {"hours": away}, b=free["b"] | {"batch_hours": away})
        await d.until(lambda s: not s["tickets"])
        [unload] = await d.events("model_unload")
        assert (unload["model"], unload["reason"], unload["to"]) == ("a", "hours", "gone")
        with pytest.raises(OutsideHours) as refused:
            await holder.ask.remote("a")
        assert refused.value.cause.retry_after_s == pytest.approx(away_s(away), abs=WITHIN_S)
        batch = holder.ask.remote("b", None, priority=Priority.BATCH)
        patient = holder.ask.remote("a", DAY_S)
        state = await d.until(lambda s: len(s["queue"]) == 2)
        assert {t["model"]: t["state"] for t in state["tickets"]} == {"a": "queued", "b": "queued"}
        assert all(q["predicted_s"] > 4 * 3600 for q in state["queue"])
        assert shown(state) == {("model", "a", away, False), ("batch", "b", away, False)}
        now = hours_now()
        await configure(d, a=free["a"] | {"hours": now}, b=free["b"] | {"batch_hours": now})
        assert await asyncio.gather(batch, patient) == [200, 200]
        state = await d.state()
        assert shown(state) == {("model", "a", now, True), ("batch", "b", now, True)}
        assert await holder.ask.remote("a") == 200
        await d.books_are_true()
