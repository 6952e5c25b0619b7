"""What an engine's process is given before it starts, and what asking for one waits for."""

import asyncio
from pathlib import Path

import pytest

from arbiter.core import types
from arbiter.node import zygote_client
from arbiter.protocol.messages import SpawnSpec
from arbiter.units import Bytes, DeviceId, TicketId
from tests.support.hung_zygote import HungZygote

SPEC = SpawnSpec("a:b", {})
T, WITHIN_S = TicketId("t"), 60


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


@pytest.mark.spec("A19")
async def test_ping_behind_a_spawn_without_an_answer_is_missed_and_leaves_the_spawn_alone(
    folder: Path,
) -> None:
    async with HungZygote(folder) as hung, asyncio.timeout(WITHIN_S):
        zygote = zygote_client.Zygote(hung.path)
        spawning = asyncio.ensure_future(zygote.spawn(T, SPEC, folder / "t.sock"))
        await hung.asked.wait()
        with pytest.raises(zygote_client.ZygoteError, match="ping: TimeoutError") as missed:
            await zygote.ping(0.01)
        assert missed.value.is_away and not spawning.done()
        hung.answer(pid=7)
        assert await spawning == 7
        zygote.close()


@pytest.mark.spec("A19")
async def test_spawn_is_a_fork_away_and_given_up_as_soon_as_a_ping(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygote_client, "ANSWER_S", 0.01)
    async with HungZygote(folder) as hung, asyncio.timeout(WITHIN_S):
        zygote = zygote_client.Zygote(hung.path)
        with pytest.raises(zygote_client.ZygoteError, match="spawn: TimeoutError"):
            await zygote.spawn(T, SPEC, folder / "t.sock")
