"""Tenants, and settings that change while the system runs, on a real cluster."""

from typing import Any

import pytest

from arbiter.client.admin import call_arbiter
from arbiter.core.types import Client
from arbiter.errors import QuotaExceeded, SettingsConflict
from deployments.config import boot, runtime_settings
from deployments.config.schema import ConfigError
from tests.support.live_arbiter import capability, kill, live_arbiter, model

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
