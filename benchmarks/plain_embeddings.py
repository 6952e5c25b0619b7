"""Plain Serve in front of an engine's socket: what a graph of two deployments costs a request when
nothing of ours is in it."""

from typing import Any

import aiohttp
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse

PATH = "/plain"


@serve.deployment(max_ongoing_requests=100)
class Capability:
    """Asks the engine and hands its answer on."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._http: aiohttp.ClientSession | None = None

    async def embed(self, body: dict[str, Any]) -> Any:
        if self._http is None:
            connector = aiohttp.UnixConnector(path=self._socket, limit=0)
            self._http = aiohttp.ClientSession(connector=connector)
        async with self._http.post("http://engine/v1/embeddings", json=body) as response:
            response.raise_for_status()
            return await response.json()


@serve.deployment(max_ongoing_requests=100)
class Front:
    """Takes a request and asks the capability by its handle."""

    def __init__(self, capability: DeploymentHandle) -> None:
        self._capability = capability

    async def __call__(self, request: Request) -> JSONResponse:
        if request.method == "GET":  # is it up?
            return JSONResponse({})
        return JSONResponse(await self._capability.embed.remote(await request.json()))


def build(args: dict[str, Any]) -> serve.Application:
    """Serve's builder, as a configuration names it."""
    return Front.bind(Capability.bind(args["socket"]))  # type: ignore[attr-defined]
