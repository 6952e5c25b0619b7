"""The arbiter's settings over HTTP (C12): read with the scope `view`, changed with `admin`."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from arbiter.errors import RequestError
from deployments.config import runtime_settings
from deployments.config.fields import Strict
from deployments.config.schema import ConfigError
from deployments.front.keys import Scope
from deployments.front.request import BadRequest, refused
from deployments.front.routes.leases import the_gate
from deployments.front.routes.residency import read_body

router = APIRouter(prefix="/arbiter")


class SettingsBody(Strict):
    """Of these settings, so many others; null: as by default."""

    generation: int = Field(ge=0)  # that was read; 409 when it is not the current one any more
    settings: dict[str, Any] = Field(min_length=1)


@router.get("/settings")
async def settings(request: Request) -> Response:
    the_gate().require(request, Scope.VIEW)
    try:
        return JSONResponse(await runtime_settings.read())
    except RequestError as error:
        return refused(error)


@router.put("/settings")
async def change(request: Request) -> Response:
    """All of them or none."""
    the_gate().require(request, Scope.ADMIN)
    try:
        said = await read_body(request, SettingsBody)
        return JSONResponse(await runtime_settings.change(said.generation, said.settings))
    except BadRequest as error:
        return error.response
    except ConfigError as error:
        return BadRequest(str(error), "settings").response
    except RequestError as error:
        return refused(error)
