"""Hours of models and of batch work, on a real cluster (C13)."""

from typing import Any

import pytest

from arbiter.client.admin import call_arbiter
from arbiter.core.types import Priority
from arbiter.errors import OutsideHours
from deployments.config import boot
from deployments.config.schema import parse_table
from tests.support.hours import hours_away
from tests.support.live_arbiter import LiveArbiter, capability, live_arbiter, model

pytestmark = pytest.mark.usefixtures("cluster")


async def configure(d: LiveArbiter, **models: dict[str, Any]) -> None:
    """Another table, for which nothing restarts."""
    arbiter = d.table.model_dump(mode="json", exclude_defaults=True)["arbiter"]
    table = {"arbiter": arbiter, "capabilities": {"chat": capability(**models)}}
    await call_arbiter("configure", boot.configuration(parse_table(table)))


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
        assert refused.value.cause.retry_after_s > 4 * 3600
        batch = holder.ask.remote("b", None, priority=Priority.BATCH)
        state = await d.until(lambda s: s["queue"])
        assert state["queue"][0]["predicted_s"] > 4 * 3600
        shown = {(row["work"], row["model"], row["is_open"]) for row in state["hours"]}
        assert shown == {("model", "a", False), ("batch", "b", False)}
        await configure(d, **free)
        assert await batch == 200
        assert await holder.ask.remote("a") == 200
        await d.books_are_true()
