"""The dry run over HTTP (K3): what a request would bring about. It changes nothing."""

import asyncio
from typing import Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import Field, model_validator

from arbiter.client.admin import call_arbiter
from arbiter.core.reports.plan import PlanQuestion
from arbiter.core.types import LEASE, LeaseConditions, Need, Priority
from arbiter.errors import UnknownModel
from arbiter.units import GIB, Bytes, NodeId, seconds
from deployments.config import load_plan
from deployments.config.fields import Strict
from deployments.config.file_threads import in_thread
from deployments.config.schema import ConfigError, Table
from deployments.front.dependencies import State, Viewer
from deployments.front.inference.request import BadRequest
from deployments.front.openapi import refusals
from deployments.front.routes.json_route import JsonRoute
from deployments.front.status import model_cards, plan_questions
from deployments.front.status.arbiter_gateway import STATE_WAIT_S

router = APIRouter(
    prefix="/arbiter", route_class=JsonRoute, responses=refusals(400, 401, 403, 404, 503)
)
MOST_GB = float(1 << 20)  # a pebibyte, far beyond any node
UNKNOWN_FOR = seconds(60)  # a term that any settings allow: the answer does not depend on it


class PlanBody(Strict):
    """The body of `POST /arbiter/plan`: a model of the table, or so many GiB for something that is
    in no table, as a lease would ask for them."""

    model: str = Field("", max_length=256)
    gb: float | None = Field(None, gt=0, le=MOST_GB)
    priority: Literal["urgent", "high", "normal", "low", "batch"] = "normal"
    node: str | None = Field(None, max_length=128)

    @model_validator(mode="after")
    def _names_something(self) -> "PlanBody":
        if not self.model and self.gb is None:
            raise ValueError("name a `model`, or say how many `gb`")
        return self


@router.post("/plan")
async def plan(body: PlanBody, front: State, caller: Viewer) -> JSONResponse:
    """Answers `now`, `after_evicting` (which, with bytes and reload seconds), `not_before` (with
    the wait that the arbiter expects) or `never`, by the rules that a request meets."""
    plan_question = await question(front.table, body, caller.tenant)
    return JSONResponse(await call_arbiter("plan", plan_question, within_s=STATE_WAIT_S))


async def question(table: Table, body: PlanBody, tenant: str) -> PlanQuestion:
    """What the arbiter is asked. Raises UnknownModel, and BadRequest where the model's files are
    not to be seen from here."""
    node = None if body.node is None else NodeId(body.node)
    priority = Priority[body.priority.upper()]
    if body.gb is not None:
        need = Need(Bytes(round(body.gb * GIB)))
        terms = LeaseConditions(tenant, UNKNOWN_FOR, seconds(0))
        return PlanQuestion(
            LEASE, body.model or "unknown", need, True, priority=priority, node=node, lease=terms
        )
    home = table.homes.get(body.model)
    if home is None:
        raise UnknownModel(body.model, "", tuple(sorted(table.homes)))
    try:
        capability = table.capabilities[home]
        source = capability.models[body.model].source
        async with asyncio.timeout(within_s := model_cards.FILES_S):
            model_plan = await in_thread(source, load_plan.plan, body.model, capability)
    except TimeoutError as error:
        message = (
            f"the files of {body.model} were not read within {within_s:g} s; say its need by `gb`"
        )
        raise BadRequest(message, "model") from error
    except (ConfigError, OSError) as error:
        message = f"what {body.model} needs cannot be told ({error}); say it by `gb`"
        raise BadRequest(message, "model") from error
    return plan_questions.of_model(home, model_plan, priority, tenant, node)
