"""GET /arbiter/remotes: how the remotes are, and what tenants have spent at them today (J5)."""

from typing import Any

from fastapi import APIRouter

from arbiter.client.admin import call_arbiter
from deployments.front.dependencies import State, Viewer
from deployments.front.openapi import refusals
from deployments.front.status.arbiter_gateway import STATE_WAIT_S

router = APIRouter(prefix="/arbiter", responses=refusals(401, 403, 503))


@router.get("/remotes")
async def remotes(_: Viewer, front: State) -> dict[str, Any]:
    """The remotes, whether they may be asked, and what tenants have spent there today. Raises
    ArbiterUnavailable."""
    spent = await call_arbiter("spending", within_s=STATE_WAIT_S)
    service = front.service.remotes
    return {
        "nothing_leaves": service.nothing_leaves,
        "remotes": service.rows(),
        "spent_today": spent,
    }
