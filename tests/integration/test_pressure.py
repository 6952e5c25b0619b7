"""Memory that is said to be short, on a real cluster."""

from pathlib import Path

import pytest

from arbiter.client.admin import call_arbiter
from arbiter.core.events import PressurePushed
from arbiter.core.types import Level
from arbiter.errors import UnderPressure
from arbiter.node import procfs
from arbiter.protocol.messages import Plain
from arbiter.units import Bytes, seconds
from deployments.config import boot
from tests.support.live_arbiter import capability, live_arbiter, model
from tests.support.message_counter import a_heartbeat
from tests.support.waits import eventually

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.spec("C5")]


@pytest.mark.spec("K1")
async def test_pressure_evicts_idle_models_that_are_not_text_and_blocks_other_loads() -> None:
    both = {
        "chat": capability(a=model(50)),
        "other": capability("embedding", b=model(50), c=model(50)),
    }
    async with live_arbiter(both) as d:
        chat, other = d.holder("chat"), d.holder("other")
        assert [await chat.ask.remote("a"), await other.ask.remote("b")] == [200, 200]
        state = await d.until(lambda s: all(t["idle_s"] is not None for t in s["tickets"]))
        assert {x["pressure"] for x in state["devices"]} == {"nominal"}
        node = state["devices"][0]["node"]
        critical = PressurePushed(node, Level.CRITICAL, Bytes(0), seconds(5))
        await call_arbiter("push_pressure", critical)
        await d.until(lambda s: [t["model"] for t in s["tickets"]] == ["a"])
        told = await d.events("memory_pressure")
        assert {(e["level"], e["source"]) for e in told} == {("critical", "pushed")}
        [unload] = await d.events("model_unload")
        assert (unload["model"], unload["reason"]) == ("b", "pressure")
        with pytest.raises(UnderPressure):
            await other.ask.remote("c")
        assert await chat.ask.remote("a") == 200
        await d.until(lambda s: all(x["pressure"] == "nominal" for x in s["devices"]))
        assert await other.ask.remote("c") == 200
        await d.books_are_true()


def node_of_idle(state: Plain) -> str:
    """The only node, once nothing on it is in use; else empty."""
    is_idle = state["tickets"] and all(t["idle_s"] is not None for t in state["tickets"])
    return str(state["devices"][0]["node"]) if is_idle else ""


@pytest.mark.spec("A6", "A9")
async def test_model_in_use_declines_pressure_and_the_next_victim_leaves() -> None:
    """Its holder has begun to use it, and the arbiter has not heard of it yet."""
    three = {
        "first": capability("vision", a=model(50)),
        "second": capability("embedding", b=model(50)),
    }
    async with live_arbiter(three, barrier_s=0.5) as d:
        first, second = d.own_holder("first"), d.holder("second")
        assert [await first.ask.remote("a"), await second.ask.remote("b")] == [200, 200]
        node = node_of_idle(await d.until(node_of_idle))
        await a_heartbeat(first)  # counts its messages
        await first.keep.remote("a")
        low = PressurePushed(node, Level.LOW, Bytes(0), seconds(60))
        await call_arbiter("push_pressure", low)
        await d.until(lambda s: [t["model"] for t in s["tickets"]] == ["a"])
        [declined] = await d.events("victim_busy")
        assert (declined["model"], declined["reason"]) == ("a", "pressure")
        critical = PressurePushed(node, Level.CRITICAL, Bytes(0), seconds(60))
        await call_arbiter("push_pressure", critical)
        await eventually(lambda: d.events("pressure_nothing_left"))
        assert await d.states() == {"a": "resident"}
        await first.let_go.remote("a")
        await d.until(lambda s: not s["tickets"])
        await d.books_are_true()


async def test_low_pressure_that_lasts_takes_one_model_more_with_each_tick() -> None:
    async with live_arbiter({"hearing": capability("asr", a=model(50), b=model(50))}) as d:
        h = d.holder("hearing")
        assert await h.ask.remote("a") == await h.ask.remote("b") == 200
        node = node_of_idle(await d.until(node_of_idle))
        low = PressurePushed(node, Level.LOW, Bytes(0), seconds(60))
        await call_arbiter("push_pressure", low)
        await d.until(lambda s: not s["tickets"])
        first, second = await d.events("eviction")
        assert {first["model"], second["model"]} == {"a", "b"}
        assert first["reason"] == second["reason"] == "pressure"
        assert second["unix_s"] - first["unix_s"] >= 4.9  # of 5, by a clock that may be set


async def test_levels_come_from_free_host_ram_by_the_marks_of_the_settings() -> None:
    """Real readings; the marks move, because the machine's RAM should not."""
    both = {"chat": capability(a=model(50)), "other": capability("embedding", b=model(50))}
    async with live_arbiter(both) as d:
        chat, other = d.holder("chat"), d.holder("other")
        assert await chat.ask.remote("a") == await other.ask.remote("b") == 200
        node_of_idle(await d.until(node_of_idle))

        async def set_marks(low: float, critical: float) -> None:
            table = d.table.model_dump()
            table["arbiter"]["pressure_marks"]["ram"] = {"low": low, "critical": critical}
            await call_arbiter("configure", boot.configuration(type(d.table).model_validate(table)))

        async def other_has_none() -> bool:
            """By its holder: other marks begin a new epoch, whose books lack b until it rejoins."""
            return (await other.lives.remote()).get("b") in (None, "closed")

        await set_marks(1.0, 0.0)
        await eventually(other_has_none)
        low, *_ = await eventually(lambda: d.events("memory_pressure"))
        assert (low["level"], low["source"]) == ("low", "measured")
        assert 0 < low["size_bytes"] < procfs.ram()[0]
        assert await other.ask.remote("b") == 200  # low pressure refuses no load
        await set_marks(1.0, 1.0)
        await eventually(other_has_none)
        await d.until(lambda s: {x["pressure"] for x in s["devices"]} == {"critical"})
        with pytest.raises(UnderPressure):
            await other.ask.remote("b")
        assert await chat.ask.remote("a") == 200
        await set_marks(0.15, 0.05)
        await d.until(lambda s: {x["pressure"] for x in s["devices"]} == {"nominal"})
        assert await other.ask.remote("b") == 200
        await d.books_are_true()


@pytest.mark.spec("H8")
async def test_critical_pressure_empties_the_caches_of_a_model_that_stays(tmp_path: Path) -> None:
    purged = tmp_path / "purged"
    async with live_arbiter({"first": capability("vision", a=model(50, purged=str(purged)))}) as d:
        first = d.holder("first")
        assert await first.ask.remote("a") == 200
        await first.keep.remote("a")
        node = (await d.state())["devices"][0]["node"]
        await d.until(lambda s: any(t["inflight"] for t in s["tickets"]))
        low = PressurePushed(node, Level.LOW, Bytes(0), seconds(60))
        await call_arbiter("push_pressure", low)
        assert not purged.exists()
        critical = PressurePushed(node, Level.CRITICAL, Bytes(0), seconds(60))
        await call_arbiter("push_pressure", critical)
        await eventually(purged.exists)
        assert await d.states() == {"a": "resident"}
        await first.let_go.remote("a")
