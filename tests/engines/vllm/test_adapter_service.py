"""How an engine's adapters are pinned, with a vLLM that loads none."""

import asyncio
from pathlib import Path

import pytest

from deployments.adapters.catalogue import CatalogueEntry
from deployments.engines.vllm.adapters import adapter_service
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


@pytest.mark.spec("F3")
async def test_stale_pins_are_dropped_once_by_requests_that_find_them_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_service, "linear_shapes", lambda _: {})
    given = {"folder": str(tmp_path / "none"), "store": str(tmp_path), "max_rank": 8}
    service = AdapterService({"model": "tiny", "adapters": given}, BatchGate(4, 32))
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
    monkeypatch.setattr(adapter_service, "linear_shapes", lambda _: {})
    given = {"folder": str(tmp_path / "none"), "store": str(tmp_path), "max_rank": 8}
    service = AdapterService({"model": "tiny", "adapters": given}, BatchGate(4, 32))
    with hung_folders(monkeypatch) as server:
        asked = asyncio.ensure_future(service.asked(b'{"model": "tiny:a"}', ""))
        assert await service.asked(b'{"model": "tiny"}', "") is None
        assert not asked.done()
        server.set()
        assert await asked is None
