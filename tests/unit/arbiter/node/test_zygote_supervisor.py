"""The node's zygote: found, started, and given up on with its own last words; the agent beside it,
without Ray.
"""

import asyncio
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.exceptions import RayError

from arbiter.core import events as ev
from arbiter.core import types
from arbiter.errors import TicketClosed, TicketNotGranted
from arbiter.node import procfs, reports, zygote_client
from arbiter.node import zygote_supervisor as module
from arbiter.node.agent import NodeAgent
from arbiter.node.device_probe import Readings, Tree
from arbiter.protocol.messages import AgentSettings, SpawnSpec
from arbiter.units import Bytes, DeviceId, NodeId, TicketId
from tests.support.waits import eventually

T = TicketId("t")
SPEC = SpawnSpec("a:b", {})
FAKE = "tests.support.fake_engine:FakeEngine"
BROKEN = "tests.support.failing_zygote"
WITHIN_S = 30


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for a socket's path."""
    with tempfile.TemporaryDirectory(prefix="kp-") as made:
        yield Path(made)


@pytest.fixture(autouse=True)
def no_arbiter(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(*_: object, **__: object) -> None:
        raise RayError("no cluster")

    monkeypatch.setattr(reports.ray, "get_actor", nobody)


@pytest.fixture(autouse=True)
def granted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def confirm(*_: object) -> None: ...

    monkeypatch.setattr(reports.Reports, "confirm", confirm)


def agent(folder: Path, module_name: str) -> NodeAgent:
    settings = AgentSettings(module_name, folder=str(folder / "n"))
    return NodeAgent(NodeId("n"), settings, str(folder))


@pytest.mark.spec("A19")
async def test_zygote_that_cannot_start_is_given_up_with_the_end_of_its_log(folder: Path) -> None:
    running = agent(folder, BROKEN)
    async with asyncio.timeout(WITHIN_S):
        with pytest.raises(zygote_client.ZygoteError, match="No module named 'missing'"):
            await running.spawn(T, SPEC)
    await running.close()


@pytest.mark.spec("A10")
async def test_kill_ends_a_spawn_that_waits_for_a_zygote(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STARTS_FAILED", 1_000)
    running = agent(folder, BROKEN)
    spawning = asyncio.ensure_future(running.spawn(T, SPEC))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await running.kill(T)
    async with asyncio.timeout(5):
        with pytest.raises(TicketClosed):
            await spawning
    assert running._reports.gone[T] == ev.EngineGone(NodeId("n"), T, bytes_back=True)
    await running.close()


@pytest.mark.spec("A17")
async def test_readings_of_engines_are_exact_while_the_zygote_that_forked_them_lives(
    folder: Path,
) -> None:
    running = agent(folder, "deployments.engines.zygote")
    async with asyncio.timeout(WITHIN_S):
        await running.spawn(T, SpawnSpec(FAKE, {"served_name": "m", "engine_args": {}}))
        reading = ev.EngineReading(T, ())
        assert running._judged(reading).exact
        dead = running._engines.supervisor.known
        assert dead is not None
        os.kill(dead[0], 9)
        await eventually(lambda: not running._engines.supervisor.is_alive())
        assert not running._judged(reading).exact
        await eventually(
            lambda: (
                running._engines.supervisor.known not in (dead, None)
                and running._engines.supervisor.is_up
            )
        )
        assert not running._judged(reading).exact
        await running.close()


@pytest.mark.spec("A10")
async def test_end_of_an_engine_is_reported_during_a_slow_reading(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: asyncio.Queue[ev.Event] = asyncio.Queue()
    is_over = threading.Event()

    async def send(events: tuple[ev.Event, ...]) -> bool:
        for event in events:
            said.put_nowait(event)
        return True

    def read(trees: list[Tree]) -> Readings:
        is_over.wait(WITHIN_S)
        return Readings((), ())

    running = agent(folder, "deployments.engines.zygote")
    monkeypatch.setattr(running._reports, "say", send)
    monkeypatch.setattr(running._probe, "read", read)
    async with asyncio.timeout(WITHIN_S / 2):
        await running.spawn(T, SpawnSpec(FAKE, {"served_name": "m", "engine_args": {}}))
        await running.kill(T)
        assert await said.get() == ev.EngineGone(NodeId("n"), T, bytes_back=True)
    is_over.set()
    await running.close()


async def test_temporary_folder_of_an_engine_is_removed_with_it(folder: Path) -> None:
    running = agent(folder, "deployments.engines.zygote")
    scratch = running._engines.children.scratch(T)
    spec_that_litters = SpawnSpec(FAKE, {"served_name": "m", "engine_args": {"litter": True}})
    async with asyncio.timeout(WITHIN_S):
        await running.spawn(T, spec_that_litters)
        await eventually(lambda: scratch.exists() and [p.name for p in scratch.iterdir()])
        assert scratch.stat().st_mode & 0o077 == 0
        await running.kill(T)
        await eventually(lambda: not scratch.exists())
        await running.close()


@pytest.mark.spec("A14")
async def test_respawn_replaces_the_process_of_a_ticket_without_a_report(
    folder: Path,
) -> None:
    running = agent(folder, "deployments.engines.zygote")
    path = await running.spawn(T, SpawnSpec(FAKE, {"served_name": "m", "engine_args": {}}))
    [before] = (await running.engines())[T]
    async with asyncio.timeout(WITHIN_S):
        both = [running.respawn(T, SpawnSpec(FAKE, {"served_name": "m"})) for _ in range(2)]
        assert await asyncio.gather(*both) == [path, path]
    [after] = (await running.engines())[T]
    assert after != before and not running._reports.gone and Path(path).exists()
    await running.kill(T)
    with pytest.raises(TicketClosed):
        await running.respawn(T, SPEC)
    await running.close()


@pytest.mark.spec("A3", "A14")
async def test_respawn_without_a_grant_leaves_the_process_alive(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = agent(folder, "deployments.engines.zygote")
    async with asyncio.timeout(WITHIN_S):
        await running.spawn(T, SpawnSpec(FAKE, {"served_name": "m", "engine_args": {}}))
        before = await running.engines()

        async def refuse(_: object, ticket: TicketId) -> None:
            raise TicketNotGranted(ticket, NodeId("n"))

        monkeypatch.setattr(reports.Reports, "confirm", refuse)
        with pytest.raises(TicketNotGranted):
            await running.respawn(T, SPEC)
        assert await running.engines() == before
        found = procfs.process(before[T][0])
        assert found is not None and found.alive
        await running.close()


@pytest.mark.spec("B5")
@pytest.mark.parametrize(
    ("uuids", "visible"),
    [({2: "GPU-b", 10: "GPU-j", 3: "GPU-c"}, "GPU-b,GPU-j"), ({}, "2,10")],
    ids=["cards", "indexes"],
)
def test_engine_sees_the_gpus_of_its_ticket_in_nvmls_order_and_no_others(
    uuids: dict[int, str], visible: str
) -> None:
    parts = tuple(types.DeviceBytes(DeviceId(f"n/gpu:{number}"), Bytes(1)) for number in (10, 2))
    known = {DeviceId(f"n/gpu:{number}"): uuid for number, uuid in uuids.items()}
    scratch, spec = {"TMPDIR": "/s"}, SpawnSpec("a:b", {}, parts)
    assert zygote_client.equipped(spec, Path("/s"), known).env == scratch | {
        "CUDA_VISIBLE_DEVICES": visible,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    assert zygote_client.equipped(SPEC, Path("/s"), known).env == scratch


# -- what is left on disk -----------------------------------------------------------------------
