"""Leases over HTTP (A15, L1): of the key's tenant, never of one that a client names."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from ray import serve

from arbiter.client.admin import call_arbiter
from arbiter.errors import RequestError
from arbiter.protocol.json_codec import plain
from arbiter.protocol.lease_schema import NAME, LeaseBody
from arbiter.units import TicketId
from deployments.front import arbiter_gateway
from deployments.front.auth import Authenticator
from deployments.front.keys import Caller, Scope
from deployments.front.request import BadRequest, bounded_body, refused

router = APIRouter(prefix="/arbiter")
MOST_BYTES = 16 << 10  # a lease is named by a few words and numbers


def the_gate() -> Authenticator:
    """The front's own, as its configuration has it now."""
    gate: Authenticator = serve.get_replica_context().servable_object.gate
    return gate


@router.get("/leases")
async def leases(request: Request) -> Response:
    """Those of the key's tenant; with the scope `admin` all."""
    caller = the_gate().require(request, Scope.LEASE)
    try:
        state = await arbiter_gateway.state()
    except RequestError as error:
        return refused(error)
    found = [t for t in state["tickets"] if t["lease"] and _may_see(caller, t["lease"])]
    return JSONResponse({"leases": found})


def _may_see(caller: Caller, lease: dict[str, Any]) -> bool:
    return Scope.ADMIN in caller.scopes or bool(lease["tenant"] == caller.tenant)


@router.put("/leases/{lease}")
async def hear(request: Request, lease: str) -> Response:
    """Asks for the lease, beats for it, waits for news: the same words each time."""
    caller = the_gate().require(request, Scope.LEASE)
    if not NAME.fullmatch(lease):
        return BadRequest("a lease's id has letters, digits and . _ - inside", "id").response
    try:
        raw = await bounded_body(request, MOST_BYTES)
        said = LeaseBody.model_validate_json(raw).model_copy(update={"tenant": caller.tenant})
    except BadRequest as error:
        return error.response
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in problem["loc"])
        return BadRequest(f"`{field}`: {problem['msg']}", field).response
    try:
        return JSONResponse(plain(await call_arbiter("lease", said.as_call(lease))))
    except RequestError as error:
        return refused(error)


@router.delete("/leases/{lease}")
async def give_back(request: Request, lease: str) -> Response:
    """Repeated: nothing."""
    caller = the_gate().require(request, Scope.LEASE)
    try:
        await call_arbiter("end_lease", lease, caller.tenant)
    except RequestError as error:
        return refused(error)
    return JSONResponse({"lease": lease, "state": "ended"})


@router.post("/leases/{lease}/drain")
async def drain(request: Request, lease: str) -> Response:
    """Notice by hand, also to one that may not be interrupted otherwise."""
    the_gate().require(request, Scope.ADMIN)
    try:
        state = await arbiter_gateway.state()
        known = {t["ticket"] for t in state["tickets"] if t["lease"]}
        if lease not in known:
            return BadRequest(f"no lease {lease!r}", "id", 404).response
        await call_arbiter("unload", TicketId(lease))
    except RequestError as error:
        return refused(error)
    return JSONResponse({"lease": lease})


@router.post("/leases/cleanup")
async def clean_up(request: Request) -> Response:
    """End those whose holder has missed its heartbeats, without waiting any longer."""
    the_gate().require(request, Scope.ADMIN)
    try:
        return JSONResponse({"ended": await call_arbiter("clean_leases")})
    except RequestError as error:
        return refused(error)
