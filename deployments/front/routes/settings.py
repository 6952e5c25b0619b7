"""The arbiter's settings over HTTP (C12): read with the scope `view`, changed with `admin`."""

from typing import Any

from fastapi import APIRouter
from pydantic import Field

from deployments.config import runtime_settings
from deployments.config.fields import Strict
from deployments.front.dependencies import Admin, Viewer
from deployments.front.openapi import refusals
from deployments.front.routes.json_route import JsonRoute

router = APIRouter(prefix="/arbiter", route_class=JsonRoute, responses=refusals(400, 401, 403, 503))


class SettingsBody(Strict):
    """New values for some settings; null: the default."""

    generation: int = Field(ge=0)  # as read before; 409 where another change came in between
    settings: dict[str, Any] = Field(min_length=1)


@router.get("/settings")
async def settings(_: Viewer) -> dict[str, Any]:
    """The generation, and every setting with its value."""
    return await runtime_settings.read()


@router.put("/settings", responses=refusals(409))
async def change(body: SettingsBody, _: Admin) -> dict[str, Any]:
    """Changes all of them or none. Raises ConfigError, SettingsConflict."""
    return await runtime_settings.change(body.generation, body.settings)
