"""Middlewares put around a proxy of Serve that runs: on uvicorn's own server, without Ray."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import uvicorn
from ray.exceptions import ActorDiedError
from ray.serve.config import HTTPOptions
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from arbiter.protocol import ray_internals
from deployments.config.start_variables import VARIABLES
from deployments.front import plain_proxies
from deployments.front.plain_proxies import PlainProxies
from deployments.front.proxy import FrontAway, middlewares


async def serves(scope: Scope, receive: Receive, send: Send) -> None:
    """As Serve's proxy: it says which headers came, one path has failed, and one has no answer."""
    if scope["path"] == "/dies":
        return
    status = 503 if scope["path"] == "/fails" else 200
    names = b" ".join(name for name, _ in scope["headers"])
    await PlainTextResponse(names, status)(scope, receive, send)


class Proxy:
    """An actor of Serve, with the server that it runs."""

    def __init__(self, number: int, fails: Exception | None = None) -> None:
        self._actor_id = number.to_bytes(2, "big")
        self.fails, self.calls = fails, 0
        config = uvicorn.Config(lambda: serves, factory=True, lifespan="off", log_config=None)
        config.load()
        self._start_http_server_task = asyncio.get_running_loop().create_future()
        self._start_http_server_task.set_result((None, uvicorn.Server(config)))
        self.server = self._start_http_server_task.result()[1]
        self.__ray_call__ = self

    async def remote(self, does: Callable[[Any], None]) -> None:
        self.calls += 1
        if self.fails:
            raise self.fails
        does(self)

    async def get(self, path: str = "/", **headers: bytes) -> httpx.Response:
        transport = httpx.ASGITransport(self.server.config.loaded_app)
        named = [(name.replace("_", "-").encode(), value) for name, value in headers.items()]
        async with httpx.AsyncClient(transport=transport, base_url="http://it") as client:
            return await client.get(path, headers=named)


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> list[Proxy]:
    """The proxies that Ray knows."""
    found: list[Proxy] = []
    monkeypatch.setattr(ray_internals, "proxies", lambda: list(found))
    monkeypatch.setattr(ray_internals, "serve_controller", lambda: None)
    return found


class Controller:
    """Serve's, with that part of it that starts proxies."""

    def __init__(self) -> None:
        self.proxy_state_manager, self.__ray_call__, self.calls = self, self, 0
        self._http_options = HTTPOptions(port=7)

    async def remote(self, does: Callable[[Any], None]) -> None:
        self.calls += 1
        does(self)

    def _start_proxy(self, name: str, http_options: HTTPOptions | None = None) -> Any:
        return name, http_options


@pytest.mark.spec("J8", "L3")
async def test_proxy_started_without_middlewares_gets_those_that_answer_for_serve(
    running: list[Proxy],
) -> None:
    running.append(proxy := Proxy(1))
    assert "x-request-id" in (await proxy.get(x_request_id=b"\xff")).text
    assert "retry-after" not in (await proxy.get("/fails")).headers
    await PlainProxies({}).wrap()
    assert "x-request-id" not in (await proxy.get(x_request_id=b"\xff")).text
    assert (await proxy.get("/fails")).headers["retry-after"] == str(int(FrontAway.retry_after_s))


@pytest.mark.spec("J8")
async def test_proxy_started_without_middlewares_says_that_the_front_died(
    running: list[Proxy],
) -> None:
    running.append(proxy := Proxy(1))
    await PlainProxies({}).wrap()
    answer = await proxy.get("/dies")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")


@pytest.mark.spec("J8", "L3")
async def test_each_proxy_is_seen_to_once_by_however_many_fronts(running: list[Proxy]) -> None:
    running.append(first := Proxy(1))
    front, other = PlainProxies({}), PlainProxies({})
    await front.wrap()
    wrapped = first.server.config.loaded_app.app
    await front.wrap()
    await other.wrap()
    assert (first.calls, first.server.config.loaded_app.app) == (2, wrapped)
    running[:] = [second := Proxy(2)]  # Serve has started another in its place
    await front.wrap()
    assert (second.calls, first.calls) == (1, 2)


@pytest.mark.spec("J8")
async def test_controller_starts_later_proxies_with_them(
    running: list[Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = Controller()
    monkeypatch.setattr(ray_internals, "serve_controller", lambda: controller)
    for build in (PlainProxies({}), PlainProxies({})):
        await build.wrap()
        await build.wrap()
    assert controller.calls == 2, "each says it once"
    for given in (None, HTTPOptions(port=7)):
        name, options = controller._start_proxy(name="head", http_options=given)
        assert (name, options.port) == ("head", 7)
        assert [one.cls for one in options.middlewares] == [one.cls for one in middlewares()]
    assert not controller._http_options.middlewares, "its clients, who read them, may not know ours"


async def test_proxies_that_were_started_with_them_are_left_alone(running: list[Proxy]) -> None:
    running.append(proxy := Proxy(1))
    await PlainProxies(VARIABLES).wrap()
    assert proxy.calls == 0


@pytest.mark.spec("L3")
async def test_proxy_that_cannot_be_asked_is_logged_once_and_asked_again(
    running: list[Proxy], caplog: pytest.LogCaptureFixture
) -> None:
    running.append(proxy := Proxy(1, ActorDiedError()))
    proxies = PlainProxies({})
    with caplog.at_level(logging.WARNING, plain_proxies.logger.name):
        await proxies.wrap()
        await proxies.wrap()
    assert proxy.calls == 2 and len(caplog.records) == 1
    proxy.fails = None
    await proxies.wrap()
    assert "x-request-id" not in (await proxy.get(x_request_id=b"\xff")).text
