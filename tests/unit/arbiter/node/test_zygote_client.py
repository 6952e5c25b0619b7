"""What an engine's process is given before it starts."""

from pathlib import Path

import pytest

from arbiter.core import types
from arbiter.node import zygote_client
from arbiter.protocol.messages import SpawnSpec
from arbiter.units import Bytes, DeviceId

SPEC = SpawnSpec("a:b", {})


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
