"""Leases over HTTP (A15, L1): of the key's tenant, never of a tenant that a client names."""

from typing import Annotated, Any

from fastapi import APIRouter, Path
from fastapi.responses import JSONResponse

from arbiter.client.admin import call_arbiter
from arbiter.errors import UnknownLease
from arbiter.protocol.json_codec import plain
from arbiter.protocol.lease_schema import LeaseBody
from arbiter.protocol.messages import LEASE_NAME
from arbiter.units import TicketId
from deployments.front.access.keys import Scope
from deployments.front.dependencies import Admin, Lessee
from deployments.front.inference.request import BadRequest
from deployments.front.openapi import refusals
from deployments.front.routes.json_route import JsonRoute
from deployments.front.status import arbiter_gateway

router = APIRouter(
    prefix="/arbiter/leases", route_class=JsonRoute, responses=refusals(400, 401, 403, 503)
)
LeaseId = Annotated[str, Path(description="Letters and digits, with . _ - inside")]


@router.get("")
async def leases(caller: Lessee) -> dict[str, Any]:
    """The leases of the key's tenant; with the scope `admin` all."""
    state = await arbiter_gateway.state()
    sees_all = Scope.ADMIN in caller.scopes
    rows = [r.plain for r in state.leases if sees_all or r.lease_tenant == caller.tenant]
    return {"leases": rows}


@router.put("/{lease}")
async def hear(lease: LeaseId, body: LeaseBody, caller: Lessee) -> JSONResponse:
    """Requests the lease, renews it and waits for news: the client repeats the same body."""
    if not LEASE_NAME.fullmatch(lease):
        raise BadRequest("`id` of a lease: use letters and digits, with . _ - inside", "id")
    lease_body = body.model_copy(update={"tenant": caller.tenant})
    return JSONResponse(plain(await call_arbiter("lease", lease_body.as_call(lease))))


@router.delete("/{lease}", responses=refusals(404))
async def release(lease: str, caller: Lessee) -> dict[str, str]:
    """Ends the lease; a lease that has ended stays so. Raises UnknownLease."""
    await call_arbiter("end_lease", lease, caller.tenant)
    return {"lease": lease, "state": "ended"}


@router.post("/cleanup")
async def clean_up(_: Admin) -> dict[str, Any]:
    """Ends leases with missed heartbeats, without waiting any longer."""
    return {"ended": await call_arbiter("clean_leases")}


@router.post("/{ticket}/drain", responses=refusals(404))
async def drain(ticket: str, _: Admin) -> dict[str, str]:
    """Gives the holder notice, also of a lease that the arbiter may not interrupt. `ticket`: of the
    lease, because names of leases are each tenant's own. Raises UnknownLease."""
    state = await arbiter_gateway.state()
    if ticket not in {row.ticket for row in state.leases}:
        raise UnknownLease(ticket)
    await call_arbiter("unload", TicketId(ticket))
    return {"lease": ticket}
