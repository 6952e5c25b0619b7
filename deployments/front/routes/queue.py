"""Queued tickets steered by hand over HTTP (K4)."""

from typing import Literal

from fastapi import APIRouter

from arbiter.client.admin import call_arbiter
from arbiter.core.types import Priority
from arbiter.units import TicketId
from deployments.config.fields import Strict
from deployments.front.dependencies import Admin
from deployments.front.openapi import refusals
from deployments.front.routes.json_route import JsonRoute

router = APIRouter(
    prefix="/arbiter/queue", route_class=JsonRoute, responses=refusals(400, 401, 403, 404, 409, 503)
)


class RaiseBody(Strict):
    """The body of `POST /arbiter/queue/{ticket}/raise`."""

    priority: Literal["urgent", "high", "normal", "low"]


@router.post("/{ticket}/raise")
async def raise_priority(ticket: str, body: RaiseBody, _: Admin) -> dict[str, str]:
    """Lets a queued ticket ask with a more urgent priority; a less urgent one changes nothing."""
    await call_arbiter("raise_priority", TicketId(ticket), Priority[body.priority.upper()])
    return {"ticket": ticket, "priority": body.priority}


@router.post("/{ticket}/cancel")
async def cancel(ticket: str, _: Admin) -> dict[str, str]:
    """Refuses a queued ticket: every request that waits under it is answered `cancelled`."""
    await call_arbiter("cancel", TicketId(ticket))
    return {"ticket": ticket}
