"""How an engine's adapters are pinned, with a vLLM that loads none."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from deployments.adapters.catalogue import CatalogueEntry
from deployments.engines.protocol import Config
from deployments.engines.vllm.adapters.adapter_service import AdapterService
from deployments.engines.vllm.batching.batch_gate import BatchGate
from tests.support.hung_folders import hung_folders


class Llm:
    """Notes what it is asked to drop, and lets others run meanwhile."""

    def __init__(self) -> None:
        self.removed: list[int] = []

    async def remove_lora(self, number: int) -> None:
        self.removed.append(number)
        await asyncio.sleep(0)


def config_of(folder: Path) -> Config:
    """Of an engine with one linear module, and no adapter in its folder."""
    (folder / "model").mkdir()
    save_file(
        {"q_proj.weight": np.zeros((8, 8), np.float32)}, folder / "model" / "model.safetensors"
    )
    given = {"folder": str(folder / "none"), "store": str(folder / "store"), "max_rank": 8}
    return {"model": str(folder / "model"), "served_name": "tiny", "adapters": given}


@pytest.mark.spec("F3")
async def test_stale_pins_are_dropped_once_by_requests_that_find_them_at_once(
    tmp_path: Path,
) -> None:
    service = AdapterService(config_of(tmp_path), BatchGate(4, 32))
    service.llm = llm = Llm()  # type: ignore[assignment]
    for number, digest in enumerate(("a", "b"), start=1):
        service._numbers[digest] = number
        service._pins[digest] = CatalogueEntry(digest, "tiny", tmp_path, 8, 1, pin=True)
    await asyncio.gather(service._unpin_stale(), service._unpin_stale())
    assert sorted(llm.removed) == [1, 2]
    assert service._pins == {} and service.gate.pinned == frozenset()


@pytest.mark.spec("D5")
async def test_adapter_folder_that_hangs_stops_only_those_that_ask_for_its_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = AdapterService(config_of(tmp_path), BatchGate(4, 32))
    with hung_folders(monkeypatch) as server:
        asked = asyncio.ensure_future(service.asked(b'{"model": "tiny:a"}', ""))
        assert await service.asked(b'{"model": "tiny"}', "") is None
        assert not asked.done()
        server.set()
        assert await asked is None
