"""Tenants over HTTP (E6): what the requests of a removed tenant left is erased, with `admin`."""

from typing import Annotated

from fastapi import APIRouter, Path

from arbiter.client.admin import call_arbiter
from deployments.front.dependencies import Admin
from deployments.front.keys import TENANT
from deployments.front.request import BadRequest
from deployments.front.routes.json_route import JsonRoute
from deployments.front.schemas import refusals

router = APIRouter(
    prefix="/arbiter/tenants", route_class=JsonRoute, responses=refusals(400, 401, 403, 503)
)
Tenant = Annotated[str, Path(description="as its API keys name it")]


@router.delete("/{tenant}/kept")
async def erase(tenant: Tenant, _: Admin) -> dict[str, str]:
    """Erases what the tenant's requests left in the pool of every node, in RAM and in files. What
    it asks for from now on is kept again, so remove its keys first."""
    if not TENANT.fullmatch(tenant):
        raise BadRequest(f"tenant {tenant!r}: use letters, digits, and . _ - inside", "tenant")
    await call_arbiter("remove_tenant", tenant)
    return {"tenant": tenant}
