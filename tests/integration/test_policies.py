"""Which models leave, on a real cluster: by each policy that a configuration may name, and which
set of them (C3).
"""

import asyncio
from itertools import combinations

import pytest

from tests.support.live_arbiter import LiveArbiter, capability, live_arbiter, model

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.spec("C3")]
SLOW_S = 1.5


async def all_idle(d: LiveArbiter, count: int) -> None:
    """Also beyond the second for which any model stays."""

    def are(state: dict[str, object]) -> bool:
        tickets = state["tickets"]
        assert isinstance(tickets, list)
        return len(tickets) == count and all((t["idle_s"] or 0) > 1 for t in tickets)

    await d.until(are)


@pytest.mark.parametrize(
    ("policy", "victim"),
    [
        ("priority_lru", "old"),
        ("size_aware_lru", "large"),
        ("cost_aware", "quick"),
        ("time_of_day", "quick"),
        ("learned", "quick"),
    ],
)
async def test_each_policy_has_another_model_leave_where_any_one_of_them_would_do(
    policy: str, victim: str
) -> None:
    """One was used longest ago, one is larger, and one is back in no time."""
    models = {
        "old": model(100, load_seconds=SLOW_S, can_sleep=False),
        "large": model(150, load_seconds=SLOW_S, can_sleep=False),
        "quick": model(100, can_sleep=False),
        "asked": model(80, can_sleep=False),
    }
    table = {"chat": capability(**models)}
    async with live_arbiter(table, 430, evict=policy, min_residency_loads=0) as d:
        holder = d.holder()
        for name in ("old", "large", "quick"):
            assert await holder.ask.remote(name) == 200
        await all_idle(d, 3)
        assert await holder.ask.remote("asked") == 200
        assert [e["model"] for e in await d.events("eviction")] == [victim]


async def test_models_that_leave_are_the_cheapest_set_that_makes_room_and_each_is_needed() -> None:
    """Compared with all other sets. Those used once, a moment ago, are wanted again as likely as
    each other, so a set costs what its models take to load."""
    sizes = {f"m{n}": (30 + 8 * n, 0.15 * (5 * n % 8)) for n in range(8)}
    models = {
        name: model(mib, load_seconds=took_s, can_sleep=False)
        for name, (mib, took_s) in sizes.items()
    }
    table = {"chat": capability(**models, asked=model(200, can_sleep=False))}
    async with live_arbiter(table, 670, evict="cost_aware", min_residency_loads=0) as d:
        holder = d.holder()
        await asyncio.gather(*(holder.ask.remote(name) for name in sizes))
        await all_idle(d, len(sizes))
        state = await d.state()
        frees = {t["model"]: sum(t["charged_bytes"].values()) for t in state["tickets"]}
        [device] = [row for row in state["devices"] if row["kind"] == "cpu"]
        took_s = {e["model"]: e["took_s"] for e in await d.events("model_load")}
        assert await holder.ask.remote("asked") == 200
        [grant] = [e for e in await d.events("ticket_granted") if e["model"] == "asked"]
        short = grant["size_bytes"] - device["free_bytes"]
        went = {e["model"] for e in await d.events("eviction")}

    def makes_room(names: tuple[str, ...] | set[str]) -> bool:
        return sum(frees[name] for name in names) >= short

    def cost_s(names: tuple[str, ...] | set[str]) -> float:
        return float(sum(took_s[name] for name in names))

    assert len(went) > 1 and makes_room(went)
    assert not any(makes_room(went - {name}) for name in went)
    every = [s for count in range(1, 9) for s in combinations(sizes, count) if makes_room(s)]
    assert cost_s(went) <= 1.02 * min(cost_s(one) for one in every)


async def test_of_more_candidates_than_are_compared_those_that_cost_least_leave() -> None:
    """Of equal size, so that the cheapest set is the quickest models, one by one."""
    took = {f"m{n}": 0.2 + 0.15 * (5 * n % 14) for n in range(14)}
    models = {
        name: model(30, load_seconds=took_s, can_sleep=False) for name, took_s in took.items()
    }
    table = {"chat": capability(**models, asked=model(80, can_sleep=False))}
    async with live_arbiter(table, 800, evict="cost_aware", min_residency_loads=0) as d:
        holder = d.holder()
        await asyncio.gather(*(holder.ask.remote(name) for name in took))
        await all_idle(d, len(took))
        state = await d.state()
        [device] = [row for row in state["devices"] if row["kind"] == "cpu"]
        frees = min(sum(t["charged_bytes"].values()) for t in state["tickets"])
        assert await holder.ask.remote("asked") == 200
        [grant] = [e for e in await d.events("ticket_granted") if e["model"] == "asked"]
        went = [e["model"] for e in await d.events("eviction")]
        needed = -(-(grant["size_bytes"] - device["free_bytes"]) // frees)
        assert 1 < needed < 5 and len(went) == needed
        load_s = {e["model"]: e["took_s"] for e in await d.events("model_load")}
        assert set(went) == set(sorted(took, key=lambda name: load_s[name])[:needed])
