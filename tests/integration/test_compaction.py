"""An engine that keeps more than it needs gives it back and serves on, on a real cluster (D7)."""

from typing import Any

import pytest

from arbiter.client.admin import call_arbiter
from arbiter.core.types import ModelName
from arbiter.protocol.messages import Plain
from arbiter.units import MIB
from tests.support.live_arbiter import LiveArbiter, capability, live_arbiter, model

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.spec("D7")]
HOARD = 150 * MIB


def row(state: Plain, name: str) -> Plain:
    ticket: Plain = next((t for t in state["tickets"] if t["model"] == name), {})
    return ticket


def measured(state: Plain, name: str) -> int:
    return sum(row(state, name)["measured_bytes"].values())


async def hoard(d: LiveArbiter, holder: Any, name: str = "a") -> int:
    """Two requests, the second of which leaves much behind; what is measured then."""
    assert await holder.ask.remote(name) == 200
    await d.until(lambda s: row(s, name)["settled_bytes"])
    assert await holder.ask.remote(name) == 200
    state = await d.until(lambda s: row(s, name)["wasted_bytes"] > 100 * MIB)
    await d.until(lambda s: row(s, name)["idle_s"] is not None)
    return measured(state, name)


async def test_hoarding_engine_is_compacted_by_hand_and_before_another_model_leaves() -> None:
    models = {"chat": capability(a=model(50, hoard=HOARD)), "other": capability(b=model(60))}
    async with live_arbiter(models | {"third": capability(c=model(100))}) as d:
        chat, other, third = (d.holder(name) for name in ("chat", "other", "third"))
        assert await other.ask.remote("b") == 200
        before = await hoard(d, chat)
        ticket = await other.keep.remote("b")
        await d.until(lambda s: row(s, "b")["inflight"])
        done = await call_arbiter("compact", "in use", (ModelName("other", "b"),), 20.0)
        assert (done.freed_count, [(s.model, s.why) for s in done.spared]) == (
            0,
            [("b", "it is in use")],
        )
        await other.let_go.remote("b")
        done = await call_arbiter("compact", "by hand", (), 20.0)
        assert (done.freed_count, done.spared, done.is_finished) == (1, (), True)
        assert done.freed_bytes > 100 * MIB
        after = await d.until(lambda s: row(s, "a").get("measured_bytes"))
        assert measured(after, "a") < before - 100 * MIB
        assert row(after, "a")["state"] == "resident", "the answer came once it was back"
        assert await call_arbiter("compact", "again", (), 20.0) == type(done)(
            "again", 0, 0, (), True
        )

        await hoard(d, chat)
        assert await third.ask.remote("c") == 200
        await d.until(lambda s: {t["model"]: t["state"] for t in s["tickets"]} == dict.fromkeys(
            "abc", "resident"
        ))  # fmt: skip
        assert row(await d.state(), "b")["ticket"] == ticket, "the other model never left"
        assert [(e["model"], e["reason"]) for e in await d.events("eviction")] == [
            ("a", "compact")
        ] * 2
        [asked] = [e["ticket"] for e in await d.events("model_load") if e["model"] == "c"]
        sentences = (await call_arbiter("explain", asked))["sentences"]
        assert any("to be loaded again smaller: a" in line for line in sentences)
        assert await chat.ask.remote("a") == 200
        await d.books_are_true()


async def test_schedule_compacts_what_is_idle_and_leaves_pinned_and_asleep_models() -> None:
    models = {"rests": capability(s=model(200, floor="host", keep_warm_s=0.1))}
    models["chat"] = capability(a=model(50, hoard=HOARD))
    models["held"] = capability(p=model(50, hoard=HOARD, pin=True))
    models["last"] = capability(n=model(50))
    async with live_arbiter(models, mib=900, compact_every_loads=4) as d:
        rests, chat, held, last = (d.holder(name) for name in models)
        assert await rests.ask.remote("s") == 200
        await d.until(lambda s: row(s, "s").get("state") == "asleep")
        await hoard(d, held, "p")
        await hoard(d, chat, "a")
        before = await d.state()
        assert await last.ask.remote("n") == 200  # the fourth load
        after = await d.until(
            lambda s: (
                row(s, "a").get("ticket", row(before, "a")["ticket"]) != row(before, "a")["ticket"]
            )
        )
        for name, state in (("p", "resident"), ("s", "asleep"), ("n", "resident")):
            assert row(after, name)["state"] == state
        assert row(after, "p")["ticket"] == row(before, "p")["ticket"]
        assert row(after, "s")["ticket"] == row(before, "s")["ticket"]
        assert [e["model"] for e in await d.events("model_compacted")] == ["a"]
