"""A replica fetches an adapter behind a URL where its engine needs it."""

import asyncio
import errno
import json
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from deployments.adapters.fetch import FetchFailed
from deployments.adapters.safe_files import AdaptersAway
from deployments.adapters.store import CheckedAdapters, EngineCatalogue, Store
from deployments.replica import adapted_capability
from deployments.replica.adapted_capability import AdaptedCapability, AdapterFetcher
from deployments.routing.rank import AdapterSlots
from tests.support.adapters import write
from tests.support.fetching import RULES, SHAPES
from tests.support.hung_folders import failing_folder, hung_folders

URL = "memory://replica/law/"


def config_of(tmp_path: Path) -> dict[str, Any]:
    """Of the engine of a model with one adapter behind a URL."""
    base, folder = tmp_path / "base", tmp_path / "adapters"
    base.mkdir()
    weights = {f"{name}.weight": np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    save_file(weights, base / "model.safetensors")
    folder.mkdir()
    (folder / "remote.json").write_text(json.dumps({"law": URL}))
    adapters = {
        "folder": str(folder),
        "store": str(tmp_path / "store"),
        "max_rank": RULES.max_rank,
        "urls": [URL],
    }
    return {"model": str(base), "served_name": "chat", "adapters": adapters}


class OfNoCluster(AdaptedCapability):
    def __init__(self) -> None: ...
    def __del__(self) -> None: ...  # type: ignore[override]  # Serve awaits the other one


def of_no_cluster() -> AdaptedCapability:
    capability = OfNoCluster()
    capability._fetchers, capability._merging = {}, {}
    capability.adapter_slots = AdapterSlots()
    return capability


def asking(config: dict[str, Any]) -> tuple[Any, Any]:
    """A call for an adapter, and its use of a model of that configuration."""
    config["adapters"]["slots"] = 2
    call = SimpleNamespace(model="chat", served="chat:law", tenant="")
    return call, SimpleNamespace(ticket="t", config=config)


@pytest.mark.spec("F2")
async def test_model_files_that_say_what_to_fetch_and_cannot_be_read_are_a_typed_failure(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path)
    (tmp_path / "base" / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(FetchFailed, match="chat:law"):
        await of_no_cluster().prepare(*asking(config))


@pytest.mark.spec("F2", "L3")
async def test_adapter_folder_that_cannot_be_read_is_the_error_that_the_front_has_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)
    failing_folder(monkeypatch, tmp_path / "adapters", errno.ESTALE)
    with pytest.raises(AdaptersAway, match=f"chat:law.*{os.strerror(errno.ESTALE)}"):
        await of_no_cluster().prepare(*asking(config))


@pytest.mark.spec("F2")
async def test_adapter_whose_fetched_folder_has_left_is_served_from_its_checked_copy(
    tmp_path: Path,
) -> None:
    system, config = fsspec.filesystem("memory"), config_of(tmp_path)
    system.put(str(write(tmp_path / "good", SHAPES)), "/replica/law", recursive=True)
    fetcher = AdapterFetcher(config)
    await fetcher.bring("chat:law", "")
    entry = await EngineCatalogue(config).find("chat:law", "")
    assert entry is not None and entry.path.is_dir()
    store = Store(tmp_path / "store")
    published = await CheckedAdapters(store, RULES).take(entry)
    shutil.rmtree(entry.path)
    system.rm("/replica", recursive=True)
    await fetcher.bring("chat:law", "")
    assert not entry.path.exists(), "its source is away, and was not asked"
    assert await CheckedAdapters(store, RULES).take(entry) == published

    system.put(str(tmp_path / "good"), "/replica/law", recursive=True)
    shutil.rmtree(published.path)
    await fetcher.bring("chat:law", "")
    assert entry.path.is_dir()
    system.rm("/replica", recursive=True)


@pytest.mark.spec("D5")
async def test_adapter_folder_that_hangs_keeps_only_the_call_that_names_its_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetcher = AdapterFetcher(config_of(tmp_path))
    with hung_folders(monkeypatch) as server:
        call = asyncio.ensure_future(fetcher.bring("chat:none", ""))
        await asyncio.sleep(0)
        assert not call.done()
        server.set()
        await call


@pytest.mark.spec("D5")
async def test_calls_that_come_at_once_share_one_fetcher_whose_model_files_are_read_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)
    loop, made = threading.get_ident(), list[AdapterFetcher]()

    class Noted(AdapterFetcher):
        def __init__(self, config: dict[str, Any]) -> None:
            assert threading.get_ident() != loop
            super().__init__(config)

        async def bring(self, name: str, tenant: str) -> None:
            made.append(self)

    monkeypatch.setattr(adapted_capability, "AdapterFetcher", Noted)
    capability, (call, use) = of_no_cluster(), asking(config)
    await asyncio.gather(capability.prepare(call, use), capability.prepare(call, use))
    assert len(made) == 2 and made[0] is made[1]
