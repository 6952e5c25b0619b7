"""What a declared pipeline makes likely is brought in, on a real cluster."""

import pytest

from arbiter.client.admin import call_arbiter
from arbiter.core.events import PressurePushed
from arbiter.core.types import Level
from arbiter.protocol.messages import Plain
from arbiter.units import MIB, Bytes, seconds
from tests.support.live_arbiter import capability, first, live_arbiter, model
from tests.support.waits import eventually

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


async def test_prefetched_stage_brings_the_stage_behind_it() -> None:
    stages = {"ears": ("asr", "a"), "mind": ("text", "t"), "mouth": ("tts", "b")}
    table = {name: capability(role, **{m: model(50)}) for name, (role, m) in stages.items()}
    async with live_arbiter(table, pipelines=[list(stages)]) as d:
        holders = {name: d.holder(name) for name in stages}

        async def are_learned() -> bool:
            return {e["model"] for e in await d.events("estimate_error")} >= {"t", "b"}

        assert await holders["mouth"].ask.remote("b") == 200
        assert await holders["mind"].ask.remote("t") == 200
        await eventually(are_learned)
        for name in "tb":
            await d.unload(name)
        await d.until(lambda s: not s["tickets"])
        seen = (await d.state())["sequence"]
        assert await holders["ears"].ask.remote("a") == 200
        await d.until(lambda s: [t["state"] for t in s["tickets"]] == ["resident"] * 3)
        told = [e for e in await d.events("model_preload") if e["seq"] > seen]
        assert [e["model"] for e in told] == ["t", "b"]
        await d.books_are_true()


async def test_nothing_is_prefetched_unmeasured_under_pressure_or_without_free_room() -> None:
    names = {"ears": capability(a=model(50)), "mouth": capability(b=model(250))}
    names["other"] = capability(c=model(100))
    pipelines = [["ears", "mouth"]]
    async with live_arbiter(names, pipelines=pipelines) as d:
        ears, mouth, other = d.holder("ears"), d.holder("mouth"), d.holder("other")
        assert await mouth.pid.remote() and await other.pid.remote()
        node = (await d.state())["devices"][0]["node"]

        async def used() -> list[Plain]:
            """What a use of the first brought about, once it is over."""
            seen = (await d.state())["sequence"]
            assert await ears.ask.remote("a") == 200
            await d.until(lambda s: any(
                t["model"] == "a" and t["idle_s"] is not None for t in s["tickets"]
            ))  # fmt: skip
            return [e for e in await d.events("model_preload") if e["seq"] > seen]

        async def b_is_learned() -> bool:
            return any(e["model"] == "b" for e in await d.events("estimate_error"))

        assert await used() == []
        await d.unload("a")
        assert await mouth.ask.remote("b") == 200
        await eventually(b_is_learned)
        await d.unload("b")
        await call_arbiter("push_pressure", PressurePushed(node, Level.LOW, Bytes(0), seconds(60)))
        assert await used() == []
        await d.unload("a")
        await call_arbiter(
            "push_pressure", PressurePushed(node, Level.NOMINAL, Bytes(0), seconds(60))
        )
        await d.until(lambda s: {x["pressure"] for x in s["devices"]} == {"nominal"})
        assert await other.ask.remote("c") == 200  # with it there is no room for b
        assert await used() == []
        for name in "ac":
            await d.unload(name)
        [told] = await used()
        assert told["model"] == "b"
        await d.books_are_true()
