"""All tenants' jobs and batches for the operator: how far they are, never what they say."""

from typing import Annotated, Any

from fastapi import APIRouter, Query

from deployments.front.dependencies import Admin, State, Viewer
from deployments.front.openapi import refusals
from deployments.front.routes.json_route import JsonRoute

router = APIRouter(
    prefix="/arbiter/jobs", route_class=JsonRoute, responses=refusals(401, 403, 404, 503)
)


@router.get("")
async def jobs(
    front: State, _: Viewer, limit: Annotated[int, Query(ge=1, le=1_000)] = 50
) -> dict[str, Any]:
    """The newest of all tenants, batches and single jobs, and what runs now."""
    overview: dict[str, Any] = await front.jobs.call("overview", limit)
    return overview


@router.get("/{job_id}")
async def job(job_id: str, front: State, _: Viewer) -> dict[str, Any]:
    """Raises NotFound."""
    row: dict[str, Any] = await front.jobs.call("row", job_id)
    return row


@router.delete("/{job_id}")
async def cancel(job_id: str, front: State, _: Admin) -> dict[str, Any]:
    """Cancels a batch or a job of any tenant. Raises NotFound."""
    row: dict[str, Any] = await front.jobs.call("cancel_any", job_id)
    return row
