"""Puts our middlewares around proxies of Serve that were started without them, as by a plain `serve
run`, and has Serve's controller start later proxies with them. The build of the front's application
does so (deployments.app), because a front may never start; and each front, because a controller
that was started anew knows nothing of them.
"""

import asyncio
import logging
import os
from collections.abc import Mapping
from typing import Any

from ray.exceptions import RayError

from arbiter.protocol import ray_internals
from deployments.config.start_variables import VARIABLES
from deployments.front.proxy import middlewares

logger = logging.getLogger("arbiter.front")
_NAME = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
WRAPPED_S = 10.0  # the proxies import the middleware first


class PlainProxies:
    """The proxies of this cluster that were started without our middlewares, as one process knows
    them. `environment`: that of this process, which each node is taken to have as well."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._has_own = environment.get(_NAME) == VARIABLES[_NAME]
        self._seen: frozenset[str] = frozenset()  # actors of Ray, by id
        self._has_told, self._last_failure = False, ""

    async def wrap(self) -> None:
        """Sees to proxies that are new since it was last called. What fails is logged, and tried
        again at the next call."""
        if self._has_own:
            return
        try:
            async with asyncio.timeout(WRAPPED_S):
                await self._wrap_new()
        except (RayError, TimeoutError, RuntimeError) as error:
            if (message := str(error)) != self._last_failure:
                logger.warning("Serve's proxy answers its own errors in its own way: %s", message)
                self._last_failure = message

    async def _wrap_new(self) -> None:
        proxies = {p._actor_id.hex(): p for p in await asyncio.to_thread(ray_internals.proxies)}
        new = [proxy for actor_id, proxy in proxies.items() if actor_id not in self._seen]
        await asyncio.gather(*(proxy.__ray_call__.remote(_put_around) for proxy in new))
        self._seen = frozenset(proxies)
        controller = ray_internals.serve_controller()
        if controller is not None and not self._has_told:
            await controller.__ray_call__.remote(_put_around_new)
            self._has_told = True


def _put_around_new(controller: Any) -> None:
    """Runs in the controller."""
    ray_internals.put_around_new_proxies(controller, middlewares())


def _put_around(proxy: Any) -> None:
    """Runs in the proxy."""
    ray_internals.put_around_proxy(proxy, middlewares())
