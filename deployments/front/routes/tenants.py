"""Tenants over HTTP (E6): what a removed tenant left is erased, with `admin`."""

from typing import Annotated

from fastapi import APIRouter, Path

from arbiter.client.admin import call_arbiter
from deployments.front.access.keys import TENANT
from deployments.front.dependencies import Admin, State
from deployments.front.inference.request import BadRequest
from deployments.front.openapi import refusals
from deployments.front.routes.json_route import JsonRoute

router = APIRouter(
    prefix="/arbiter/tenants", route_class=JsonRoute, responses=refusals(400, 401, 403, 503)
)
Tenant = Annotated[str, Path(description="as its API keys name it")]


@router.delete("/{tenant}/kept")
async def erase(tenant: Tenant, front: State, _: Admin) -> dict[str, str | int]:
    """Erases what the tenant's requests left in the pool of every node, in RAM and in files, and
    its jobs, batches, files and stored responses; `ending` is how many of these are erased once
    their work has ended. What it asks for from now on is kept again, so remove its keys first.
    Raises ArbiterUnavailable, JobsAway: then ask again."""
    if not TENANT.fullmatch(tenant):
        raise BadRequest(f"tenant {tenant!r}: use letters, digits, and . _ - inside", "tenant")
    await call_arbiter("remove_tenant", tenant)
    return {"tenant": tenant, "ending": await front.jobs.call("remove_tenant", tenant)}
