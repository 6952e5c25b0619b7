"""Swaps between models in use, pinned or wanted by many, on a real cluster (A5, A6, A9)."""

import asyncio
from typing import Any

import pytest

from arbiter.core.types import Priority
from arbiter.units import MIB
from tests.support.live_arbiter import capability, live_arbiter, model, two
from tests.support.waits import eventually

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.mark.spec("A9")
async def test_next_victim_is_tried_when_a_barrier_drops_and_the_queued_ticket_stays() -> None:
    three = {name: capability(**{name: model(150)}) for name in "abc"}
    async with live_arbiter(three, barrier_s=0.5) as d:
        a, b, c = (d.holder(name) for name in "abc")
        await a.keep.remote("a")
        await b.keep.remote("b")
        waiting = c.ask.remote("c")
        before = await d.until(lambda s: s["queue"])
        holders = {(t["model"], t["holder"]) for t in before["tickets"] if t["model"] in "ab"}
        assert len(holders) == 2

        async def both_dropped() -> bool:
            told = await d.events("barrier_dropped")
            return {(e["model"], e["holder"]) for e in told} == holders

        await eventually(both_dropped)
        after = await d.state()
        assert [q["ticket"] for q in after["queue"]] == [q["ticket"] for q in before["queue"]]
        assert {await a.ask.remote("a"), await b.ask.remote("b")} == {200}
        await b.let_go.remote("b")
        assert await asyncio.wait_for(waiting, 90) == 200
        assert (await d.states())["a"] == "resident"
        await d.books_are_true()


@pytest.mark.spec("A9")
async def test_barrier_lasts_ten_seconds_where_nothing_is_set() -> None:
    async with live_arbiter(two()) as d:
        chat, other = d.holder("chat"), d.holder("other")
        await chat.keep.remote("a")
        waiting = other.ask.remote("b")
        await d.until(lambda s: {t["model"]: t["state"] for t in s["tickets"]} == {
            "a": "draining", "b": "queued"
        })  # fmt: skip
        [dropped] = await eventually(lambda: d.events("barrier_dropped"))
        assert dropped["took_s"] >= 10 and dropped["model"] == "a"
        assert await chat.ask.remote("a") == 200
        await chat.let_go.remote("a")
        await chat.end.remote("a")
        assert await asyncio.wait_for(waiting, 90) == 200
        await d.books_are_true()


@pytest.mark.spec("A9")
async def test_requests_that_come_behind_a_barrier_wait_for_a_new_ticket() -> None:
    both = {
        "chat": capability(a=model(200, can_sleep=False)),
        "other": capability(b=model(200, can_sleep=False)),
    }
    async with live_arbiter(both, barrier_s=60) as d:
        chat, other = d.holder("chat"), d.holder("other")
        old = await chat.keep.remote("a")
        waiting = other.ask.remote("b")
        await d.until(lambda s: [t["state"] for t in s["tickets"] if t["ticket"] == old] == [
            "draining"
        ])  # fmt: skip
        late = [chat.ask.remote("a") for _ in range(20)]

        async def all_wait() -> bool:
            return int(await chat.waiting.remote("a")) == len(late)

        await eventually(all_wait)
        await chat.let_go.remote("a")
        assert await asyncio.wait_for(waiting, 90) == 200
        assert await asyncio.gather(*late) == [200] * 20
        granted = [e["model"] for e in await d.events("ticket_granted")]
        assert granted == ["a", "b", "a"]
        await d.books_are_true()


@pytest.mark.spec("A6", "C8")
async def test_pinned_model_is_no_victim_though_no_other_is_idle() -> None:
    """What is in use is asked instead, and the queued ticket waits for it."""
    table = {
        "chat": capability(p=model(200, pin=True)),
        "busy": capability(u=model(30)),
        "other": capability(b=model(200)),
    }
    async with live_arbiter(table, mib=460, barrier_s=0.5) as d:
        chat, busy, other = d.holder("chat"), d.holder("busy"), d.holder("other")
        await busy.keep.remote("u")
        await d.until(lambda s: {t["model"]: t["state"] for t in s["tickets"]} == {
            "p": "resident", "u": "resident"
        })  # fmt: skip
        waiting = other.ask.remote("b")
        await eventually(lambda: d.events("barrier_dropped"))
        await busy.let_go.remote("u")
        assert await asyncio.wait_for(waiting, 90) == 200
        assert {e["model"] for e in await d.events("eviction")} == {"u"}
        assert (await d.states())["p"] == "resident" and await chat.ask.remote("p") == 200
        await d.books_are_true()


@pytest.mark.spec("A5")
async def test_model_just_granted_serves_the_request_it_was_granted_for() -> None:
    """Though another ticket has waited for its bytes since before it was loaded."""
    slow = {"can_sleep": False, "load_seconds": 0.3, "chunks": 4, "chunk_seconds": 0.05}
    table: dict[str, Any] = {name: capability(**{name: model(200, **slow)}) for name in "ab"}
    async with live_arbiter(table, min_residency_loads=0) as d:
        holders = {name: d.holder(name) for name in "ab"}
        for _ in range(3):
            asked = [holder.stream.remote(name) for name, holder in holders.items()]
            await d.until(lambda s: s["queue"] and s["tickets"])
            counts = await asyncio.gather(*asked)
            assert counts == [5, 5]  # each was answered whole, with its end
        for kind in ("ticket_granted", "model_load"):
            loaded = [e["model"] for e in await d.events(kind)]
            assert len(loaded) <= 6  # one at most for each request
        await d.books_are_true()


@pytest.mark.spec("C3")
async def test_victims_are_the_cheapest_set_that_suffices_and_none_besides() -> None:
    """`b` would suffice as well, or `a` with `d`; both would take longer to load again."""
    slow = {"can_sleep": False, "load_seconds": 6}  # longer than the others on a busy machine
    table = {
        "chat": capability(a=model(100, **slow), b=model(200, **slow)),
        "cheap": capability(c=model(150, can_sleep=False), d=model(20, can_sleep=False)),
        "other": capability(e=model(180)),
    }
    async with live_arbiter(table, mib=620) as d:
        chat, cheap = d.holder("chat"), d.holder("cheap")
        assert await asyncio.gather(chat.ask.remote("a"), chat.ask.remote("b")) == [200, 200]
        for name in ("d", "c"):
            assert await cheap.ask.remote(name) == 200
        stays_s = max(e["took_s"] for e in await d.events("model_load"))  # each for its own load
        await d.until(lambda s: all((t["idle_s"] or 0) > stays_s for t in s["tickets"]))
        assert await d.holder("other").ask.remote("e") == 200
        assert [e["model"] for e in await d.events("eviction")] == ["c"]
        await d.books_are_true()


@pytest.mark.spec("C1", "C2")
async def test_lowest_role_leaves_first_and_a_less_urgent_model_of_any_role_before_it() -> None:
    roles = {"chat": "text", "hearing": "asr", "seeing": "vision"}
    table = {name: capability(role, **{name: model(100)}) for name, role in roles.items()}
    table["other"] = capability(x=model(100))
    async with live_arbiter(table) as d:
        holders = {name: d.holder(name) for name in roles}
        for name, holder in holders.items():
            assert await holder.ask.remote(name) == 200
        await d.until(lambda s: all((t["idle_s"] or 0) > 2 for t in s["tickets"]))
        assert await d.holder("other").ask.remote("x") == 200
        [eviction] = await d.events("eviction")
        assert eviction["model"] == "seeing" and "image embeddings" in eviction["act"]
        assert await holders["chat"].ask.remote("chat", priority=Priority.LOW) == 200
        await d.until(  # it has heard of all five requests, and with the last of its priority
            lambda s: (
                sum(row["requests_count"] for row in s["clients"]) == 5
                and all(t["idle_s"] is not None for t in s["tickets"])
            )
        )
        assert await holders["seeing"].ask.remote("seeing") == 200
        assert [e["model"] for e in await d.events("eviction")] == ["seeing", "chat"]
        await d.books_are_true()


@pytest.mark.spec("C1")
async def test_model_of_a_role_whose_eviction_costs_more_stays_though_it_was_used_first() -> None:
    roles = {
        "dear": {"rank": 50, "evict_cost_s": 100, "act": "its index is built anew"},
        "cheap": {"rank": 50, "act": "nothing is lost"},
    }
    table = {name: capability(name, **{name: model(150)}) for name in roles}
    table["other"] = capability(x=model(150))
    async with live_arbiter(table, roles=roles, evict="cost_aware") as d:
        for name in ("dear", "cheap"):
            assert await d.holder(name).ask.remote(name) == 200
        await d.until(lambda s: all((t["idle_s"] or 0) > 2 for t in s["tickets"]))
        assert await d.holder("other").ask.remote("x") == 200
        [eviction] = await d.events("eviction")
        assert (eviction["model"], eviction["act"]) == ("cheap", "nothing is lost")


@pytest.mark.spec("C4")
async def test_host_ram_above_its_mark_gives_up_the_models_that_slept_longest() -> None:
    """Its budget has room for all; the high mark for one of them."""
    models = {"chat": capability(**{name: model(100) for name in "abc"})}
    async with live_arbiter(models, mib=150, host_marks={"high": 0.4, "low": 0.3}) as d:
        holder = d.holder()
        for name in "abc":
            assert await holder.ask.remote(name) == 200
        await d.until(lambda s: {t["model"]: t["state"] for t in s["tickets"]} == {
            "b": "asleep", "c": "resident"
        })  # fmt: skip
        assert await holder.ask.remote("b") == 200
        assert await holder.ask.remote("a") == 200
        loads = [e["model"] for e in await d.events("model_load")]
        assert loads == ["a", "b", "c", "a"], "b woke up, and a was loaded anew"
        await d.books_are_true()


@pytest.mark.spec("C4")
@pytest.mark.parametrize(
    "percents, leaves",
    [([17, 9, 31, 32, 9], "ab"), ([12, 9, 30, 31, 9], "a")],
    ids=["from 89 to 98, beyond 81", "from 82 to 91, down to 79"],
)
async def test_host_ram_is_governed_by_marks_of_nine_and_eight_tenths_where_nothing_is_set(
    percents: list[int], leaves: str
) -> None:
    """Models of so many percent of its budget fall asleep one after the other, and only the last
    brings it above the high mark."""
    budget_mib, names = 500, "abcde"
    sizes = dict(zip(names, percents, strict=True)) | {"f": 9}
    models = {name: model(part * budget_mib // 100) for name, part in sizes.items()}
    arenas = {kind: round(budget_mib / 0.9) * MIB for kind in ("cpu", "host")}
    awake_one = {"one_resident_roles": ["text"], "evict": "priority_lru"}
    async with live_arbiter({"chat": capability(**models)}, arenas=arenas, **awake_one) as d:
        holder = d.holder()

        async def left() -> list[str]:
            return [e["model"] for e in await d.events("eviction") if e["reason"] == "fit"]

        for name in names:
            assert await holder.ask.remote(name) == 200
        state = await d.until(lambda s: _asleep(s) == {*"abcd"})
        assert sum(percents[:4]) - 1 < _on_host(state) <= sum(percents[:4])
        assert await left() == []
        assert await holder.ask.remote("f") == 200
        await d.until(lambda s: _asleep(s) == {*names} - {*leaves})
        await d.books_are_true()
        assert _asleep(await d.state()) == {*names} - {*leaves}
        assert await left() == [*leaves]


def _asleep(state: dict[str, Any]) -> set[str]:
    return {t["model"] for t in state["tickets"] if t["state"] == "asleep"}


def _on_host(state: dict[str, Any]) -> float:
    """The percent of the budget of host RAM that is lent."""
    [host] = [x for x in state["devices"] if x["kind"] == "host"]
    return 100 * float(host["charged_bytes"] / host["budget_bytes"])
