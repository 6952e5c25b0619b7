"""Two GPUs on a real cluster: the node agent, the arbiter and engines are the product's, NVML is
pynvml over a library of ours (tests.support.nvml).
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from arbiter import leases
from arbiter.client.admin import call_arbiter, find_arbiter
from arbiter.core.types import LeaseConditions
from arbiter.errors import ArbiterUnavailable, HolderQuarantined
from arbiter.protocol.messages import LeaseCall
from arbiter.units import GIB, MIB, Bytes, seconds
from deployments.monitoring.view import Facts, view_of
from tests.support import message_counter, nvml
from tests.support.engine_host import device_bytes
from tests.support.gpu_engine import KEPT
from tests.support.holding import holding
from tests.support.live_arbiter import LiveArbiter, capability, gone, kill, live_arbiter, model
from tests.support.nvml import FakeNvml
from tests.support.waits import eventually

pytestmark = pytest.mark.usefixtures("cluster")
LENT = 400  # MiB of each GPU
RAM = 64  # MiB of each engine's process
WITHIN = 0.05  # B1


def on_gpu(fake: FakeNvml, mib: int, **how: Any) -> dict[str, Any]:
    return model(mib, nvml=str(fake.folder), ram=RAM * MIB, **how)


def chat(role: str = "text", **models: Any) -> dict[str, Any]:
    return {"chat": capability(role, **models) | {"engine": "tests.support.gpu_engine:build"}}


@asynccontextmanager
async def gpus(role: str = "text", **sizes: int) -> AsyncIterator[tuple[LiveArbiter, FakeNvml]]:
    """A live_arbiter whose models hold that many MiB of a GPU."""
    with nvml.gpus_of_session() as fake:
        models = {name: on_gpu(fake, mib) for name, mib in sizes.items()}
        arenas = {"gpu": round((LENT + 512) * MIB / 0.9), "host": 4 * GIB}
        async with live_arbiter(
            chat(role, **models), LENT, "tests.support.nvml:find", arenas=arenas
        ) as d:
            yield d, fake


def by_name(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Devices by the end of their names: gpu:0, gpu:1, host."""
    return {device["device"].rpartition("/")[2]: device for device in state["devices"]}


def held(state: dict[str, Any]) -> dict[str, dict[str, int]]:
    """MiB measured of each model, by device."""
    return {
        t["model"]: {d.rpartition("/")[2]: b // MIB for d, b in t["measured_bytes"].items()}
        for t in state["tickets"]
    }


def gpu_of(state: dict[str, Any], name: str) -> str:
    [found] = [d for d in held(state)[name] if d.startswith("gpu:")]
    return found


@pytest.mark.spec("B1", "B2", "B3", "B7")
async def test_the_state_shows_each_gpu_by_name_and_card_and_who_else_is_on_it() -> None:
    async with gpus(a=100) as (d, fake):
        fake.gpus[1].compute = {os.getpid(): 3 * GIB}
        fake.write()
        state = await d.until(lambda s: by_name(s)["gpu:1"]["foreign_processes"])
        shown = by_name(state)
        first, second = shown["gpu:0"], shown["gpu:1"]
        assert (first["name"], first["uuid"]) == ("NVIDIA A10G", "GPU-aaaa")
        assert (second["name"], second["uuid"]) == ("NVIDIA H100 80GB HBM3", "GPU-bbbb")
        assert [g["capacity_bytes"] // GIB for g in (first, second)] == [24, 80]
        assert [g["physical_free_bytes"] // GIB for g in (first, second)] == [24, 77]
        arena = round((LENT + 512) * MIB / 0.9)  # less a tenth, and 512 MiB for each card
        assert {g["budget_bytes"] for g in (first, second)} == {arena - arena // 10 - (512 << 20)}
        [stranger] = second["foreign_processes"]
        assert (stranger["pid"], stranger["size_bytes"]) == (os.getpid(), 3 * GIB)
        assert first["is_exact"] and second["is_exact"]
        [_, row] = [r for r in view_of(state, Facts(), 0.0).devices if r.kind == "gpu"]
        assert row.name == "NVIDIA H100 80GB HBM3 GPU-bbbb"  # as the console and `top` show it


@pytest.mark.spec("A3", "B1", "B5", "C9")
async def test_each_engine_is_given_the_gpu_it_was_granted_and_is_seen_there() -> None:
    async with gpus(a=300, b=300) as (d, _):
        holder = d.holder()
        assert await holder.ask.remote("a") == await holder.ask.remote("b") == 200
        seen = await d.until(lambda s: [300, 300] == sorted(
            size for sizes in held(s).values() for name, size in sizes.items() if "gpu" in name
        ))  # fmt: skip
        assert {gpu_of(seen, "a"), gpu_of(seen, "b")} == {"gpu:0", "gpu:1"}
        for device in ("gpu:0", "gpu:1"):
            shown = by_name(seen)[device]
            assert (shown["measured_bytes"], shown["charged_bytes"]) == (300 * MIB, 324 * MIB)
        await d.books_are_true()


@pytest.mark.spec("B1", "B4")
async def test_the_ram_of_engines_on_gpus_is_measured_on_the_host_and_is_not_foreign() -> None:
    async with gpus(a=300, b=300) as (d, _):
        holder = d.holder()
        assert await holder.ask.remote("a") == await holder.ask.remote("b") == 200
        counted = sum(device_bytes(root) for root, *_ in (await d.engines()).values())
        assert counted > 2 * RAM * MIB
        state = await d.until(
            lambda s: by_name(s)["host"]["measured_bytes"] == pytest.approx(counted, rel=WITHIN)
        )
        host = by_name(state)["host"]
        assert host["measured_bytes"] == host["charged_bytes"]
        await d.books_are_true()


@pytest.mark.spec("A9", "B4", "C3", "D1")
async def test_a_model_makes_room_on_its_gpu_sleeps_in_ram_and_wakes_where_it_was() -> None:
    async with gpus(a=300, b=300, c=350) as (d, _):
        holder = d.holder()
        for name in "ab":
            assert await holder.ask.remote(name) == 200
        before = await d.until(lambda s: all(
            t["idle_s"] is not None and len(t["measured_bytes"]) == 2 for t in s["tickets"]
        ))  # fmt: skip
        assert await holder.ask.remote("c") == 200
        states = await d.states()
        # Which of two that are alike leaves depends on how long each took to load.
        [victim] = [name for name in "ab" if states[name] == "asleep"]
        assert sorted(states.values()) == ["asleep", "resident", "resident"]
        home = gpu_of(before, victim)
        state = await d.until(lambda s: held(s).get("c", {}).get(home) == 350)
        assert held(state)[victim][home] == KEPT // MIB
        assert held(state)[victim]["host"] >= 300 + RAM  # its copy, and its process
        [asleep] = [t for t in state["tickets"] if t["model"] == victim]
        host = by_name(state)["host"]["device"]
        charged = asleep["charged_bytes"][host]
        assert charged >= 300 * MIB + asleep["ram_bytes"] > (300 + RAM) * MIB
        assert await holder.ask.remote(victim) == 200
        state = await d.until(lambda s: held(s)[victim].get(home) == 300)
        assert (await d.states())["c"] == "asleep"
        await d.books_are_true()


@pytest.mark.spec("C9")
async def test_load_goes_to_the_fuller_gpu_and_a_second_replica_to_the_other() -> None:
    async with gpus(a=100, b=60) as (d, _):
        first, second = d.holder(), d.holder()
        assert await first.ask.remote("a") == await first.ask.remote("b") == 200
        both = await d.until(
            lambda s: [len(sizes) for sizes in held(s).values()] == [2, 2]  # of a GPU and the host
        )
        assert gpu_of(both, "a") == gpu_of(both, "b")  # the best fit
        assert await second.ask.remote("b") == 200  # there is room beside its like
        state = await d.until(lambda s: len(s["tickets"]) == 3)
        gpus_of_b = [
            device
            for t in state["tickets"]
            for device in t["charged_bytes"]
            if t["model"] == "b" and "gpu:" in device
        ]
        assert len(gpus_of_b) == len(set(gpus_of_b)) == 2
        await d.books_are_true()


@pytest.mark.spec("C9")
async def test_model_returns_to_the_gpu_where_it_was_although_another_fits_better() -> None:
    async with gpus(a=100, b=60, c=100) as (d, _):
        first, second = d.holder(), d.holder()
        assert await first.ask.remote("a") == await first.ask.remote("b") == 200
        assert await second.ask.remote("b") == 200  # on the other
        await d.until(lambda s: [t["idle_s"] is not None for t in s["tickets"]] == [True] * 3)
        seen = await d.until(lambda s: [len(parts) for parts in held(s).values()] == [2, 2])
        home = gpu_of(seen, "a")
        for row in seen["tickets"]:
            if any(device.endswith(home) for device in row["charged_bytes"]):
                await call_arbiter("unload", row["ticket"])
        state = await d.until(lambda s: [t["model"] for t in s["tickets"]] == ["b"])
        left = {name: x["free_bytes"] for name, x in by_name(state).items() if name != "host"}
        assert max(left, key=lambda name: left[name]) == home
        assert await first.ask.remote("c") == await first.ask.remote("a") == 200
        state = await d.until(lambda s: [len(parts) for parts in held(s).values()] == [2, 2, 2])
        assert gpu_of(state, "a") == home != gpu_of(state, "c")  # which was nowhere before
        await d.books_are_true()


@pytest.mark.spec("A10", "A19")
async def test_the_bytes_of_a_dead_engine_are_back_when_nvml_lists_it_no_longer() -> None:
    async with gpus(a=300) as (d, fake):
        holder = d.holder()
        assert await holder.ask.remote("a") == 200
        state = await d.until(lambda s: "gpu:0" in held(s).get("a", {}))
        [[pid]] = (await d.engines()).values()
        fake.gpus[0].compute = {pid: 300 * MIB}  # the driver is slow to see it dead
        fake.write()
        (fake.folder / "held" / f"0.{pid}").unlink()
        await message_counter.ask(find_arbiter(), message_counter.begin)
        kill(pid)
        await gone(pid)
        state = await d.until(lambda s: [t["state"] for t in s["tickets"]] == ["reclaiming"])
        assert by_name(state)["gpu:0"]["charged_bytes"] == 324 * MIB
        state = await d.until(lambda s: by_name(s)["gpu:0"]["measured_bytes"] == 300 * MIB)
        shown = by_name(state)["gpu:0"]  # read after its death
        assert (shown["foreign_bytes"], shown["foreign_processes"]) == (0, [])
        [told] = await eventually(lambda: d.events("quarantine"))
        assert told["size_bytes"] == 324 * MIB and told["took_s"] >= 5
        counted = await message_counter.ask(find_arbiter(), message_counter.counts)
        kills = counted.get("kill sent", 0) + counted.get("kill sent by Ray", 0)
        # One each 250 ms, at both ends of the five seconds too, then one each five seconds. A busy
        # machine may need twice as long.
        assert 10 <= kills <= 22
        assert counted["report heard"] >= 10  # a reading follows each
        with pytest.raises(HolderQuarantined):
            await holder.ask.remote("a")
        fake.gpus[0].compute = {}
        fake.write()
        state = await d.until(lambda s: not s["tickets"])
        assert by_name(state)["gpu:0"]["free_bytes"] == by_name(state)["gpu:0"]["budget_bytes"]
        assert await holder.ask.remote("a") == 200
        await d.books_are_true()


@pytest.mark.spec("A15", "B1")
async def test_a_leased_process_is_measured_on_its_gpu_and_its_ram_until_it_gave_back() -> None:
    async with gpus(a=300) as (d, fake):
        lease = leases.ask(200 / 1024, way=leases.RayTransport(), name="train")
        await asyncio.to_thread(lease.acquire, 60)
        with holding("private", 100) as pid:
            [device] = lease.devices
            index = int(device.rpartition("gpu:")[2])
            nvml.hold(fake.folder, index, 200 * MIB, pid)
            lease.measure(pid)
            state = await d.until(lambda s: held(s)["train"].get(f"gpu:{index}") == 200)
            assert held(state)["train"]["host"] >= 100
            assert by_name(state)["host"]["measured_bytes"] >= 100 * MIB
            nvml.hold(fake.folder, index, 0, pid)
            await asyncio.to_thread(lease.release)
            state = await d.until(lambda s: not s["tickets"])
            assert by_name(state)["host"]["measured_bytes"] == 0
            assert by_name(state)[f"gpu:{index}"]["charged_bytes"] == 0
        assert (await d.events("lease_ended"))[-1]["reason"] == "manual"


@pytest.mark.spec("A15", "A18")
async def test_a_hold_covers_what_strangers_take_of_its_gpu_in_this_epoch_and_the_next() -> None:
    terms = LeaseConditions("default", seconds(600), seconds(0), frees=True)
    call = LeaseCall("hold", Bytes(60 * GIB), terms, "hold", seen="queued", wait=seconds(3))
    with nvml.gpus_of_session() as fake:
        models = chat(a=on_gpu(fake, 300))
        whole = {"host": 4 * GIB}  # and the GPUs, in which strangers have no part of their own
        async with live_arbiter(models, LENT, "tests.support.nvml:find", arenas=whole) as d:

            async def after(taken_gib: int, epoch: int = 0) -> tuple[int, int]:
                """GiB free and foreign of the second GPU, once so much is taken there."""
                fake.gpus[1].compute = {os.getpid(): taken_gib * GIB}
                fake.write()
                state = await d.until(
                    lambda s: (
                        s["epoch"] > epoch
                        and s["tickets"]
                        and "gpu:1" in by_name(s)  # its node has introduced itself again
                        and by_name(s)["gpu:1"]["physical_free_bytes"] == (80 - taken_gib) * GIB
                    )
                )
                shown = by_name(state)["gpu:1"]
                return shown["free_bytes"] // GIB, shown["foreign_bytes"] // GIB

            answer = await call_arbiter("free", call, True)
            assert answer["lease"]["state"] == "held"
            left, foreign = await after(0)
            assert await after(50) == (left, foreign)
            epoch = (await d.state())["epoch"]
            kill(await d.arbiter_pid())
            assert await after(50, epoch) == (left, foreign)
            assert await after(65) == (left - 5, foreign + 5)
            await call_arbiter("end_lease", "hold", "default")
            state = await d.until(lambda s: not s["tickets"])
            assert by_name(state)["gpu:1"]["foreign_bytes"] // GIB == 65


@pytest.mark.spec("A16")
async def test_foreign_memory_on_a_gpu_takes_from_what_is_lent_there_and_only_there() -> None:
    async with gpus(a=300) as (d, fake):
        fake.gpus[0].compute = {os.getpid(): 24 * GIB}
        fake.write()
        await d.until(lambda s: by_name(s)["gpu:0"]["free_bytes"] < 0)
        assert await d.holder().ask.remote("a") == 200
        state = await d.until(lambda s: held(s).get("a", {}).get("gpu:1") == 300)
        assert by_name(state)["gpu:1"]["foreign_bytes"] == 0
        await d.books_are_true()


@pytest.mark.spec("A16")
async def test_where_nvml_lists_no_process_a_model_is_measured_by_the_devices_delta() -> None:
    async with gpus(a=300) as (d, fake):
        fake.gpus[0].used = fake.gpus[1].used = GIB
        for gpu in fake.gpus:
            gpu.hidden = True
        fake.write()
        await d.until(lambda s: by_name(s)["gpu:0"]["physical_free_bytes"] == 23 * GIB)
        assert await d.holder().ask.remote("a") == 200
        state = await d.until(lambda s: 300 in held(s).get("a", {}).values())
        shown = by_name(state)[gpu_of(state, "a")]
        assert not shown["is_exact"]
        assert shown["measured_bytes"] == 300 * MIB
        await d.books_are_true()


@pytest.mark.spec("A19", "B1")
async def test_a_gpu_that_falls_off_the_bus_leaves_and_its_model_loads_on_the_other() -> None:
    async with gpus(a=300) as (d, fake):
        holder = d.holder()
        assert await holder.ask.remote("a") == 200
        state = await d.until(lambda s: "a" in held(s) and len(held(s)["a"]) == 2)
        first = gpu_of(state, "a")
        index = int(first.removeprefix("gpu:"))
        for call in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetComputeRunningProcesses"):
            fake.fail(call, nvml.GPU_IS_LOST, gpu=index)
        await d.until(lambda s: first not in by_name(s) and not s["tickets"])
        assert await d.engines() == {}
        assert [e["device"] for e in await d.events("device_lost")] == [
            by_name(state)[first]["device"]
        ]
        assert await holder.ask.remote("a") == 200
        state = await d.until(lambda s: "a" in held(s) and len(held(s)["a"]) == 2)
        assert gpu_of(state, "a") != first
        fake.mend()
        await d.until(lambda s: first in by_name(s))
        await d.books_are_true()


@pytest.mark.spec("B1")
async def test_a_gpu_that_cannot_be_read_keeps_its_model_and_is_lent_from_no_more() -> None:
    async with gpus(a=300, b=80) as (d, fake):
        holder = d.holder()
        assert await holder.ask.remote("a") == 200
        state = await d.until(lambda s: "a" in held(s) and len(held(s)["a"]) == 2)
        first = gpu_of(state, "a")
        fake.fail("nvmlDeviceGetMemoryInfo", nvml.UNKNOWN, gpu=int(first.removeprefix("gpu:")))
        state = await d.until(lambda s: by_name(s)[first]["unreadable"])
        assert "nvmlDeviceGetMemoryInfo" in by_name(state)[first]["unreadable"]
        assert (by_name(state)[first]["largest_fit_bytes"], held(state)["a"][first]) == (0, 300)
        assert await holder.ask.remote("a") == await holder.ask.remote("b") == 200
        state = await d.until(lambda s: "b" in held(s) and len(held(s)["b"]) == 2)
        assert gpu_of(state, "b") != first
        fake.mend()
        await d.until(lambda s: by_name(s)[first]["unreadable"] is None)
        await d.books_are_true()


@pytest.mark.spec("B1")
async def test_a_driver_that_does_not_answer_is_told_and_no_ram_is_lent_in_its_place() -> None:
    async def ended() -> list[dict[str, Any]]:
        with contextlib.suppress(ArbiterUnavailable):
            events: list[dict[str, Any]] = await call_arbiter("events", 0, 0.1)
            return [e for e in events if e["kind"] == "agent_ended"]
        return []

    with nvml.gpus_of_session() as fake:
        fake.fail("nvmlInit", nvml.VERSION_MISMATCH)

        async def mend() -> str:
            [event] = await eventually(ended)
            assert (await call_arbiter("state"))["devices"] == []
            fake.mend()
            return str(event["cause"])

        mending = asyncio.ensure_future(mend())
        async with live_arbiter(chat(a=on_gpu(fake, 300)), LENT, "tests.support.nvml:find") as d:
            assert "nvmlInit" in await mending and "reboot" in await mending
            assert sorted(by_name(await d.state())) == ["gpu:0", "gpu:1", "host"]
            assert await d.holder().ask.remote("a") == 200


@pytest.mark.spec("C5", "K1")
async def test_short_memory_of_one_gpu_takes_its_idle_model_and_moves_no_other() -> None:
    """Half the reserve is 1.2 GiB of the first GPU, a fifth of it 0.5 GiB."""
    async with gpus("vision", a=100) as (d, fake):
        holder = d.holder()
        assert await holder.ask.remote("a") == 200
        state = await d.until(lambda s: [
            t for t in s["tickets"] if t["idle_s"] is not None and len(t["measured_bytes"]) == 2
        ])  # fmt: skip
        assert gpu_of(state, "a") == "gpu:0"
        device = by_name(state)["gpu:0"]["device"]
        fake.gpus[0].used = 23 * GIB
        fake.write()
        state = await d.until(lambda s: not s["tickets"])
        assert [by_name(state)[f"gpu:{i}"]["pressure"] for i in (0, 1)] == ["low", "nominal"]
        [told] = await d.events("memory_pressure")
        assert (told["device"], told["level"], told["source"]) == (device, "low", "measured")
        assert 0.5 * GIB < told["size_bytes"] < 1.2 * GIB
        assert await holder.ask.remote("a") == 200
        await d.until(lambda s: "gpu:1" in held(s).get("a", {}))
        fake.gpus[0].used = 24 * GIB - GIB // 4
        fake.write()
        await d.until(lambda s: by_name(s)["gpu:0"]["pressure"] == "critical")
        assert await d.states() == {"a": "resident"}  # it lies on the other
        fake.gpus[0].used = 0
        fake.write()
        await d.until(lambda s: by_name(s)["gpu:0"]["pressure"] == "nominal")
        levels = [(e["device"], e["level"]) for e in await d.events("memory_pressure")]
        assert levels == [(device, level) for level in ("low", "critical", "nominal")]
        assert [(e["model"], e["reason"]) for e in await d.events("eviction")] == [
            ("a", "pressure")
        ]
        await d.books_are_true()
