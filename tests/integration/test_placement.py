"""Who may be where, on a real cluster: exclusion groups, and a model larger than everything."""

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
