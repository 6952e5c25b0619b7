"""Proxies of Serve that were started without our middlewares, as by a plain `serve run`: around
each of them goes the middleware for what Serve itself gets wrong, of every application. The build
of the front's application puts it there (deployments.app), because a front may never start; and the
front itself, because Serve may start other proxies.

The others are for the front alone, and need the variables with which Ray was started.
"""

import asyncio
import logging
import os
from collections.abc import Mapping
from typing import Any

from ray.exceptions import RayError

from arbiter.protocol import ray_internals
from deployments.front.proxy import ServeErrors
from deployments.start_variables import VARIABLES

logger = logging.getLogger("arbiter.front")
_NAME = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
WRAPPED_S = 10.0  # the proxies import the middleware first


class PlainProxies:
    """Those of this cluster, as one process knows them. `environment`: its own, which is taken for
    that of each node."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._has_own = environment.get(_NAME) == VARIABLES[_NAME]
        self._seen: frozenset[str] = frozenset()  # actors of Ray, by id
        self._said = ""

    async def wrap(self) -> None:
        """Sees to proxies that are new since it was last called. What fails is logged, and tried
        again at the next call."""
        if self._has_own:
            return
        try:
            async with asyncio.timeout(WRAPPED_S):
                await self._wrap_new()
        except (RayError, TimeoutError, RuntimeError) as error:
            if (message := str(error)) != self._said:
                logger.warning("Serve's proxy answers its own errors in its own way: %s", message)
                self._said = message

    async def _wrap_new(self) -> None:
        proxies = {p._actor_id.hex(): p for p in await asyncio.to_thread(ray_internals.proxies)}
        new = [proxy for actor_id, proxy in proxies.items() if actor_id not in self._seen]
        await asyncio.gather(*(proxy.__ray_call__.remote(_put_around) for proxy in new))
        self._seen = frozenset(proxies)


def _put_around(proxy: Any) -> None:
    """Runs in the proxy."""
    ray_internals.put_around_proxy(proxy, ServeErrors)
