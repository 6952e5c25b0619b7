"""Tenants, and settings that change while the system runs, on a real cluster."""

import asyncio
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from arbiter.client.admin import call_arbiter
from arbiter.core.types import Client
from arbiter.errors import QuotaExceeded, SettingsConflict, TenantCoolingDown
from arbiter.units import KIB, TicketId
from deployments.config import boot, runtime_settings
from deployments.config.schema import ConfigError
from tests.support.live_arbiter import LiveArbiter, capability, kill, live_arbiter, model

pytestmark = pytest.mark.usefixtures("cluster")
PHONE, OTHER = Client("acme", "phone"), Client("other")
WRONG: tuple[dict[str, Any], ...] = (
    {"bypass_count": 3, "barrier_s": -1},
    {"nothing": 1},
    {"state_file": "x"},
    {"host_marks": {"high": 0.5, "low": 0.6}},
    {"device_marks": {"low": 0.95}},  # above the high one of the default
)
TENANTS = {"acme": {"maximum": "150 MiB"}, "saver": {"reserved": "100 MiB"}}


@pytest.mark.spec("C10")
async def test_tenant_at_its_maximum_evicts_only_its_own_models_and_its_account_shows_it() -> None:
    models = {"chat": capability(a=model(100), b=model(100), c=model(200))}
    async with live_arbiter(models, mib=400, tenants=TENANTS) as d:
        holder = d.holder()
        assert await holder.ask.remote("a", client=PHONE) == 200
        with pytest.raises(QuotaExceeded):
            await holder.ask.remote("c", client=PHONE)
        assert await holder.ask.remote("b", client=PHONE) == 200  # though both would fit
        evicted = [(e["model"], e["reason"]) for e in await d.events("eviction")]
        assert evicted == [("a", "swap")]
        with pytest.raises(QuotaExceeded, match="acme has"):
            await holder.ask.remote("c", client=PHONE)
        state = await d.until(lambda s: s["clients"] and s["clients"][0]["requests_count"] == 4)
        [phone] = [c for c in state["clients"] if c["client"] == "phone"]
        assert phone["byte_seconds_count"] > 0 and phone["held_bytes"] <= 150 << 20
        kill(await d.arbiter_pid())
        state = await d.until(lambda s: s["epoch"] > state["epoch"] and s["tickets"])
        assert [t["tenant"] for t in state["tickets"]] == ["acme"] * len(state["tickets"])
        await d.books_are_true()


SAVER = Client("saver")


@pytest.mark.spec("C10")
async def test_reserved_bytes_are_kept_from_other_tenants_and_used_by_theirs_at_once() -> None:
    models = {"chat": capability(**{n: model(80) for n in "abcd"}, large=model(300))}
    tenants = {"saver": {"reserved": "150 MiB"}}
    # No model leaves of itself within the minimum residency, so that `c` waits for all of them.
    async with live_arbiter(models, mib=400, min_residency_loads=1e4, tenants=tenants) as d:
        holder = d.holder()
        with pytest.raises(QuotaExceeded):
            await holder.ask.remote("large", client=OTHER)
        for name in "ab":
            await holder.keep.remote(name)
        waiting = holder.ask.remote("c", client=OTHER)
        state = await d.until(lambda s: [q["model"] for q in s["queue"]] == ["c"])
        [cpu] = [x for x in state["devices"] if x["kind"] == "cpu"]
        assert cpu["free_bytes"] > 150 << 20, "it would fit"
        assert await holder.ask.remote("d", client=SAVER) == 200
        await d.until(lambda s: [t["model"] for t in s["tickets"] if t["idle_s"]] == ["d"])
        [queued] = (await d.state())["queue"]
        sentences = (await call_arbiter("explain", TicketId(queued["ticket"])))["sentences"]
        assert any("within the reserve of saver" in line for line in sentences), sentences
        await holder.let_go.remote("a")
        await d.unload("a")
        assert await asyncio.wait_for(waiting, 90) == 200
        assert (await d.states())["d"] == "resident"
        await d.books_are_true()


@pytest.mark.spec("C10")
async def test_tenant_over_its_average_loads_no_more_and_keeps_what_it_has() -> None:
    async with live_arbiter({"chat": capability(a=model(50), b=model(50))}) as d:
        holder = d.holder()
        assert await holder.ask.remote("a", client=PHONE) == 200
        await _bound_average(d, 4 * KIB)
        await d.until(lambda s: _average(s) > 4 * KIB)
        with pytest.raises(RayTaskError) as caught:
            await holder.ask.remote("b", client=PHONE)
        refused = caught.value.cause
        assert isinstance(refused, TenantCoolingDown) and refused.average_bytes > 4 * KIB
        assert refused.retry_after_s > 3_600 * 0.1, "in which an average falls by a tenth"
        assert await holder.ask.remote("a", client=PHONE) == 200
        assert await holder.ask.remote("b", client=OTHER) == 200
        await d.unload("a")
        await d.unload("b")
        await _bound_average(d, 2 * _average(await d.state()))
        assert await holder.ask.remote("b", client=PHONE) == 200
        await d.books_are_true()


async def _bound_average(d: LiveArbiter, size: int) -> None:
    """What the phone's tenant may hold on average, from the next epoch on, which has begun."""
    generation = (await runtime_settings.read())["generation"]
    await runtime_settings.change(generation, {"tenants": {PHONE.tenant: {"average": size}}})
    await d.until(lambda s: [t["average_most_bytes"] for t in s["tenants"]] == [size])


def _average(state: dict[str, Any]) -> int:
    """What the phone's tenant has held on average."""
    return sum(t["average_bytes"] for t in state["tenants"] if t["tenant"] == PHONE.tenant)


@pytest.mark.spec("C10")
@pytest.mark.parametrize("share, order", [(1, "aebfc"), (3, "aebcf")])
async def test_tenants_are_granted_in_turns_by_the_bytes_they_asked_for_and_their_share(
    share: int, order: str
) -> None:
    """`e` and `f` are of one tenant, which asks when the other waits for three already."""
    models = {n: model(200, can_sleep=False) for n in "uabcef"}
    tenants = {"acme": {"share": share}}
    async with live_arbiter({"chat": capability(**models)}, barrier_s=60, tenants=tenants) as d:
        holder = d.holder()
        await holder.keep.remote("u")
        asked = []
        for name in "abcef":
            client = PHONE if name in "abc" else OTHER
            asked.append(holder.ask.remote(name, client=client))
            await d.until(lambda s: len(s["queue"]) == len(asked))
        assert _queued(await d.state()) == order
        await holder.let_go.remote("u")
        assert await asyncio.wait_for(asyncio.gather(*asked), 120) == [200] * len(asked)
        granted = [e["model"] for e in await d.events("ticket_granted")]
        assert "".join(granted) == f"u{order}"
        await d.books_are_true()


def _queued(state: dict[str, Any]) -> str:
    return "".join(q["model"] for q in state["queue"])


@pytest.mark.spec("C12", "C4")
async def test_settings_change_whole_once_per_generation_and_outlive_the_arbiter() -> None:
    async with live_arbiter() as d:
        holder = d.holder()
        assert await holder.ask.remote("a") == 200
        engines, first = await d.engines(), await runtime_settings.read()
        generation = first["generation"]
        marks = [first["settings"][name] for name in ("host_marks", "device_marks")]
        assert marks == [{"high": 0.9, "low": 0.8}, None]  # of devices: off
        for wanted in WRONG:
            with pytest.raises(ConfigError, match=next(reversed(wanted))):
                await runtime_settings.change(generation, wanted)
        assert await runtime_settings.read() == first
        said = await runtime_settings.change(generation, {"bypass_count": 3, "tenants": TENANTS})
        assert said["generation"] == generation + 1 and said["settings"]["bypass_count"] == 3
        with pytest.raises(SettingsConflict) as caught:
            await runtime_settings.change(generation, {"bypass_count": 4})
        assert caught.value.current == generation + 1
        state = await d.until(lambda s: s["tenants"] and s["tickets"])
        kill(await d.arbiter_pid())
        await d.until(lambda s: s["epoch"] > state["epoch"])
        await call_arbiter("configure", boot.configuration(d.table))  # the front starts again
        assert await runtime_settings.read() == said
        assert await holder.ask.remote("a", client=OTHER) == 200
        assert await d.engines() == engines
        await d.books_are_true()
