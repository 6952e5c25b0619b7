"""The Serve ingress: every route of the front, and what each needs of a key."""

import asyncio
import time
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from ray import serve
from ray.serve.handle import DeploymentHandle

from arbiter.errors import RequestError
from deployments.config.schema import Table, parse_table
from deployments.front import arbiter_gateway
from deployments.front.auth import Authenticator, Denied
from deployments.front.inference import Inference
from deployments.front.keys import Keyring, Scope, ensure_first, keys_path
from deployments.front.request import refused
from deployments.front.routes import leases, residency, settings
from deployments.front.schemas import described


async def _from_here(request: Request) -> None:
    """Of every route but the description of them, which tells of nobody: see Gate.check_site.
    Raises Denied."""
    serve.get_replica_context().servable_object.gate.check_site(request)


async def _denied(request: Request, error: Exception) -> Response:
    assert isinstance(error, Denied)
    return error.response


app = FastAPI(
    title="serve-arbiter",
    docs_url="/docs",
    redoc_url=None,
    dependencies=[Depends(_from_here)],
    exception_handlers={Denied: _denied},
)
app.include_router(leases.router)
app.include_router(residency.router)
app.include_router(settings.router)


@serve.deployment(
    name="front",
    num_replicas=1,
    max_ongoing_requests=1_200,  # above the most of `front.in_flight`: room to say that it is full
    max_queued_requests=1_000,  # in the proxy, which then answers 503 by itself
    ray_actor_options={"num_cpus": 0},
    graceful_shutdown_timeout_s=600,  # above the longest generation, or clients see broken streams
)
@serve.ingress(app)
class Front:
    """Stateless but for the table, which `reconfigure` brings and the arbiter keeps."""

    def __init__(self) -> None:
        self._table = Table(capabilities={})
        self.gate = Authenticator(Keyring(keys_path()))
        self._handles: dict[str, DeploymentHandle] = {}
        self._inference = Inference(self._table, self.gate, self._handles)
        self._started_unix_s = int(time.time())

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Check the table, hand it to the arbiter. Raises ConfigError with every bad key."""
        table = parse_table(user_config, "front.user_config")
        path = keys_path(table.front.keys_file, table.arbiter.state_file)
        await asyncio.to_thread(ensure_first, path)
        await arbiter_gateway.configure(table)
        site = frozenset(table.front.hosts), frozenset(table.front.origins)
        self.gate, self._table = Authenticator(Keyring(path), *site), table
        self._inference = Inference(table, self.gate, self._handles)

    # -- OpenAI ------------------------------------------------------------------------------

    @app.post("/v1/chat/completions", **described("/v1/chat/completions"))
    async def chat_completions(self, request: Request) -> Response:
        return await self._inference.serve(request)

    @app.post("/v1/completions", **described("/v1/completions"))
    async def completions(self, request: Request) -> Response:
        return await self._inference.serve(request)

    @app.post("/v1/responses", **described("/v1/responses"))
    async def responses(self, request: Request) -> Response:
        return await self._inference.serve(request)

    @app.post("/v1/embeddings", **described("/v1/embeddings"))
    async def embeddings(self, request: Request) -> Response:
        return await self._inference.serve(request)

    @app.get("/v1/models")
    async def models(self, request: Request) -> dict[str, Any]:
        """Models, and the adapters that this caller may name."""
        tenant = self.gate.require(request, Scope.INFER).tenant
        names = self._inference.names
        cards = [self._card(name, names.home(name)) for name in names.visible(tenant)]
        return {"object": "list", "data": cards}

    @app.get("/v1/models/{model:path}")
    async def model(self, request: Request, model: str) -> Response:
        tenant = self.gate.require(request, Scope.INFER).tenant
        try:
            target = self._inference.names.find(model, tenant)
        except RequestError as error:
            return refused(error)
        return JSONResponse(self._card(target.served, target.capability))

    def _card(self, name: str, owner: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._started_unix_s, "owned_by": owner}

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
            report = await arbiter_gateway.readiness(self._table)
        except RequestError as error:
            return refused(error)
        states = {c["state"] for c in report.values()}
        return JSONResponse({"capabilities": report}, 503 if states == {"failed"} else 200)

    @app.get("/arbiter/state")
    async def state(self, request: Request) -> Response:
        self.gate.require(request, Scope.VIEW)
        try:
            return JSONResponse(await arbiter_gateway.state())
        except RequestError as error:
            return refused(error)

    @app.get("/arbiter/explain/{ticket}")
    async def explain(self, request: Request, ticket: str) -> Response:
        """Why this ticket waits, or why it went, with the numbers."""
        self.gate.require(request, Scope.VIEW)
        try:
            return JSONResponse(await arbiter_gateway.explain(ticket))
        except RequestError as error:
            return refused(error)

    @app.get("/arbiter/events/recent")
    async def recent_events(self, request: Request, after: int = 0) -> Response:
        """The event log from sequence number `after` on, as far as it is kept."""
        self.gate.require(request, Scope.VIEW)
        try:
            return JSONResponse({"events": await arbiter_gateway.recent_events(after)})
        except RequestError as error:
            return refused(error)

    @app.get("/arbiter/events")
    async def events(self, request: Request, after: int = 0) -> Response:
        """The event log as SSE, from sequence number `after` on; `Last-Event-ID` resumes."""
        self.gate.require(request, Scope.VIEW)
        last = request.headers.get("last-event-id", "")
        stream = arbiter_gateway.event_stream(arbiter_gateway.event_number(last, after))
        return StreamingResponse(stream, media_type="text/event-stream")
