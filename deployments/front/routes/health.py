"""Liveness, and readiness of each capability (J9); no key is needed."""

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from deployments.front.dependencies import State
from deployments.front.openapi import refusals
from deployments.front.status import arbiter_gateway

router = APIRouter()


@router.get("/health")
async def health() -> dict[str, str]:
    """Liveness: this process answers."""
    return {"status": "ok"}


@router.head("/")
async def root() -> Response:
    """Anthropic's tools ask whether there is a server at all."""
    return Response()


@router.get("/ready", responses=refusals(503))
async def ready(front: State) -> JSONResponse:
    """Readiness of each capability: ready, loading, scaled_to_zero or failed with its cause. 503
    only where all have failed, or the arbiter does not answer. And of each node: `ready` once its
    next engine starts as fast as any."""
    table = front.table
    failures = await front.applications.failures(sorted(table.capabilities)) | front.apps.causes
    report = await arbiter_gateway.readiness(table, failures)
    states = {row["state"] for row in report.values()}
    body = {"capabilities": report, "nodes": await arbiter_gateway.nodes()}
    return JSONResponse(body, 503 if states == {"failed"} else 200)
