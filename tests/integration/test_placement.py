"""Who may be where, on a real cluster: exclusion groups, and a model larger than everything."""

from typing import Any

import pytest

from tests.support.live_arbiter import capability, live_arbiter, model

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.mark.spec("A11")
async def test_exclusive_role_has_one_awake_model_though_two_would_fit() -> None:
    chat = {"chat": capability(a=model(50), b=model(50))}
    async with live_arbiter(chat, one_resident_roles=["text"]) as d:
        holder = d.holder()
        for name, other in ("ab", "ba", "ab"):
            assert await holder.ask.remote(name) == 200
            assert (await d.states()).get(other, "asleep") == "asleep"
        swaps = [e["model"] for e in await d.events("eviction")]
        assert swaps == ["a", "b"]
        await d.books_are_true()


@pytest.mark.spec("A11")
async def test_exclusive_role_has_one_awake_model_over_all_its_capabilities() -> None:
    three = {name: capability(**{name: model(50)}) for name in "ab"}
    three["c"] = capability("embedding", c=model(50))
    async with live_arbiter(three, one_resident_roles=["text"]) as d:
        a, b, c = (d.holder(name) for name in "abc")
        assert await c.ask.remote("c") == await a.ask.remote("a") == await b.ask.remote("b") == 200
        states = await d.states()
        assert (states["b"], states["c"]) == ("resident", "resident")
        assert states.get("a", "asleep") == "asleep"
        assert [e["model"] for e in await d.events("eviction")] == ["a"]
        await d.books_are_true()


@pytest.mark.spec("B6")
async def test_model_larger_than_the_budget_loads_alone_if_oversize_is_allowed() -> None:
    both = {
        "chat": capability(a=model(100), c=model(50), p=model(30, pin=True)),
        "other": capability(b=model(450, allow_oversize=True)),
    }
    async with live_arbiter(both, mib=400) as d:
        chat, other = d.holder("chat"), d.holder("other")
        assert await chat.ask.remote("a") == await chat.ask.remote("c") == 200
        await d.until(lambda s: [t["idle_s"] is not None for t in s["tickets"]] == [True] * 3)
        assert await other.ask.remote("b") == 200
        [warning] = await d.events("oversize")
        assert warning["model"] == "b" and warning["size_bytes"] > warning["granted_bytes"]
        states = await d.states()
        assert {states.pop(name, "gone") for name in "ac"} <= {"asleep", "gone"}
        assert states == {"b": "resident", "p": "resident"}
        await d.books_are_true()


@pytest.mark.spec("C8")
async def test_pin_beyond_the_cap_is_a_victim_like_any_other_model() -> None:
    table = {
        "chat": capability(p=model(150, pin=True), q=model(150, pin=True)),
        "other": capability(b=model(150)),
    }
    async with live_arbiter(table, mib=400, pinned_most=0.5) as d:
        d.holder("chat")
        state = await d.until(
            lambda s: [t["idle_s"] is not None for t in s["tickets"]] == [True] * 2
        )
        [over] = await d.events("pin_over_cap")
        assert [t["model"] for t in state["tickets"] if not t["pinned"]] == [over["model"]]
        assert await d.holder("other").ask.remote("b") == 200
        assert {e["model"] for e in await d.events("eviction")} == {over["model"]}
        await d.books_are_true()


@pytest.mark.spec("C8")
async def test_keep_warm_time_is_that_of_the_role_and_zero_means_at_once() -> None:
    roles = {"text": 300, "image": 900, "vision": 60, "asr": 300}
    table = {role: capability(role, **{role: plain()}) for role in roles}
    table["text"]["models"] |= {"zero": plain() | {"keep_warm_s": 0}, "ever": plain(-1)}
    async with live_arbiter(table) as d:
        for role in roles:
            assert await d.holder(role).ask.remote(role) == 200
        assert {t["model"]: t["keep_warm_s"] for t in (await d.state())["tickets"]} == roles
        text = d.holder("text")
        assert await text.ask.remote("ever") == await text.ask.remote("zero") == 200
        state = await d.until(lambda s: len(s["tickets"]) == 5)
        kept = {t["model"]: t["keep_warm_s"] for t in state["tickets"]}
        assert "zero" not in kept and kept["ever"] == -1  # for ever
        [unload] = await d.events("model_unload")
        assert (unload["model"], unload["reason"]) == ("zero", "idle")


def plain(keep_warm_s: int | None = None) -> dict[str, Any]:
    """A small model that says nothing of its keep-warm time, or this."""
    made = model(10)
    del made["keep_warm_s"]
    return made if keep_warm_s is None else made | {"keep_warm_s": keep_warm_s}
