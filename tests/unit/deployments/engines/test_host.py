"""What an engine's process answers to its control routes, without a socket."""

import asyncio
import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from deployments.engines import host as host_module
from deployments.engines import linux
from deployments.engines.host import EngineHost
from deployments.engines.protocol import ENDINGS, CannotReload
from tests.support.fake_engine import FakeEngine


class KeepsSlabs(FakeEngine):
    """Writes slabs, and can fail over it."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__({})
        self.fails, self.shrunk = fails, 0

    async def shrink_slabs(self) -> None:
        if self.fails:
            raise RuntimeError("the table cannot be read")
        self.shrunk += 1


async def host_of(engine: FakeEngine) -> EngineHost:
    host = EngineHost()
    host.engine = engine
    await host._load()
    return host


async def post(host: EngineHost, act: str) -> tuple[int, bytes]:
    return await asked(host, f"/control/{act}")


async def asked(host: EngineHost, path: str) -> tuple[int, bytes]:
    said: list[Any] = []

    async def send(message: Any) -> None:
        said.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    await host({"type": "http", "method": "POST", "path": path, "headers": []}, receive, send)
    [begun, whole] = said
    return begun["status"], whole["body"]


@pytest.mark.spec("E4", "E6")
async def test_engine_shrinks_its_slabs_awake_and_asleep_and_not_in_the_midst_of_a_wake() -> None:
    engine = KeepsSlabs()
    host = await host_of(engine)
    assert (await post(host, "shrink_slabs"))[0] == 200
    assert (await post(host, "sleep"))[0] == 200
    assert (await post(host, "shrink_slabs"))[0] == 200 and engine.shrunk == 2
    async with host.residency_lock:
        asked = asyncio.ensure_future(post(host, "shrink_slabs"))
        for _ in range(10):
            await asyncio.sleep(0)
        assert engine.shrunk == 2
    assert (await asked)[0] == 200 and engine.shrunk == 3


@pytest.mark.spec("E4")
async def test_shrinking_that_fails_is_told_and_ends_nothing() -> None:
    host = await host_of(KeepsSlabs(fails=True))
    status, said = await post(host, "shrink_slabs")
    assert status == 503 and b"the table cannot be read" in said
    assert not host.failure


@pytest.mark.spec("E4")
async def test_engine_without_slabs_has_nothing_to_shrink() -> None:
    host = await host_of(FakeEngine({}))
    status, said = await post(host, "shrink_slabs")
    assert (status, b"false" in said) == (200, True)


@pytest.mark.spec("J1")
@pytest.mark.parametrize("says_so", [False, True])
async def test_failure_of_an_engines_application_is_an_error_that_clients_can_read(
    says_so: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """As an exception alone, or behind a framework's plain answer; the next request is served."""

    async def fails(scope: Any, receive: Any, send: Any) -> None:
        if says_so:
            plain = [(b"content-type", b"text/plain; charset=utf-8")]
            await send({"type": "http.response.start", "status": 500, "headers": plain})
            await send({"type": "http.response.body", "body": b"Internal Server Error"})
        else:
            raise ZeroDivisionError("of this request")

    host = await host_of(FakeEngine({}))
    assert host.engine is not None
    works = host.engine.app
    host.engine.app = fails
    status, said = await asked(host, "/v1/models")
    error = json.loads(said)["error"]
    assert (status, error["type"], error["code"]) == (500, "server_error", "engine_failed")
    assert says_so or "of this request" in capsys.readouterr().err
    host.engine.app = works
    assert (await asked(host, "/v1/models"))[0] == 200


# A Precompiled normalizer whose table is shorter than it says, on which `tokenizers` panics
PANICS = """{"version": "1.0", "added_tokens": [],
    "normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="},
    "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}"""


class Panics(FakeEngine):
    """Its library is written in Rust, and panics in a load or with a request."""

    def __init__(self, *, loads: bool) -> None:
        super().__init__({})
        self.loads = loads

    async def load(self) -> None:
        if not self.loads:
            Tokenizer.from_str(PANICS)
        await super().load()

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        Tokenizer.from_str(PANICS)


@pytest.mark.spec("A12", "J1")
async def test_panic_of_a_library_in_rust_is_the_cause_of_a_failed_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is no Exception."""
    ended = asyncio.Event()
    monkeypatch.setattr(linux, "end", lambda _: ended.set())
    monkeypatch.setattr(host_module, "UNASKED_S", 0.0)
    host = EngineHost()
    host.engine = Panics(loads=False)
    async with asyncio.timeout(60):
        loading = asyncio.ensure_future(host._load())
        await asyncio.wait({loading})
    assert host.loaded.is_set() and ended.is_set() and loading.exception() is None
    assert host.failure is not None and host.failure.kind == "PanicException"


@pytest.mark.spec("J1")
async def test_panic_with_a_request_is_an_error_that_clients_can_read() -> None:
    host = await host_of(Panics(loads=True))
    status, said = await asked(host, "/v1/models")
    assert (status, json.loads(said)["error"]["code"]) == (500, "engine_failed")


@pytest.mark.parametrize("ending", ENDINGS)
async def test_what_ends_a_task_from_outside_is_no_failure(ending: type[BaseException]) -> None:
    host = EngineHost()
    with pytest.raises(ending), host.catch():
        raise ending
    assert host.failure is None


class LoadsOnce(FakeEngine):
    """Its answers change for good when it sleeps, and it does not load again."""

    async def load(self) -> None:
        if self.wakes:
            raise CannotReload("its tables lie in no file")
        await super().load()


@pytest.mark.spec("D6")
@pytest.mark.parametrize(
    ("engine", "is_restored"),
    [
        (FakeEngine({"engine_args": {"forget": True}}), True),
        (FakeEngine({"engine_args": {"forget": "for good"}}), False),
        (LoadsOnce({"engine_args": {"forget": True}}), False),
    ],
)
async def test_engine_whose_answers_changed_while_it_slept_serves_only_once_they_are_back(
    engine: FakeEngine, is_restored: bool
) -> None:
    host = await host_of(engine)
    assert (await post(host, "sleep"))[0] == 200
    status, said = await post(host, "wake")
    assert status == 200 and json.loads(said).items() >= {"verified": False}.items()
    assert json.loads(said)["restored"] is is_restored
    assert (await asked(host, "/v1/chat/completions"))[0] == (200 if is_restored else 503)
