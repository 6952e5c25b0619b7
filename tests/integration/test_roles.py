"""What each role is worth, does and costs when its model leaves, on a real cluster (C1)."""

import asyncio
from typing import Any

import pytest

from arbiter.units import MIB
from deployments.replica.residency import Residency
from policies.roles import ROLES
from tests.support.live_arbiter import CONTEXT, capability, live_arbiter, model

pytestmark = pytest.mark.usefixtures("cluster")

# Each step's model needs the bytes of as many others as stand in it.
STEPS = (
    ("drafter",),
    ("emotion",),
    ("speaker-id",),
    ("vision", "image"),  # of one rank
    ("embedding",),
    ("turn-detector",),
    ("wake-word",),
    ("vad",),
    ("asr",),
    ("tts",),
    ("text",),
)
# Whatever else this machine runs: its shortage of memory would have models leave as well.
NO_PRESSURE = {"ram": {"low": 0, "critical": 0}, "stalls": {"low": 1, "critical": 1}}
WEIGHTS_MIB, CONTEXT_MIB = 20, CONTEXT // MIB


async def ask(residency: Residency, name: str) -> None:
    """A use from this process, which is a driver with a handle for each capability."""
    async with residency.use(name):
        pass


@pytest.mark.spec("C1")
async def test_lowest_roles_leave_first_and_each_tells_its_act_and_what_it_costs() -> None:
    one = WEIGHTS_MIB + CONTEXT_MIB
    roles = [role for step in STEPS for role in step]
    assert {*roles, "lease"} == ROLES.keys()
    table: dict[str, Any] = {
        role: capability(role, **{role: model(WEIGHTS_MIB, can_sleep=False)}) for role in roles
    }
    sizes = {f"asker-{n:02}": len(step) * one - CONTEXT_MIB for n, step in enumerate(STEPS)}
    askers = {name: model(mib, can_sleep=False) for name, mib in sizes.items()}
    table["asker"] = capability("asker", **askers)
    highest = {"asker": {"rank": 200, "act": "it asks no more", "evict_cost_s": 3}}
    async with live_arbiter(
        table, len(roles) * one, roles=highest, pressure_marks=NO_PRESSURE
    ) as d:
        holders = {name: Residency.start(name) for name in table}
        try:
            for role in reversed(roles):  # the least used of late is worth most
                await ask(holders[role], role)
            await d.until(lambda s: all((t["idle_s"] or 0) > 2 for t in s["tickets"]))
            took_s = {e["model"]: e["took_s"] for e in await d.events("model_load")}
            for name in sizes:
                await ask(holders["asker"], name)
            told = await d.events("eviction")
            assert all(e["waiting"] for e in told), told
            by_step = [
                [e["model"] for e in told if e["waiting"].startswith(name)] for name in sizes
            ]
            assert [{*models} for models in by_step] == [{*step} for step in STEPS], told
            for e in told:
                role = ROLES[e["model"]]
                cost_s = pytest.approx(took_s[e["model"]] + role.evict_cost_s, abs=0.002)
                assert (e["act"], e["reason"], e["cost_s"]) == (role.act, "swap", cost_s)
            await d.unload("asker-00")
            [told] = [e for e in await d.events("eviction") if e["model"] == "asker-00"]
            assert (told["act"], told["reason"]) == ("it asks no more", "manual")
            assert told["cost_s"] > 3
            await d.books_are_true()
        finally:
            await asyncio.gather(*(holder.close() for holder in holders.values()))


@pytest.mark.spec("C1")
async def test_small_model_of_the_cpu_gives_its_pages_back_and_keeps_its_process() -> None:
    table = {
        "small": capability("vad", small=model(100)),
        "other": capability(large=model(200, can_sleep=False)),
    }
    async with live_arbiter(table, 340, pressure_marks=NO_PRESSURE) as d:
        small, other = d.holder("small"), d.holder("other")
        assert await small.ask.remote("small") == 200
        [(ticket, [pid, *_])] = (await d.engines()).items()
        await d.until(lambda s: (s["tickets"][0]["idle_s"] or 0) > 2)
        assert await other.ask.remote("large") == 200
        state = await d.until(lambda s: [
            t["state"] for t in s["tickets"] if t["ticket"] == ticket
        ] == ["asleep"])  # fmt: skip
        [asleep] = [t for t in state["tickets"] if t["ticket"] == ticket]
        on_cpu = [size for device, size in asleep["measured_bytes"].items() if "cpu" in device]
        assert sum(on_cpu) < 30 * MIB
        [told] = await d.events("eviction")
        assert told["act"] == ROLES["vad"].act == "may drop its pages instead of its process"
        assert (await d.engines())[ticket][0] == pid
        await d.unload("large")
        assert await small.ask.remote("small") == 200
        assert [e["model"] for e in await d.events("model_wake")] == ["small"]
        assert (await d.engines())[ticket][0] == pid
        await d.books_are_true()
