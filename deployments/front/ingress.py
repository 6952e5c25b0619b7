"""The front's Serve deployment: it takes the table from `user_config` and runs the application."""

import asyncio
import importlib
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI
from ray import serve

from deployments.config.schema import parse_table
from deployments.front import application, by_handle
from deployments.front.access.auth import Authenticator
from deployments.front.access.keys import Keyring, ensure_first, keys_path
from deployments.front.dependencies import FrontState
from deployments.front.plain_proxies import PlainProxies
from deployments.front.sockets.front_socket import FrontSocket
from deployments.front.status import arbiter_gateway
from deployments.messages import ResponseHead


@serve.deployment(
    name="front",
    num_replicas=1,
    # more than `front.in_flight` allows, with readers and viewers, so that the front itself can
    # refuse what exceeds its bounds
    max_ongoing_requests=1_600,
    max_queued_requests=1_000,  # in the proxy, which then answers 503 by itself
    backpressure_config={"retry_after_s": 1.0},  # a short response takes about this long
    ray_actor_options={"num_cpus": 0},
    graceful_shutdown_timeout_s=600,  # above the longest generation, or clients see broken streams
)
@serve.ingress()
class Front:
    """The deployment of the HTTP API. Its only state is the table, which `reconfigure` brings and
    the arbiter keeps, and the calls in flight."""

    def __init__(self) -> None:
        self._front = FrontState(started_unix_s=int(time.time()))
        self._application = application.build(self._front)
        self._socket = FrontSocket(self._application)
        self._proxies = PlainProxies()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve after the constructor (its name for it)."""
        return self._application

    async def respond(
        self, request: by_handle.HandleRequest
    ) -> AsyncGenerator[ResponseHead | bytes, None]:
        """A request by handle, on the same routes as over HTTP (deployments.client)."""
        async with aclosing(by_handle.respond(self._application, request)) as parts:
            async for part in parts:
                yield part

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Checks the table, hands it to the arbiter and deploys its capabilities. Raises
        ConfigError with every bad key, and what they raise."""
        table = parse_table(user_config, "front.user_config")
        path = keys_path(table.front.keys_file, table.arbiter.state_file)
        await asyncio.to_thread(ensure_first, path)
        in_force = await arbiter_gateway.configure(table)
        await self._front.apps.follow(table)
        sites = frozenset(table.front.hosts), frozenset(table.front.origins)
        self._front.auth = Authenticator(Keyring(path), *sites)
        if in_force.remotes.rows:  # its import takes 0.3 s, in which nothing here would stream
            await asyncio.to_thread(importlib.import_module, "deployments.remotes.exchange")
        self._front.service.configure(in_force)
        application.offer(self._application)
        await self._socket.open()
        await self._proxies.wrap()

    async def check_health(self) -> None:
        """Called by Serve each ten seconds. Puts our middlewares around proxies that Serve has
        started meanwhile."""
        await self._proxies.wrap()

    async def __del__(self) -> None:
        """Called by Serve, once those requests that it carries itself are answered."""
        await self._socket.close()
        await self._front.service.remotes.close()
