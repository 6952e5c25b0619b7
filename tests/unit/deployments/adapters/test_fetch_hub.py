"""Adapters of a hub, by the file system of huggingface_hub against a hub on this machine."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import fsspec.config
import pytest

from deployments.adapters import fetch
from deployments.adapters.catalogue import CatalogueEntry
from deployments.adapters.fetch import FETCHES
from deployments.adapters.store import CheckedAdapters, Store
from tests.support import fetching
from tests.support.adapters import write
from tests.support.fetching import RULES, SHAPES, contents, fetcher, left_in, no_fetch
from tests.support.hub_server import PINNED, TOKEN, Hub, hub_server
from tests.support.waits import eventually

pytestmark = pytest.mark.spec("F2")
LAW = "our-org/law"
OFFLINE = "huggingface_hub.constants.HF_HUB_OFFLINE"  # as it was when the library was imported


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Has one model with an older revision. The replica may go online, and has the token."""
    models = {
        (LAW, "main"): write(tmp_path / "main", SHAPES, rank=8),
        (LAW, PINNED): write(tmp_path / "pinned", SHAPES, rank=4),
    }
    monkeypatch.setattr(OFFLINE, False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with hub_server(models) as running:
        monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": running.url})
        yield running


def found(tmp_path: Path, path: str = LAW) -> CatalogueEntry:
    return fetching.found(tmp_path, f"hf://{path}/", ("hf://our-org/",))


async def refusal(tmp_path: Path, entry: CatalogueEntry) -> str:
    return str(await fetching.refusal(tmp_path, entry))


async def test_adapter_of_a_hub_is_fetched_and_its_token_goes_nowhere_else(
    tmp_path: Path, hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    hub.is_private = True
    entry = found(tmp_path)
    with caplog.at_level(logging.DEBUG):
        await fetcher(tmp_path).bring(entry)
    assert contents(entry.path) == contents(tmp_path / "main")
    assert (await CheckedAdapters(Store(tmp_path / "store"), RULES).take(entry)).size_bytes > 0
    assert {token for _, token in hub.asked} == {TOKEN}
    assert hub.elsewhere == [""], "the store of large files gets no token"
    assert TOKEN not in caplog.text


async def test_revision_that_a_url_names_is_fetched(tmp_path: Path, hub: Hub) -> None:
    entry = found(tmp_path, f"{LAW}@{PINNED}")
    await fetcher(tmp_path).bring(entry)
    assert contents(entry.path) == contents(tmp_path / "pinned")
    assert contents(entry.path) != contents(tmp_path / "main")


async def test_missing_model_revision_or_file_is_told_and_found_once_it_is_there(
    tmp_path: Path, hub: Hub
) -> None:
    late = found(tmp_path, "our-org/late")
    for missing in (late, found(tmp_path, f"{LAW}@gone"), found(tmp_path, f"{LAW}/no-folder")):
        assert "upload the adapter's files" in await refusal(tmp_path, missing)
    hub.models["our-org/late", "main"] = tmp_path / "main"
    await fetcher(tmp_path).bring(late)
    assert contents(late.path) == contents(tmp_path / "main")


async def test_wrong_token_is_told_and_not_shown(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    said = await refusal(tmp_path, found(tmp_path))
    assert "401" in said and "HF_TOKEN" in said and "hf_another" not in said


async def test_replica_that_may_not_go_online_says_how_it_may(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OFFLINE, True)
    assert "HF_HUB_OFFLINE=0" in await refusal(tmp_path, found(tmp_path))
    assert not hub.asked


async def test_stopped_hub_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OFFLINE, False)
    with hub_server({}) as stopped:
        monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": stopped.url})
    said = await refusal(tmp_path, found(tmp_path))
    assert "ConnectError" in said and "whether its server is up" in said


async def test_too_large_file_is_not_kept(tmp_path: Path, hub: Hub) -> None:
    (tmp_path / "main" / "adapter_config.json").write_bytes(b" " * (20 << 20))
    said = await refusal(tmp_path, found(tmp_path))
    assert f"larger than {RULES.bounds['adapter_config.json']} bytes" in said


async def test_hub_that_hangs_is_left_and_keeps_no_other_fetch_away(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the listing, for which its library waits for ever."""
    hub.hangs_at = "/tree/"
    names = [f"our-org/law-{number}" for number in range(FETCHES)]
    hub.models |= {(name, "main"): tmp_path / "main" for name in names}
    one = fetcher(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(fetch, "FETCH_S", 2.0)
        brings = (one.bring(found(tmp_path, name)) for name in names)
        refused = await asyncio.gather(*brings, return_exceptions=True)
    assert all("not read within 2 s" in str(error) for error in refused)
    assert left_in(tmp_path / "fetched") == []
    hub.hangs_at = "none"
    entry = found(tmp_path)
    await one.bring(entry)
    assert contents(entry.path) == contents(tmp_path / "main")
    hub.may_end.set()
    await eventually(no_fetch)
    assert left_in(tmp_path / "fetched") == [entry.path.name]
