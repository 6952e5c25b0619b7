"""Memory that is said to be short, on a real cluster."""

import pytest

from arbiter.client.admin import call_arbiter
from arbiter.core.events import PressurePushed
from arbiter.core.types import Level
from arbiter.errors import UnderPressure
from arbiter.units import Bytes, seconds
from tests.support.live_arbiter import capability, live_arbiter, model

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.spec("C5")]


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
        [unload] = await d.events("model_unload")
        assert (unload["model"], unload["reason"]) == ("b", "pressure")
        with pytest.raises(UnderPressure):
            await other.ask.remote("c")
        assert await chat.ask.remote("a") == 200
        await d.until(lambda s: all(x["pressure"] == "nominal" for x in s["devices"]))
        assert await other.ask.remote("c") == 200
        await d.books_are_true()
