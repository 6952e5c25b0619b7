"""The Serve ingress: finds the capability of a model and relays; parses no more than it must."""

import asyncio
import logging
import time
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from arbiter.errors import CapabilityFailed, RequestError, UnknownModel
from deployments.config import Table, parse_table
from deployments.front import arbiter_routes, lease_routes, residency_routes
from deployments.front.gate import Denied, Gate
from deployments.front.keys import Keyring, Scope, ensure_first, keys_path
from deployments.front.reading import BadRequest, read_call, refused
from deployments.front.relay import relay

logger = logging.getLogger("ray.serve")


async def _from_here(request: Request) -> None:
    """Of every route: see Gate.check_site. Raises Denied."""
    serve.get_replica_context().servable_object.gate.check_site(request)


async def _denied(request: Request, error: Exception) -> Response:
    assert isinstance(error, Denied)
    return error.response


app = FastAPI(
    title="serve-arbiter",
    docs_url="/docs",
    dependencies=[Depends(_from_here)],
    exception_handlers={Denied: _denied},
)
app.include_router(lease_routes.router)
app.include_router(residency_routes.router)


@serve.deployment(
    name="front",
    num_replicas=1,
    max_ongoing_requests=1_000,
    ray_actor_options={"num_cpus": 0},
    graceful_shutdown_timeout_s=600,  # above the longest generation, or clients see broken streams
)
@serve.ingress(app)
class Front:
    """Stateless but for the table, which `reconfigure` brings and the arbiter keeps."""

    def __init__(self) -> None:
        self._table = Table(capabilities={})
        self.gate = Gate(Keyring(keys_path()))
        self._handles: dict[str, DeploymentHandle] = {}
        self._started_unix_s = int(time.time())

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Check the table, hand it to the arbiter. Raises ConfigError with every bad key."""
        table = parse_table(user_config, "front.user_config")
        path = keys_path(table.front.keys_file, table.arbiter.state_file)
        await asyncio.to_thread(ensure_first, path)
        await arbiter_routes.configure(table)
        site = frozenset(table.front.hosts), frozenset(table.front.origins)
        self.gate, self._table = Gate(Keyring(path), *site), table

    # -- OpenAI ------------------------------------------------------------------------------

    @app.post("/v1/chat/completions")
    async def chat_completions(self, request: Request) -> Response:
        return await self._serve(request)

    @app.post("/v1/completions")
    async def completions(self, request: Request) -> Response:
        return await self._serve(request)

    @app.post("/v1/embeddings")
    async def embeddings(self, request: Request) -> Response:
        return await self._serve(request)

    @app.get("/v1/models")
    async def models(self, request: Request) -> dict[str, Any]:
        self.gate.require(request, Scope.INFER)
        return {"object": "list", "data": [self._card(name) for name in sorted(self._table.homes)]}

    @app.get("/v1/models/{model:path}")
    async def model(self, request: Request, model: str) -> Response:
        self.gate.require(request, Scope.INFER)
        if model not in self._table.homes:
            return refused(UnknownModel(model, "", tuple(sorted(self._table.homes))))
        return JSONResponse(self._card(model))

    def _card(self, model: str) -> dict[str, Any]:
        owner = self._table.homes[model]
        return {"id": model, "object": "model", "created": self._started_unix_s, "owned_by": owner}

    async def _serve(self, request: Request) -> Response:
        self.gate.require(request, Scope.INFER)
        try:
            call = await read_call(request)
        except BadRequest as error:
            return error.response
        capability = self._table.homes.get(call.model)
        if capability is None:
            return refused(UnknownModel(call.model, "", tuple(sorted(self._table.homes))))
        try:
            handle = self._handle(capability)
        except (KeyError, RayServeException):
            return refused(CapabilityFailed(call.model, "it has no application"))
        logger.info("request %s: %s %s -> %s", call.request_id, call.path, call.model, capability)
        response = await relay(call, handle.handle.remote)
        response.headers["x-request-id"] = call.request_id
        return response

    def _handle(self, capability: str) -> DeploymentHandle:
        if capability not in self._handles:
            handle = serve.get_deployment_handle(capability, app_name=capability)
            self._handles[capability] = handle.options(stream=True)
        return self._handles[capability]

    # -- health and the arbiter ----------------------------------------------------------------

    @app.get("/health")
    async def health(self) -> dict[str, str]:
        """Liveness: this process answers."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready(self) -> Response:
        """Readiness of each capability: ready, loading, scaled_to_zero or failed with cause. 503
        only when none of them can serve."""
        try:
            report = await arbiter_routes.readiness(self._table)
        except RequestError as error:
            return refused(error)
        states = {c["state"] for c in report.values()}
        return JSONResponse({"capabilities": report}, 503 if states == {"failed"} else 200)

    @app.get("/arbiter/state")
    async def state(self, request: Request) -> Response:
        self.gate.require(request, Scope.VIEW)
        try:
            return JSONResponse(await arbiter_routes.state())
        except RequestError as error:
            return refused(error)

    @app.get("/arbiter/events/recent")
    async def recent_events(self, request: Request, after: int = 0) -> Response:
        """The event log from sequence number `after` on, as far as it is kept."""
        self.gate.require(request, Scope.VIEW)
        try:
            return JSONResponse({"events": await arbiter_routes.recent_events(after)})
        except RequestError as error:
            return refused(error)

    @app.get("/arbiter/events")
    async def events(self, request: Request, after: int = 0) -> Response:
        """The event log as SSE, from sequence number `after` on; `Last-Event-ID` resumes."""
        self.gate.require(request, Scope.VIEW)
        last = request.headers.get("last-event-id", "")
        start = int(last) if last.isascii() and last.isdecimal() else after
        stream = arbiter_routes.event_stream(start)
        return StreamingResponse(stream, media_type="text/event-stream")
