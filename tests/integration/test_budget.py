"""How much of a device may be lent, on a real cluster (B2)."""

from typing import Any

import pytest

from arbiter.client.admin import call_arbiter
from arbiter.errors import NeverFits
from arbiter.protocol.messages import Plain
from arbiter.units import MIB, Bytes
from deployments.config import boot
from deployments.config.engine_kinds import ENGINES, EngineKind
from deployments.config.schema import parse_table
from deployments.replica.residency import Residency
from tests.support.live_arbiter import CONTEXT, ENGINE, capability, live_arbiter, model
from tests.support.waits import eventually

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.spec("B2")]


def of_kind(state: Plain, kind: str) -> Plain:
    [found] = [x for x in state["devices"] if x["kind"] == kind]
    return dict(found)


def in_turn(mib: int, lock: str, scratch: int) -> dict[str, Any]:
    """A model whose engine computes only while it holds that lock."""
    return model(mib, dispatch={"lock": lock, "scratch": f"{scratch} MiB"})


async def test_device_lends_nine_tenths_less_a_tenth_less_one_scratch_for_each_lock() -> None:
    models = {"a": in_turn(50, "torch", 40), "b": in_turn(50, "torch", 60)}
    models["c"] = in_turn(50, "other", 20)
    async with live_arbiter({"chat": capability(**models)}, arenas={}) as d:
        state = await d.state()
        for kind, scratch in (("cpu", (60 + 20) * MIB), ("host", 0)):
            device = of_kind(state, kind)
            arena = int(device["capacity_bytes"] * 0.9)
            assert device["budget_bytes"] == arena - int(arena * 0.1) - scratch


async def test_caps_and_the_pool_lower_what_a_device_lends() -> None:
    arenas = {"cpu": 400 * MIB, "host": 100 * MIB}
    table = {"chat": capability(a=in_turn(50, "torch", 60))}
    async with live_arbiter(table, arenas=arenas, arena=1.0, wiggle=0.25) as d:
        assert of_kind(await d.state(), "cpu")["budget_bytes"] == (400 - 100 - 60) * MIB
        assert of_kind(await d.state(), "host")["budget_bytes"] == (100 - 25) * MIB
        epoch, plain = (await d.state())["epoch"], boot.as_plain(d.table)
        plain["arbiter"] |= {"pool": 0.5}
        await call_arbiter("configure", boot.configuration(parse_table(plain)))
        state = await d.until(lambda s: s["epoch"] > epoch and s["devices"])
        assert of_kind(state, "cpu")["budget_bytes"] == 200 * MIB  # less than the scratch leaves


async def test_engines_of_one_lock_fit_beside_each_other_with_one_scratch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a scratch of its own each, the second would have to wait for the first."""
    kind = EngineKind(ENGINE, (), Bytes(0), Bytes(0), takes_turns=True)
    monkeypatch.setitem(ENGINES, "in_turn", kind)
    both = {name: in_turn(100, "torch", 100) for name in "ab"}
    async with live_arbiter({"chat": capability(**both) | {"engine": "in_turn"}}) as d:
        residency = Residency.start("chat")
        async with residency.use("a"), residency.use("b"):
            state = await d.until(lambda s: [t["inflight"] for t in s["tickets"]] == [1, 1])
            device = of_kind(state, "cpu")
            assert device["budget_bytes"] // MIB == 300
            assert device["charged_bytes"] == 2 * (100 * MIB + CONTEXT)
        await residency.close()


async def test_on_demand_is_what_pins_leave_and_pins_beyond_the_budget_are_flagged() -> None:
    chat = capability(p=model(300, pin=True), q=model(200, pin=True))
    async with live_arbiter({"chat": chat, "other": capability(x=model(200))}) as d:
        d.holder()
        flagged, *_ = await eventually(lambda: d.events("pinned_overcommit"))
        device = of_kind(await d.state(), "cpu")
        assert flagged["device"] == device["device"] and flagged["budget"] == device["budget_bytes"]
        assert flagged["pinned"] == 500 * MIB + 2 * CONTEXT
        assert flagged["size_bytes"] == flagged["pinned"] - flagged["budget"]
        state = await d.until(lambda s: [t["pinned"] for t in s["tickets"]] == [True])
        pinned = sum(state["tickets"][0]["charged_bytes"].values())
        other = d.holder("other")
        with pytest.raises(NeverFits) as caught:
            await other.ask.remote("x")
        assert caught.value.cause.budget_bytes == device["budget_bytes"] - pinned
        plain = boot.as_plain(d.table)
        plain["arbiter"]["arenas"]["cpu"] = 100 * MIB
        await call_arbiter("configure", boot.configuration(parse_table(plain)))
        state = await d.until(
            lambda s: (
                s["epoch"] > state["epoch"] and s["is_settled"] and s["tickets"] and s["devices"]
            )
        )
        [told] = await d.events("pin_over_cap")  # it is more than the whole device lends by now
        device = of_kind(state, "cpu")
        assert told["cap"] == device["budget_bytes"] < pinned == told["size_bytes"]
        assert [t["pinned"] for t in state["tickets"]] == [False]
        with pytest.raises(NeverFits) as caught:
            await other.ask.remote("x")
        assert caught.value.cause.budget_bytes == device["budget_bytes"]
