"""Proxies of Serve that were started without our middlewares, as by a plain `serve run`: the front
puts around each of them those that answer what Serve itself gets wrong.

The others, which shorten the way of a stream, need the variables with which Ray was started.
"""

import asyncio
import logging
import os
from collections.abc import Mapping
from typing import Any

from ray.exceptions import RayError
from starlette.types import ASGIApp

from arbiter.protocol import ray_internals
from deployments.front.proxy import BoundedWait, ProxyErrors
from deployments.start_variables import VARIABLES

logger = logging.getLogger("arbiter.front")
_NAME = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
ANSWERS_S = 10.0  # it imports the middlewares first


class PlainProxies:
    """Those of this cluster, as one front knows them."""

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
            found = {p._actor_id.hex(): p for p in await asyncio.to_thread(ray_internals.proxies)}
            new = [actor_id for actor_id in found if actor_id not in self._seen]
            asked = (found[actor_id].__ray_call__.remote(_put_around) for actor_id in new)
            async with asyncio.timeout(ANSWERS_S):
                await asyncio.gather(*asked)
            self._seen = frozenset(found)
        except (RayError, TimeoutError, RuntimeError) as error:
            if (said := str(error)) != self._said:
                logger.warning("Serve's proxy answers its own errors in its own way: %s", said)
                self._said = said


def _put_around(proxy: Any) -> None:
    """Runs in the proxy."""
    ray_internals.put_around_proxy(proxy, _wrapped, ProxyErrors)


def _wrapped(app: ASGIApp) -> ProxyErrors:
    return ProxyErrors(BoundedWait(app))
