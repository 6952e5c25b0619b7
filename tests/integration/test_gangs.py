"""All or none on a real cluster (A13): a vision model and its projector, each with an engine
of its own, and a model over two devices.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from arbiter.client.admin import record_arbiter
from arbiter.core.decisions import Grant
from arbiter.core.types import Split
from arbiter.errors import EngineLost, NeverFits
from arbiter.server.recording import read, replay
from arbiter.units import MIB, Bytes
from deployments.config.engine_kinds import ENGINES, EngineKind
from deployments.replica.residency import Residency
from deployments.replica.use import Use
from deployments.replica.use_all import use_all
from policies import bundle
from tests.support import nvml
from tests.support.engine_host import device_bytes
from tests.support.live_arbiter import LiveArbiter, capability, gone, kill, live_arbiter, model
from tests.support.waits import eventually

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.spec("A13")]
BOTH = ("vlm", "projector")
NOISE = 4 * MIB  # a few pages come and go between two looks at a living process


def seeing(vlm: int = 200, projector: int = 80) -> dict[str, Any]:
    return capability(vlm=model(vlm), projector=model(projector))


@asynccontextmanager
async def user() -> AsyncIterator[Residency]:
    """Of both models, in this process."""
    residency = Residency.start("seeing")
    try:
        yield residency
    finally:
        await residency.close()


async def answer(engine: Use) -> int:
    head, *_ = [part async for part in engine.stream("POST", "/v1/embeddings", {}, b"{}")]
    return int(head.status)


async def see(residency: Residency) -> list[int]:
    async with use_all(residency, BOTH) as engines:
        return [await answer(engine) for engine in engines]


async def roots(d: LiveArbiter) -> dict[str, int]:
    """The root process of each model's engine."""
    engines = await d.engines()
    return {t["model"]: engines[t["ticket"]][0] for t in (await d.state())["tickets"]}


async def books_hold_what_the_kernel_says(d: LiveArbiter) -> None:
    """Of each engine process, counted here once more."""
    await d.books_are_true()
    held = {name: device_bytes(pid) for name, pid in (await roots(d)).items()}
    await d.until(lambda s: all(
        abs(sum(t["measured_bytes"].values()) - held[t["model"]]) < NOISE for t in s["tickets"]
    ))  # fmt: skip


async def test_gang_over_several_processes_is_granted_in_one_step_or_not_at_all(
    tmp_path: Path,
) -> None:
    both = {"seeing": seeing(), "chat": capability(a=model(250))}
    async with live_arbiter(both, barrier_s=0.5) as d, user() as residency:
        first, log = (await d.state())["epoch"], tmp_path / "log.jsonl"
        await asyncio.to_thread(record_arbiter, str(log))
        await d.until(lambda s: s["epoch"] > first)
        chat = d.holder("chat")
        await chat.keep.remote("a")
        before = await d.engines()
        answers = asyncio.ensure_future(see(residency))
        await d.until(lambda s: len(s["queue"]) == 2)
        await eventually(lambda: d.events("barrier_dropped"))  # in use, it did not leave for them
        state = await d.state()
        [device] = [one for one in state["devices"] if one["kind"] == "cpu"]
        assert device["free_bytes"] > 110 * MIB, "the projector would have had room"
        assert {t["model"]: t["state"] for t in state["tickets"]} == {
            "a": "resident", "vlm": "queued", "projector": "queued",
        }  # fmt: skip
        [a] = [t for t in state["tickets"] if t["model"] == "a"]
        assert device["charged_bytes"] == sum(a["charged_bytes"].values())
        assert await d.engines() == before and not answers.done()
        await chat.let_go.remote("a")
        await chat.end.remote("a")
        assert await asyncio.wait_for(answers, 90) == [200, 200]
        tickets = {t["ticket"] for t in (await d.state())["tickets"] if t["model"] in BOTH}
        await books_hold_what_the_kernel_says(d)
    life = max(read(log), key=lambda life: len(life.events))
    steps = list(replay(life, bundle(life.heading.settings)))
    granted = [{g.ticket for g in step.decisions if isinstance(g, Grant)} for step in steps]
    assert [step for step in granted if step & tickets] == [tickets]
    assert all(step.is_same for step in steps)


async def test_gang_member_serves_on_when_another_dies_and_both_can_be_loaded_again() -> None:
    async with live_arbiter({"seeing": seeing()}) as d, user() as residency:
        async with use_all(residency, BOTH) as (vlm, projector):
            lost, left = projector.ticket, vlm.ticket
            at = await roots(d)
            kill(at["projector"])
            await gone(at["projector"])
            await d.until(lambda s: [t["ticket"] for t in s["tickets"]] == [left])
            with pytest.raises(EngineLost):
                await answer(projector)
            assert await answer(vlm) == 200
        await books_hold_what_the_kernel_says(d)
        assert await see(residency) == [200, 200]
        now = await roots(d)
        assert now["vlm"] == at["vlm"] and now["projector"] != at["projector"]
        for pid in now.values():
            kill(pid)
        await d.until(lambda s: not s["tickets"])
        assert await d.engines() == {}
        assert await see(residency) == [200, 200]
        await books_hold_what_the_kernel_says(d)
        unloads = {e["ticket"]: e["reason"] for e in await d.events("model_unload")}
        assert unloads[lost] == unloads[left] == "lost" and len(unloads) == 3


async def test_gang_that_never_fits_is_refused_and_no_member_stays_queued() -> None:
    async with live_arbiter({"seeing": seeing(vlm=250, projector=200)}) as d, user() as residency:
        with pytest.raises(NeverFits) as caught:
            await see(residency)
        assert caught.value.need_bytes > 450 * MIB > caught.value.budget_bytes
        state = await d.state()
        assert state["queue"] == state["tickets"] == []
        assert await d.events("ticket_granted") == [] and await d.engines() == {}
        async with residency.use("vlm") as vlm:
            assert await answer(vlm) == 200
        await books_hold_what_the_kernel_says(d)


@asynccontextmanager
async def two_gpus(**sizes: int) -> AsyncIterator[tuple[LiveArbiter, nvml.FakeNvml]]:
    """Models of as many MiB, whose engine takes an equal part of each GPU it is given."""
    with nvml.gpus_of_session() as fake:
        args = {"nvml": str(fake.folder), "can_sleep": False}
        models = {name: model(mib, **args) for name, mib in sizes.items()}
        both = {"seeing": capability(**models) | {"engine": "halves"}}
        async with live_arbiter(both, 200, "tests.support.nvml:find") as d:
            yield d, fake


def of_gpus(sizes: dict[str, int]) -> list[int]:
    return [size for device, size in sorted(sizes.items()) if "gpu:" in device]


@pytest.mark.spec("B5")
async def test_a_ticket_over_two_devices_is_granted_on_both_or_on_neither(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = EngineKind("tests.support.gpu_engine:build", (), Bytes(0), Bytes(0), split=Split.EQUAL)
    monkeypatch.setitem(ENGINES, "halves", kind)
    async with two_gpus(wide=250, narrow=120) as (d, fake), user() as residency:

        async def wide() -> None:
            async with residency.use("wide") as engine:
                assert await answer(engine) == 200

        async with residency.use("narrow"):
            engines = await d.engines()
            waiting = asyncio.ensure_future(wide())
            await eventually(lambda: d.events("eviction"))  # asked to leave, and in use
            state = await d.state()
            charged = [x["charged_bytes"] // MIB for x in state["devices"] if x["kind"] == "gpu"]
            assert sorted(charged) == [0, 144] and len(state["queue"]) == 1
            assert await d.engines() == engines
        await asyncio.wait_for(waiting, 90)
        await d.books_are_true()
        [[pid]] = (await d.engines()).values()
        held = [(fake.folder / "held" / f"{index}.{pid}").read_text() for index in (0, 1)]
        assert held == [str(125 * MIB)] * 2
        await d.until(lambda s: of_gpus(s["tickets"][0]["measured_bytes"]) == [125 * MIB] * 2)
        assert of_gpus((await d.state())["tickets"][0]["charged_bytes"]) == [137 * MIB] * 2
        kill(pid)
        state = await d.until(lambda s: not s["tickets"])
        assert all(x["free_bytes"] == x["budget_bytes"] for x in state["devices"])
        await d.books_are_true()
