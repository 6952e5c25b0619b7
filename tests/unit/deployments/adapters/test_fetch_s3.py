"""Adapters in a bucket, by s3fs against moto's server."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from deployments.adapters import fetch
from deployments.adapters.catalogue import CatalogueEntry
from deployments.adapters.store import CheckedAdapters, Store
from tests.support import fetching
from tests.support.adapters import write
from tests.support.fetching import RULES, SHAPES, contents, fetcher, left_in, no_fetch
from tests.support.ports import free_port
from tests.support.s3_server import ANYONE, BUCKET, S3Server, s3_server, variables
from tests.support.waits import eventually

pytestmark = pytest.mark.spec("F2")
PREFIXES = (f"s3://{BUCKET}/", "s3://no-such-bucket/")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    folder = tmp_path_factory.mktemp("s3")
    with s3_server(folder / "moto.log") as server:
        server.upload(write(folder / "law", SHAPES), "law-v3")
        yield server


@pytest.fixture
def server(running: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The environment says where it is and as whom to ask."""
    ask_as(monkeypatch, running.port)
    return running


def ask_as(monkeypatch: pytest.MonkeyPatch, port: int, *credentials: str) -> None:
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    more = (credentials[0], credentials[1]) if credentials else ANYONE
    for name, value in variables(port, more).items():
        monkeypatch.setenv(name, value)


def found(tmp_path: Path, name: str, bucket: str = BUCKET) -> CatalogueEntry:
    return fetching.found(tmp_path, f"s3://{bucket}/{name}/", PREFIXES)


async def refusal(tmp_path: Path, entry: CatalogueEntry) -> str:
    return str(await fetching.refusal(tmp_path, entry))


async def test_adapter_of_a_bucket_is_fetched_as_it_was_uploaded(
    tmp_path: Path, server: S3Server
) -> None:
    entry = found(tmp_path, "law-v3")
    await fetcher(tmp_path).bring(entry)
    assert contents(entry.path) == contents(write(tmp_path / "same", SHAPES))
    checked = CheckedAdapters(Store(tmp_path / "store"), RULES)
    assert (await checked.take(entry)).size_bytes > 0


async def test_missing_key_or_bucket_is_told_and_found_once_it_is_there(
    tmp_path: Path, server: S3Server
) -> None:
    absent = found(tmp_path, "law-v3", "no-such-bucket")
    assert "upload the adapter's files" in await refusal(tmp_path, absent)
    late = found(tmp_path, "late")
    assert "adapter_config.json" in await refusal(tmp_path, late)
    server.upload(write(tmp_path / "late", SHAPES), "late")
    await fetcher(tmp_path).bring(late)
    assert contents(late.path) == contents(tmp_path / "late")


async def test_wrong_credentials_are_told_without_the_secret_and_good_ones_are_believed(
    tmp_path: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = found(tmp_path, "law-v3")
    with server.checked() as (key, secret):
        for wrong in ((key, "not-the-secret"), ("not-the-key", secret)):
            ask_as(monkeypatch, server.port, *wrong)
            said = await refusal(tmp_path, entry)
            assert "PermissionError" in said and "check the credentials" in said
            assert not any(word in said for word in (secret, *wrong))
        ask_as(monkeypatch, server.port, key, secret)
        await fetcher(tmp_path).bring(entry)
    assert entry.path.is_dir()


async def test_absence_of_credentials_is_told(
    tmp_path: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    said = await refusal(tmp_path, found(tmp_path, "law-v3"))
    assert "NoCredentialsError" in said and "set the credentials" in said


async def test_stopped_server_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask_as(monkeypatch, free_port())
    said = await refusal(tmp_path, found(tmp_path, "law-v3"))
    assert "EndpointConnectionError" in said and "whether its server is up" in said


async def test_too_large_object_is_not_kept(tmp_path: Path, server: S3Server) -> None:
    server.client().pipe_file(f"{BUCKET}/large/adapter_config.json", b" " * (20 << 20))
    said = await refusal(tmp_path, found(tmp_path, "large"))
    assert f"larger than {RULES.bounds['adapter_config.json']} bytes" in said


async def test_hung_server_is_left_and_asked_again_once_it_answers(
    tmp_path: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = found(tmp_path, "law-v3")
    with server.hung(), monkeypatch.context() as patched:
        patched.setattr(fetch, "FETCH_S", 2.0)
        said = await refusal(tmp_path, entry)
        assert f"{entry.url} was not read within 2 s" in said and "is up" in said
    await eventually(no_fetch)
    assert left_in(tmp_path / "fetched") == []
    await fetcher(tmp_path).bring(entry)
    assert entry.path.is_dir()


class Slow(BaseHTTPRequestHandler):
    """Each object has a megabyte, of which a byte comes now and then."""

    enough: threading.Event

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("content-length", str(1 << 20))
        self.send_header("etag", '"0"')
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        while not self.enough.wait(0.02):
            self.wfile.write(b" ")

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def slow() -> Iterator[int]:
    Slow.enough = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server.server_port
    Slow.enough.set()
    server.shutdown()
    server.server_close()
    thread.join()


async def test_object_that_comes_too_slowly_is_left(
    tmp_path: Path, slow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_as(monkeypatch, slow)
    monkeypatch.setattr(fetch, "FETCH_S", 2.0)
    assert "was not read within 2 s" in await refusal(tmp_path, found(tmp_path, "law-v3"))
    Slow.enough.set()
    await eventually(no_fetch)
    assert left_in(tmp_path / "fetched") == []
