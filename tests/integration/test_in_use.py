"""What is in use or pinned stays where it is, whatever asks for its bytes, and until every request
of its use has ended (A6, A7).
"""

import asyncio

import pytest

from arbiter import leases
from arbiter.client.admin import call_arbiter
from arbiter.core.events import PressurePushed
from arbiter.core.types import Floor, Level
from arbiter.units import Bytes, TicketId, seconds
from deployments.replica.residency import Residency
from deployments.replica.use import Use
from tests.support.live_arbiter import LiveArbiter, capability, embedded, live_arbiter, model, two
from tests.support.message_counter import a_heartbeat
from tests.support.waits import eventually

pytestmark = pytest.mark.usefixtures("cluster")
GROWS = {"grow_to": {"kv_cache_memory_bytes": 150 << 20}, "can_sleep": False}


async def in_use(d: LiveArbiter, name: str) -> None:
    """The arbiter has heard that this model serves a request."""
    await d.until(lambda s: any(t["model"] == name and t["inflight"] for t in s["tickets"]))


async def idle(d: LiveArbiter, *names: str) -> None:
    """These models are resident, and the arbiter has heard that they serve no request."""
    await d.until(lambda s: {t["model"] for t in s["tickets"] if t["idle_s"] is not None} == {
        *names
    })  # fmt: skip


@pytest.mark.spec("A6", "D8")
async def test_unload_by_hand_and_a_lowered_floor_leave_a_model_in_use_where_it_is() -> None:
    """The arbiter has not heard of the use of `a` yet, and has heard of that of `b`."""
    async with live_arbiter({"chat": capability(a=model(50), b=model(50, floor="device"))}) as d:
        h = d.own_holder()  # whose messages are counted
        assert await h.ask.remote("a") == 200
        await idle(d, "a", "b")
        before = await d.engines()
        b = await h.keep.remote("b")
        await in_use(d, "b")
        await call_arbiter("set_floor", "chat", "b", Floor.COLD)
        await a_heartbeat(h)
        a = await h.keep.remote("a")
        await call_arbiter("unload", TicketId(a))

        async def refused() -> bool:
            told = [e for e in await d.events() if e["kind"] in ("victim_busy", "unload_refused")]
            return [e["model"] for e in told] == ["a"]

        await eventually(refused)
        assert await h.ask.remote("a") == await h.ask.remote("b") == 200
        await d.until(lambda s: [(t["state"], t["inflight"]) for t in s["tickets"]] == [
            ("resident", 1)
        ] * 2)  # fmt: skip
        assert await d.engines() == before
        await h.let_go.remote("b")
        await d.until(lambda s: [t["ticket"] for t in s["tickets"]] == [a])  # b, at its floor
        assert await d.engines() == {a: before[a]} and b in before
        await d.books_are_true()


@pytest.mark.spec("A6", "A15")
async def test_lease_waits_for_a_model_in_use_and_takes_no_pinned_model() -> None:
    table = {"chat": capability(a=model(150, can_sleep=False), p=model(150, pin=True))}
    async with live_arbiter(table, barrier_s=0.5, lease_tenant="1 GiB") as d:
        h = d.holder()
        await idle(d, "p")
        await h.keep.remote("a")
        before = await d.engines()
        lease = leases.ask(200 / 1024, way=leases.RayTransport(), name="train")
        waiting = asyncio.create_task(asyncio.to_thread(lease.acquire, 60))
        await eventually(lambda: d.events("barrier_dropped"))
        assert await h.ask.remote("a") == 200
        assert await d.engines() == before and not waiting.done()
        await h.let_go.remote("a")
        await h.end.remote("a")
        await waiting
        assert {e["model"] for e in await d.events("eviction")} == {"a"}
        assert (await d.states())["p"] == "resident" and await h.ask.remote("p") == 200
        await asyncio.to_thread(lease.release)
        await d.until(lambda s: not any(t["lease"] for t in s["tickets"]))
        await d.books_are_true()


@pytest.mark.spec("A6", "A14", "C5", "C8")
async def test_pinned_model_makes_no_room_for_growth_and_no_relief_of_pressure() -> None:
    """Of a role that would go first, and unused for longest."""
    table = {
        "chat": capability(a=model(50) | GROWS, b=model(50, can_sleep=False)),
        "seeing": capability("vision", p=model(50, pin=True)),
    }
    async with live_arbiter(table, mib=320) as d:
        d.holder("seeing")
        await idle(d, "p")
        chat = d.holder("chat")
        assert await chat.ask.remote("b") == await chat.ask.remote("a") == 200
        await idle(d, "a", "b", "p")
        await chat.grow.remote("a")
        assert {e["model"] for e in await d.events("eviction")} == {"b"}
        await idle(d, "a", "p")
        node = (await d.state())["devices"][0]["node"]
        for level in (Level.LOW, Level.CRITICAL):
            await call_arbiter("push_pressure", PressurePushed(node, level, Bytes(0), seconds(60)))
        await eventually(lambda: d.events("pressure_nothing_left"))
        assert await d.states() == {"a": "resident", "p": "resident"}
        assert {e["model"] for e in await d.events("eviction")} == {"b"}
        await d.books_are_true()


async def embed(engine: Use) -> int:
    head, *_ = [part async for part in engine.stream("POST", "/v1/embeddings", {}, b"{}")]
    return int(head.status)  # type: ignore[union-attr]  # the head comes first


@pytest.mark.spec("A7")
async def test_requests_of_one_use_are_served_by_one_engine_though_another_model_waits() -> None:
    async with live_arbiter(two(), barrier_s=60) as d:
        residency, other = Residency.start("chat"), d.holder("other")
        async with residency.use("a") as engine:
            assert await embed(engine) == 200
            before, waiting = await d.engines(), other.ask.remote("b")
            await d.until(lambda s: {t["model"]: t["state"] for t in s["tickets"]} == {
                "a": "draining", "b": "queued"
            })  # fmt: skip
            for _ in range(3):
                assert await embed(engine) == 200
            assert await d.engines() == before and engine.ticket in before
        assert await asyncio.wait_for(waiting, 90) == 200
        assert [e["model"] for e in await d.events("model_load")] == ["a", "b"]
        await residency.close()


@pytest.mark.spec("A7")
async def test_timeout_of_a_caller_ends_its_use_while_the_model_streams() -> None:
    slow = model(50, chunks=10_000, chunk_seconds=0.02)  # for minutes
    async with live_arbiter({"chat": capability(a=slow)}) as d:
        residency, parts = Residency.start("chat"), 0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(None) as limit, residency.use("a") as engine:
                body = b'{"stream": true}'
                async for _ in engine.stream("POST", "/v1/chat/completions", {}, body):
                    parts += 1
                    if parts == 3:
                        await in_use(d, "a")
                        limit.reschedule(asyncio.get_running_loop().time())
        assert parts >= 3
        await idle(d, "a")
        told = await eventually(lambda: d.events("capability_run"))
        assert [e["outcome"] for e in told] == ["left"]
        head, _ = await embedded(residency, "a")
        assert head.status == 200
        await residency.close()
        await d.until(lambda s: not s["tickets"])
        await d.books_are_true()
