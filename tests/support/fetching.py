"""Adapters behind URLs for tests of fetching: a small one, its rules, and what is left of it."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from deployments.adapters.catalogue import Catalogue, CatalogueEntry
from deployments.adapters.fetch import Fetcher, FetchFailed
from deployments.adapters.validate import Rules

SHAPES = {"model.layers.0.self_attn.q_proj": (16, 8)}
RULES = Rules(SHAPES, max_rank=8)


def catalogue(tmp_path: Path, rows: dict[str, Any], urls: tuple[str, ...]) -> Catalogue:
    """Of a model `chat` whose manifest has these rows."""
    folder = tmp_path / "adapters"
    folder.mkdir(exist_ok=True)
    (folder / "remote.json").write_text(json.dumps(rows))
    return Catalogue({"chat": folder}, urls={"chat": urls}, fetched=tmp_path / "fetched")


def found(tmp_path: Path, url: str, urls: tuple[str, ...]) -> CatalogueEntry:
    entry = catalogue(tmp_path, {"law": url}, urls).find("law")
    assert entry is not None
    return entry


async def refusal(tmp_path: Path, entry: CatalogueEntry) -> FetchFailed:
    """Why it was not fetched; nothing is left of the try."""
    with pytest.raises(FetchFailed) as refused:
        await fetcher(tmp_path).bring(entry)
    assert left_in(tmp_path / "fetched") == []
    assert (refused.value.status_code, refused.value.code) == (502, "adapter_not_fetched")
    assert "\n" not in str(refused.value)
    return refused.value


def fetcher(tmp_path: Path) -> Fetcher:
    return Fetcher(tmp_path / "fetched", RULES.bounds)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def left_in(folder: Path) -> list[str]:
    """Beside the lock."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def no_fetch() -> bool:
    """No thread fetches, nor waits for a server that hangs."""
    return not [t for t in threading.enumerate() if t.name.startswith("adapter-fetch")]
