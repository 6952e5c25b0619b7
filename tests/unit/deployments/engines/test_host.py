"""What an engine's process answers to its control routes, without a socket."""

import asyncio
from typing import Any

import pytest

from deployments.engines.host import EngineHost
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
    said: list[Any] = []

    async def send(message: Any) -> None:
        said.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    scope = {"type": "http", "method": "POST", "path": f"/control/{act}"}
    await host(scope, receive, send)
    return said[0]["status"], said[1]["body"]


@pytest.mark.spec("E4", "E6")
async def test_engine_shrinks_its_slabs_awake_and_asleep_and_not_in_the_midst_of_a_wake() -> None:
    engine = KeepsSlabs()
    host = await host_of(engine)
    assert (await post(host, "shrink_slabs"))[0] == 200
    assert (await post(host, "sleep"))[0] == 200
    assert (await post(host, "shrink_slabs"))[0] == 200 and engine.shrunk == 2
    async with host.turn:
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
