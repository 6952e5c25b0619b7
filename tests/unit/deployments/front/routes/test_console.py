"""The console's files: what is in them, and how they are sent."""

import hashlib
import json
import re

import pytest
from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient

from deployments.front.routes import console
from tools import vendor

FOLDER = console.FOLDER
MOST_BYTES = 100_000
IMPORT = re.compile(r"""(?:from|import)\s*["']([^"']+)["']""")
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture
def client() -> AsyncClient:
    app = FastAPI()
    app.include_router(console.router)
    return AsyncClient(transport=ASGITransport(app), base_url="http://localhost")


@pytest.mark.spec("K4")
def test_the_console_is_small() -> None:
    assert 60_000 < sum(len(file.content) for file in console.files().values()) < MOST_BYTES


@pytest.mark.spec("K4")
def test_what_it_carries_is_what_npm_has() -> None:
    lock = json.loads(vendor.LOCK.read_text())
    for package in vendor.PACKAGES:
        row = lock[package.name]
        assert row["version"] == package.version
        assert row["integrity"].startswith("sha512-")
        assert row["files"].keys() == package.files.keys()
        for name, file in row["files"].items():
            original = (vendor.FOLDER / name).read_bytes()
            assert hashlib.sha256(original).hexdigest() == file["sha256"], name
        assert any(name.endswith("LICENSE") for name in row["files"])


@pytest.mark.spec("K4")
def test_scripts_import_only_files_of_the_console() -> None:
    scripts = [path for path in FOLDER.rglob("*") if path.suffix in (".js", ".mjs")]
    imports = [(path, name) for path in scripts for name in IMPORT.findall(path.read_text())]
    assert len(imports) > 8
    for path, name in imports:
        assert name.startswith("."), f"{path.name} imports {name}, which no browser finds"
        assert (path.parent / name).is_file()


@pytest.mark.spec("K4")
async def test_a_browser_gets_the_page_and_ollamas_clients_their_line(client: AsyncClient) -> None:
    page = await client.get("/", headers=BROWSER)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "unsafe" not in page.headers["content-security-policy"]
    assert (await client.get("/")).text == "Ollama is running"


@pytest.mark.spec("K4", "L2")
async def test_only_the_files_of_the_console_are_sent(client: AsyncClient) -> None:
    script = await client.get("/console/app.js")
    assert script.headers["content-type"].startswith("text/javascript")
    again = await client.get("/console/app.js", headers={"if-none-match": script.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    with pytest.raises(console.BadRequest, match="no file of the console"):
        await client.get("/console/..%2f..%2fkeys.py")
    with pytest.raises(console.BadRequest):
        await client.get("/console/vendor/vendor.json")
