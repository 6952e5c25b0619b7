"""What a declared pipeline makes likely is brought in, on a real cluster."""

import pytest

from arbiter.client.admin import call_arbiter
from arbiter.units import MIB
from tests.support.live_arbiter import capability, first, live_arbiter, model

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.spec("C11")]


async def test_next_model_of_a_pipeline_is_prefetched_before_its_request() -> None:
    """Once its size has been measured: two readings of its first use."""
    both = {"ears": capability("asr", a=model(50)), "mouth": capability("tts", b=model(50))}
    async with live_arbiter(both, pipelines=[["ears", "mouth"]]) as d:
        ears, mouth = d.holder("ears"), d.holder("mouth")
        assert await mouth.ask.remote("b") == 200
        assert (await first("estimate_error"))["size_bytes"] >= 50 * MIB  # measured, and learned
        [before] = await d.engines()
        await call_arbiter("unload", before)
        await d.until(lambda s: not s["tickets"])
        assert await ears.ask.remote("a") == 200
        await d.until(lambda s: sorted(t["state"] for t in s["tickets"]) == ["resident"] * 2)
        [told] = await d.events("model_preload")
        assert (told["model"], told["after"], told["why"]) == ("b", "a", "pipeline")
        [load] = [e for e in await d.events("model_load") if e["seq"] > told["seq"]]
        assert load["model"] == "b"
        assert await mouth.ask.remote("b") == 200
        assert len(await d.events("model_load")) == 3  # what was prefetched served it
        await d.books_are_true()
