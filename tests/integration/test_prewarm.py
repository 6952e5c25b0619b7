"""Speech and the re-warm sweep warm what is resident, on a real cluster."""

import pytest

from arbiter.client.admin import call_arbiter
from deployments.config import boot
from deployments.requests.prefixes import PrefixEnd
from tests.support.live_arbiter import LiveArbiter, capability, first, live_arbiter, model
from tests.support.waits import eventually

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.spec("G1", "G5", "G6")]

PREFIXES = {"stable_prefixes": [{"system": "be brief"}]}
NAMES = {
    "ears": capability("vad", a=model(50)),
    "mouth": capability(
        b=model(50, keep_warm_s=6, can_sleep=False, **PREFIXES),
        c=model(50, prewarm_fails="no memory", **PREFIXES),
    ),
}


async def prewarms(d: LiveArbiter, name: str, *causes: str) -> None:
    """Waits until these were all the pre-warms of a model."""

    async def are_there() -> bool:
        told = [e for e in await d.events("prewarm") if e["model"] == name]
        return [event["cause"] for event in told] == list(causes)

    await eventually(are_there)


async def test_speech_and_sweep_warm_a_resident_model_and_neither_keeps_it_nor_loads_it() -> None:
    async with live_arbiter(NAMES, pipelines=[["ears", "mouth"]], preload="off") as d:
        ears, mouth = d.holder("ears"), d.holder("mouth")
        assert await ears.pid.remote()
        assert await mouth.keep.remote("b")
        await mouth.let_go.remote("b")
        await prewarms(d, "b", "load")
        await ears.speak.remote()
        await prewarms(d, "b", "load", "speech")
        await mouth.shift_clock.remote(240)
        await prewarms(d, "b", "load", "speech", "sweep")
        for event in await d.events("prewarm"):
            assert (event["prefix"], event["outcome"]) == ("__system_prefix__", "warmed")
        await d.until(lambda s: not s["tickets"])  # its keep-warm is over: no pre-warm was a use
        await ears.speak.remote()
        await mouth.shift_clock.remote(1_000)
        assert await mouth.ask.remote("b") == 200
        await prewarms(d, "b", "load", "speech", "sweep", "load")
        assert len(await d.events("model_load")) == 2
        await d.until(lambda s: [row["requests_count"] for row in s["clients"]] == [2])


async def test_sweep_does_not_warm_again_the_prefix_that_a_request_has_used_lately() -> None:
    """That of a request 140 s ago; the declared one was warmed 240 s ago. The next sweep finds that
    both are due."""
    async with live_arbiter({"mouth": capability(b=model(50, **PREFIXES))}) as d:
        mouth = d.holder("mouth")
        assert await mouth.ask.remote("b") == 200
        await prewarms(d, "b", "load")
        await mouth.shift_clock.remote(100)
        said = b'{"messages": [{"role": "system", "content": "be kind"}]}'
        await mouth.chat.remote("b", PrefixEnd(1, key="lately"), said)
        await mouth.shift_clock.remote(140)
        await prewarms(d, "b", "load", "sweep")
        await mouth.shift_clock.remote(240)
        await prewarms(d, "b", "load", "sweep", "sweep", "sweep")
        declared = "__system_prefix__"
        names = [event["prefix"] for event in await d.events("prewarm")]
        assert names[:2] == [declared] * 2 and set(names[2:]) == {declared, "lately"}


@pytest.mark.spec("D9")
async def test_model_removed_and_added_again_knows_no_prefix_of_earlier_requests() -> None:
    async with live_arbiter({"mouth": capability(b=model(50, **PREFIXES), c=model(50))}) as d:
        mouth = d.holder("mouth")
        assert await mouth.ask.remote("b") == 200
        await prewarms(d, "b", "load")
        said = b'{"messages": [{"role": "system", "content": "be kind"}]}'
        await mouth.chat.remote("b", PrefixEnd(1, key="lately"), said)
        await mouth.shift_clock.remote(240)
        await prewarms(d, "b", "load", "sweep", "sweep")
        seen = (await d.state())["sequence"]
        table = d.table.model_dump(mode="json", exclude_defaults=True)
        del table["capabilities"]["mouth"]["models"]["b"]
        await call_arbiter("configure", boot.configuration(type(d.table).model_validate(table)))
        assert (await first("model_removed", seen))["model"] == "b"
        await call_arbiter("configure", boot.configuration(d.table))
        await call_arbiter("load", "mouth", "b")  # its holder hears of it after the table
        await prewarms(d, "b", "load", "sweep", "sweep", "load")
        await mouth.shift_clock.remote(240)
        await prewarms(d, "b", "load", "sweep", "sweep", "load", "sweep")
        declared = "__system_prefix__"
        names = [event["prefix"] for event in await d.events("prewarm")]
        assert {*names[1:3]} == {declared, "lately"} and names[3:] == [declared] * 2


async def test_prewarm_that_fails_is_one_event_until_the_next_load() -> None:
    async with live_arbiter(NAMES, pipelines=[["ears", "mouth"]]) as d:
        ears, mouth = d.holder("ears"), d.holder("mouth")
        assert await ears.pid.remote()
        assert await mouth.ask.remote("c") == 200
        await prewarms(d, "c", "load")
        [told] = await d.events("prewarm")
        assert told["outcome"] == "the engine answered 500: no memory"
        for _ in range(3):
            await mouth.shift_clock.remote(240)
            await ears.speak.remote()
            assert await mouth.ask.remote("c") == 200
        await prewarms(d, "c", "load")
        await d.unload("c")
        assert await mouth.ask.remote("c") == 200
        await prewarms(d, "c", "load", "load")
