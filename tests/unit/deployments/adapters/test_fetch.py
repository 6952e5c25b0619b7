"""Adapters behind URLs: from where one may come, and that it comes whole or not at all."""

import asyncio
import gzip
import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest

from deployments.adapters import fetch
from deployments.adapters.catalogue import Catalogue, CatalogueEntry
from deployments.adapters.fetch import Fetcher, FetchFailed
from deployments.adapters.safe_files import AdapterInvalid
from deployments.adapters.store import CheckedAdapters, Store
from deployments.config import checked_sockets
from deployments.config.url_allowlist import is_allowed
from tests.support import fetching
from tests.support.adapters import write
from tests.support.fetching import RULES, SHAPES, left_in
from tests.support.waits import eventually

PREFIXES = ("memory://ours/", "https://models.example.com/loras/", "http://127.0.0.1")


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Any]:
    """A good adapter at memory://ours/law/."""
    system = fsspec.filesystem("memory")
    good = write(tmp_path / "good", SHAPES)
    system.put(str(good), "/ours/law", recursive=True)
    yield system
    system.rm("/ours", recursive=True)


def catalogue(tmp_path: Path, rows: dict[str, Any]) -> Catalogue:
    return fetching.catalogue(tmp_path, rows, PREFIXES)


def found(tmp_path: Path, url: str, urls: tuple[str, ...] = PREFIXES) -> CatalogueEntry:
    return fetching.found(tmp_path, url, urls)


@pytest.mark.spec("F2")
async def test_fetched_adapter_is_copied_and_checked_as_a_folder_is(
    tmp_path: Path, memory: Any
) -> None:
    row = {"url": "memory://ours/law/", "priority": "high", "pin": True}
    entry = catalogue(tmp_path, {"law": row}).find("chat:law")
    assert entry is not None
    assert (entry.priority, entry.pin, entry.full_name) == ("high", True, "chat:law")
    fetcher = Fetcher(tmp_path / "fetched", RULES.bounds)
    await asyncio.gather(*(fetcher.bring(entry) for _ in range(8)))
    checked = CheckedAdapters(Store(tmp_path / "store"), RULES)
    published = await checked.take(entry)
    assert (published.path / "adapter_config.json").is_file()
    memory.put(str(tmp_path / "good"), "/ours/bad", recursive=True)
    memory.pipe("/ours/bad/adapter_config.json", b"{}")
    bad = found(tmp_path, "memory://ours/bad/")
    await fetcher.bring(bad)
    with pytest.raises(AdapterInvalid, match="peft_type"):
        await checked.take(bad)


@pytest.mark.spec("F2")
async def test_concurrent_requests_for_a_new_adapter_fetch_it_once(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[str] = []
    copy = Fetcher._copy

    def counted(self: Fetcher, url: str, scratch: Path, until_s: float) -> int:
        copies.append(url)
        return copy(self, url, scratch, until_s)

    monkeypatch.setattr(Fetcher, "_copy", counted)
    fetcher = Fetcher(tmp_path / "fetched", RULES.bounds)
    entry = found(tmp_path, "memory://ours/law/")
    await asyncio.gather(*(fetcher.bring(entry) for _ in range(8)))
    assert copies == ["memory://ours/law/"]


@pytest.mark.spec("F2")
async def test_fetch_goes_on_for_the_next_asker_where_the_first_leaves(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_go = threading.Event(), threading.Event()
    copy = Fetcher._copy

    def held(self: Fetcher, url: str, scratch: Path, until_s: float) -> int:
        assert not begun.is_set(), "a second fetch"
        begun.set()
        assert may_go.wait(60)
        return copy(self, url, scratch, until_s)

    monkeypatch.setattr(Fetcher, "_copy", held)
    fetcher = Fetcher(tmp_path / "fetched", RULES.bounds)
    entry = found(tmp_path, "memory://ours/law/")
    first = asyncio.create_task(fetcher.bring(entry))
    await eventually(begun.is_set)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    next_one = asyncio.create_task(fetcher.bring(entry))
    await asyncio.sleep(0)
    may_go.set()
    await next_one
    assert entry.path.is_dir()


@pytest.mark.spec("F2")
async def test_fetched_adapter_that_is_used_stays_and_the_longest_unused_leaves(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = tmp_path / "good"
    size_bytes = sum(file.stat().st_size for file in good.iterdir())
    monkeypatch.setattr(fetch, "MAX_FETCHED_BYTES", 2 * size_bytes)
    rows = {name: f"memory://ours/{name}/" for name in "abc"}
    for name in rows:
        memory.put(str(good), f"/ours/{name}", recursive=True)
    names, fetcher = catalogue(tmp_path, rows), Fetcher(tmp_path / "fetched", RULES.bounds)
    entries = {name: names.find(f"chat:{name}") for name in rows}
    for number, name in enumerate("ab", 1):
        entry = entries[name]
        assert entry is not None
        await fetcher.bring(entry)
        os.utime(entry.path, ns=(number, number))  # long ago
    for name in "ac":
        entry = entries[name]
        assert entry is not None
        await fetcher.bring(entry)
    there = [name for name, entry in entries.items() if entry and entry.path.is_dir()]
    assert there == ["a", "c"]


class Odd(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """Fails as only its own library does."""

    class Broke(Exception):
        """Derived from nothing that anybody else knows."""

    def open(self, *_: object, **__: object) -> None:
        raise Odd.Broke("its door is shut")


@pytest.mark.spec("F2")
async def test_failure_of_any_file_system_is_that_of_a_fetch(tmp_path: Path) -> None:
    fsspec.register_implementation("odd", Odd, clobber=True)
    entry = found(tmp_path, "odd://ours/law/", ("odd://ours/",))
    with pytest.raises(FetchFailed, match="Broke: its door is shut"):
        await Fetcher(tmp_path / "fetched", RULES.bounds).bring(entry)
    assert left_in(tmp_path / "fetched") == []


@pytest.mark.spec("F2")
async def test_what_a_killed_replica_was_fetching_is_removed_and_what_is_fetched_now_stays(
    tmp_path: Path, memory: Any
) -> None:
    folder = tmp_path / "fetched"
    for name, age_s in (("killed", 3 * fetch.FETCH_S), ("another", 0.0)):
        path = folder / f".fetching-{name}"
        path.mkdir(parents=True)
        (path / "adapter_config.json").write_text("{")
        os.utime(path, (time.time() - age_s,) * 2)
    entry = found(tmp_path, "memory://ours/law/")
    await Fetcher(folder, RULES.bounds).bring(entry)
    assert left_in(folder) == sorted([".fetching-another", entry.path.name])


@pytest.mark.spec("F2", "L2")
async def test_missing_or_too_large_adapter_is_not_fetched_and_leaves_nothing(
    tmp_path: Path, memory: Any
) -> None:
    fetcher = Fetcher(tmp_path / "fetched", RULES.bounds | {"adapter_model.safetensors": 100})
    with pytest.raises(FetchFailed, match="larger than 100"):
        await fetcher.bring(found(tmp_path, "memory://ours/law/"))
    with pytest.raises(FetchFailed, match=r"FileNotFound.*remote\.json"):
        await fetcher.bring(found(tmp_path, "memory://ours/none/"))
    assert left_in(tmp_path / "fetched") == []


@pytest.mark.spec("F2")
async def test_a_file_system_that_is_not_installed_is_named(tmp_path: Path) -> None:
    entry = found(tmp_path, "gdrive://ours/law/", ("gdrive://ours/",))
    with pytest.raises(FetchFailed, match="ImportError"):
        await Fetcher(tmp_path / "fetched", RULES.bounds).bring(entry)


@pytest.mark.spec("F2", "L2")
@pytest.mark.parametrize("url", ["hf://our-org/law/", "hf://our-org/law@3f2a9c1d/loras/v3/"])
def test_a_url_may_name_a_revision(url: str) -> None:
    assert is_allowed(url, ("hf://our-org/",))
    assert not is_allowed(url, ("hf://our-org/law@3f2a9c1/",))


@pytest.mark.spec("L2")
@pytest.mark.parametrize(
    "url",
    [
        "memory://ours-too/law/",
        "memory://ours/../theirs/",
        "memory://ours/./law/",
        "memory://ours/%2e%2e/theirs/",
        "memory://ours/law?x=1",
        "memory://ours/a::file:///etc/",
        "simplecache::memory://ours/law/",
        "file:///etc/",
        "https://models.example.com@127.0.0.1/loras/",
        "https://models.example.com/loras/\n",
        "MEMORY://ours/law/",
        "",
    ],
)
def test_a_url_outside_the_allow_list_is_refused_before_anything_is_opened(
    tmp_path: Path, url: str
) -> None:
    assert not is_allowed(url, PREFIXES)
    if url:
        with pytest.raises(AdapterInvalid, match=r"adapters\.urls"):
            found(tmp_path, url)


class Site(BaseHTTPRequestHandler):
    """Has an adapter, the same with its files packed, a page that sends one somewhere else, and
    while it is `down` a page in place of each of the files named there."""

    folder: Path
    down: tuple[str, ...]
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path.startswith("/away/"):
            self.send_response(302)
            self.send_header("location", self.path.replace("/away/", "/law/"))
            self.end_headers()
            return
        name = self.path.rpartition("/")[2]
        data = b"<html>Back soon</html>" if name in self.down else (self.folder / name).read_bytes()
        self.send_response(200)
        if self.path.startswith("/packed/"):
            data = gzip.compress(data)
            self.send_header("content-encoding", "gzip")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ThreadingHTTPServer]:
    Site.folder, Site.asked, Site.down = write(tmp_path / "site", SHAPES), [], ()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.spec("L2", "F2")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433"])
async def test_a_private_address_is_not_connected_to_however_it_is_written(
    tmp_path: Path, site: ThreadingHTTPServer, host: str
) -> None:
    url = f"http://{host}:{site.server_port}/law/"
    entry = found(tmp_path, url, (f"http://{host}:{site.server_port}/",))
    with pytest.raises(FetchFailed):
        await Fetcher(tmp_path / "fetched", RULES.bounds).bring(entry)
    assert Site.asked == []


@pytest.mark.spec("L2", "F2")
async def test_a_public_site_is_read_and_not_followed_elsewhere(
    tmp_path: Path, site: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked_sockets, "is_public", lambda address: True)
    root = f"http://127.0.0.1:{site.server_port}"
    fetcher, checked = (
        Fetcher(tmp_path / "fetched", RULES.bounds),
        CheckedAdapters(Store(tmp_path / "s"), RULES),
    )
    entry = found(tmp_path, f"{root}/law/", (f"{root}/law/",))
    await fetcher.bring(entry)
    assert (await checked.take(entry)).size_bytes > 0
    away = found(tmp_path, f"{root}/away/", (f"{root}/away/",))
    Site.asked.clear()
    with pytest.raises(FetchFailed, match=r"302.*no redirect is followed"):
        await fetcher.bring(away)
    assert not away.path.exists(), "a later request asks again"
    assert Site.asked and all(path.startswith("/away/") for path in Site.asked)


@pytest.mark.spec("L2", "F2")
async def test_packed_files_of_a_site_are_not_unpacked_and_are_no_adapter(
    tmp_path: Path, site: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked_sockets, "is_public", lambda address: True)
    root = f"http://127.0.0.1:{site.server_port}/packed/"
    entry = found(tmp_path, root, (root,))
    refused = await fetching.refusal(tmp_path, entry)
    assert "adapter_config.json is not JSON" in str(refused)
    assert len(Site.asked) == len(RULES.bounds)


@pytest.mark.spec("F2")
@pytest.mark.parametrize("down", RULES.bounds)
async def test_page_in_place_of_a_file_is_not_kept_and_the_next_request_asks_again(
    tmp_path: Path, site: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch, down: str
) -> None:
    monkeypatch.setattr(checked_sockets, "is_public", lambda address: True)
    root = f"http://127.0.0.1:{site.server_port}/law/"
    entry = found(tmp_path, root, (root,))
    Site.down = (down,)
    refused = await fetching.refusal(tmp_path, entry)
    assert down in str(refused) and str(tmp_path) not in str(refused)
    assert refused.retry_after_s
    Site.down = ()
    await fetching.fetcher(tmp_path).bring(entry)
    assert (await CheckedAdapters(Store(tmp_path / "s"), RULES).take(entry)).size_bytes > 0


@pytest.mark.spec("F2")
def test_a_bad_manifest_says_so_and_hides_no_folder(tmp_path: Path) -> None:
    made = catalogue(tmp_path, {})
    write(tmp_path / "adapters" / "own", SHAPES)
    (tmp_path / "adapters" / "remote.json").write_text("{")
    assert made.find("own") is not None
    assert made.names() == ["chat:own"]
    with pytest.raises(AdapterInvalid, match=r"remote\.json"):
        made.find("chat:law")


@pytest.mark.spec("F2")
def test_a_tenants_manifest_is_its_own(tmp_path: Path) -> None:
    made = catalogue(tmp_path, {"law": "memory://ours/law/"})
    own = tmp_path / "adapters" / "@acme"
    own.mkdir()
    (own / "remote.json").write_text(json.dumps({"law": "memory://ours/acme/"}))
    common, theirs = made.find("law"), made.find("law", "acme")
    assert common is not None and theirs is not None
    assert (common.url, theirs.url) == ("memory://ours/law/", "memory://ours/acme/")
