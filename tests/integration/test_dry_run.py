"""What a dry run says is what then happens, on a real cluster (K3)."""

import pytest

from arbiter.client.admin import call_arbiter
from arbiter.core.reports.plan import PlanQuestion
from arbiter.core.types import Need
from arbiter.protocol.messages import Plain
from arbiter.units import GIB, MIB, Bytes
from tests.support.live_arbiter import capability, live_arbiter, model
from tests.support.waits import eventually

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.spec("K3")]
BIG = 250 * MIB


async def planned(size: int) -> Plain:
    """Of the model that is not loaded, with another need perhaps."""
    found: Plain = await call_arbiter("plan", PlanQuestion("other", "b", Need(Bytes(size)), True))
    return found


async def after_evicting() -> Plain:
    found = await planned(BIG)
    return found if found["answer"] == "after_evicting" else {}


async def test_each_answer_of_a_dry_run_changes_nothing_and_comes_true() -> None:
    models = {"chat": capability(a=model(200, can_sleep=False))}
    models["other"] = capability(b=model(200, can_sleep=False))
    async with live_arbiter(models, min_residency_loads=0) as d:
        chat, other = d.holder("chat"), d.holder("other")
        ticket = await chat.keep.remote("a")
        await d.until(lambda s: [t["inflight"] for t in s["tickets"]] == [1])
        assert (await planned(MIB))["answer"] == "now"
        waits = await planned(BIG)
        assert (waits["answer"], waits["victims"]) == ("not_before", [])
        never = await planned(100 * GIB)
        assert (never["answer"], never["goes_to_bytes"]) == ("never", {})
        await chat.let_go.remote("a")
        await d.until(lambda s: [t["inflight"] for t in s["tickets"]] == [0])
        goes: Plain = await eventually(after_evicting)  # a model stays for a moment in any case
        [victim] = goes["victims"]
        assert victim["ticket"] == ticket
        assert sum(victim["freed_bytes"].values()) >= 200 * MIB and victim["reload_s"] > 0
        assert [(t["ticket"], t["state"]) for t in (await d.state())["tickets"]] == [
            (ticket, "resident")
        ]
        assert await other.ask.remote("b") == 200
        [evicted] = await d.events("eviction")
        assert evicted["ticket"] == victim["ticket"]
        await d.books_are_true()
