"""Tasks and settings over HTTP (J5): read with the scope `view`, changed with `admin`."""

from typing import Annotated, Any

from fastapi import APIRouter, Header, Response
from pydantic import Field

from deployments.config import runtime_settings
from deployments.config.fields import Strict
from deployments.front.dependencies import Admin, State, Viewer
from deployments.front.inference.request import BadRequest
from deployments.front.openapi import refusals
from deployments.front.routes.json_route import JsonRoute

GENERATION_MOST_DIGITS = 18  # more is no generation of a file, and slow or impossible to read
router = APIRouter(prefix="/api/v1", route_class=JsonRoute, responses=refusals(400, 401, 403, 503))


class ConfigBody(Strict):
    """All tasks as they are to be, and new values for some settings."""

    # As read before; 409 where another change came in between. `If-Match` says the same
    generation: int | None = Field(None, ge=0)
    tasks: dict[str, dict[str, Any]] | None = None  # in place of all there are; absent: they stay
    settings: dict[str, Any] = Field({})  # some of the arbiter's; null: the default


@router.get("/config")
async def config(response: Response, _: Viewer) -> dict[str, Any]:
    """The generation, also as ETag, every task, and every setting of the arbiter."""
    return _with_etag(response, await runtime_settings.read_config())


@router.put("/config", responses=refusals(409))
async def change(
    body: ConfigBody,
    response: Response,
    front: State,
    _: Admin,
    if_match: Annotated[str | None, Header()] = None,
) -> dict[str, Any]:
    """Changes all of it or nothing, from the next request on. Raises BadRequest, ConfigError,
    SettingsConflict."""
    generation = _generation(body.generation, if_match)
    if body.tasks is None and not body.settings:
        raise BadRequest("say `tasks`, `settings`, or both", None)
    changed = await runtime_settings.change_config(generation, body.settings, body.tasks)
    front.service.take_tasks(changed.table.tasks)
    return _with_etag(response, changed)


def _generation(generation: int | None, if_match: str | None) -> int:
    """Raises BadRequest where neither the body nor the header says it, or they disagree."""
    tag = (if_match or "").strip().removeprefix("W/").strip('"')
    if if_match is not None and not (tag.isdecimal() and len(tag) <= GENERATION_MOST_DIGITS):
        raise BadRequest(
            f"If-Match: {if_match[:40]!r} is no generation; GET says it as ETag", "if-match"
        )
    numbers = {int(number) for number in (generation, tag or None) if number is not None}
    if len(numbers) != 1:
        raise BadRequest("say one `generation`, as GET says it, or If-Match", "generation")
    return numbers.pop()


def _with_etag(response: Response, current: runtime_settings.Config) -> dict[str, Any]:
    response.headers["etag"] = f'"{current.generation}"'
    return current.plain
