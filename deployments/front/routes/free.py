"""`arbiter free` over HTTP (A15): frees device memory at once, and holds it for a term."""

import time
import uuid
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import Field

from arbiter.client.admin import call_arbiter
from arbiter.core.reports.plan import PlanQuestion
from arbiter.core.types import LEASE, LeaseConditions, Need
from arbiter.errors import DeadlineUnmet
from arbiter.protocol.messages import LEASE_NAME, LeaseCall
from arbiter.units import GIB, LONGEST_S, Bytes, NodeId, seconds
from deployments.config.fields import Strict
from deployments.front.dependencies import Admin
from deployments.front.openapi import refusals
from deployments.front.routes.json_route import JsonRoute
from deployments.front.routes.plan import MOST_GB

router = APIRouter(prefix="/arbiter", route_class=JsonRoute, responses=refusals(400, 401, 403, 503))
CALL_S = 2.0  # one call waits as long; the arbiter gives a lease up after 10 s without one


class FreeBody(Strict):
    """The body of `POST /arbiter/free`."""

    gb: float = Field(gt=0, le=MOST_GB)
    term_s: float = Field(3600.0, gt=0, le=LONGEST_S)
    name: str = Field("hold", max_length=128)
    node: str | None = Field(None, max_length=128)  # None: the only one there is
    id: str | None = Field(None, pattern=LEASE_NAME.pattern)  # None: a new one
    # True: the arbiter holds the lease; False: the caller sends heartbeats by PUT
    # /arbiter/leases/{id}
    kept: bool = True
    notice_s: float = Field(0.0, ge=0, le=3600)
    within_s: float = Field(60.0, gt=0, le=600)  # then what was freed is given back
    dry_run: bool = False


@router.post("/free")
async def free(body: FreeBody, caller: Admin) -> JSONResponse:
    """Frees as many GiB on one device as what is pinned or in use allows, whatever the minimum
    residency and the priority of what is idle, and holds them. `plan` says what left and what
    stays; what left is loaded again once the lease is over."""
    notice = seconds(0.0 if body.kept else body.notice_s)
    terms = LeaseConditions(caller.tenant, seconds(body.term_s), notice, frees=True)
    size, node = Bytes(round(body.gb * GIB)), None if body.node is None else NodeId(body.node)
    if body.dry_run:
        question = PlanQuestion(LEASE, body.name, Need(size), True, node=node, lease=terms)
        return JSONResponse({"plan": await call_arbiter("plan", question), "lease": None})
    lease = body.id or f"free-{uuid.uuid4().hex[:10]}"
    call = LeaseCall(
        lease,
        size,
        terms,
        body.name,
        node=node,
        deadline=seconds(body.within_s),
        seen="queued",
        wait=seconds(CALL_S),
    )
    return JSONResponse({"id": lease, **await _held(call, body)})


async def _held(call: LeaseCall, body: FreeBody) -> dict[str, Any]:
    """The answer once the lease is held. Raises RequestError; nothing is held then."""
    began = time.monotonic()
    while True:
        answer: dict[str, Any] = await call_arbiter("free", call, body.kept)
        if answer["lease"]["state"] != "queued":
            return answer
        waited_s = time.monotonic() - began
        if waited_s > body.within_s:
            await call_arbiter("end_lease", call.lease, call.terms.tenant)
            raise DeadlineUnmet(call.ticket, waited_s, 10.0)
