"""A replica fetches an adapter behind a URL where its engine needs it."""

import json
import shutil
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from deployments.adapters.store import CheckedAdapters, Store, catalogue_of
from deployments.replica.adapted_capability import AdapterFetcher
from tests.support.adapters import write
from tests.support.fetching import RULES, SHAPES

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


@pytest.mark.spec("F2")
async def test_adapter_whose_fetched_folder_has_left_is_served_from_its_checked_copy(
    tmp_path: Path,
) -> None:
    system, config = fsspec.filesystem("memory"), config_of(tmp_path)
    system.put(str(write(tmp_path / "good", SHAPES)), "/replica/law", recursive=True)
    fetcher = AdapterFetcher(config)
    await fetcher.bring("chat:law", "")
    entry = catalogue_of(config).find("chat:law")
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
