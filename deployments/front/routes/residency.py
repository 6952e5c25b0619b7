"""Where models are and where they are to be, and memory that is short, over HTTP (D8, C5)."""

from typing import Any, Literal, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, ValidationError

from arbiter.client.admin import call_arbiter
from arbiter.core.events import PressurePushed
from arbiter.core.types import Floor, Level
from arbiter.errors import RequestError, UnknownModel
from arbiter.protocol.messages import ModelSize, Resize
from arbiter.units import Bytes, TicketId, seconds
from deployments.config.fields import Strict
from deployments.config.schema import parse_table
from deployments.front import arbiter_gateway
from deployments.front.keys import Scope
from deployments.front.request import BadRequest, bounded_body, refused
from deployments.front.routes.leases import MOST_BYTES, the_gate

router = APIRouter(prefix="/arbiter")
ORDER = ("resident", "draining", "loading", "asleep", "queued", "reclaiming")  # best first
LEVELS = {"resident": "device", "draining": "device", "loading": "loading", "asleep": "host"}


T = TypeVar("T", bound=Strict)


class FloorBody(Strict):
    """The body of `PUT /arbiter/residency/{model}`."""

    floor: Literal["device", "host", "cold"]


class PressureBody(Strict):
    """The body of `POST /arbiter/pressure`."""

    where: str = Field(min_length=1, max_length=128)  # a device or a node
    level: Literal["nominal", "low", "critical"]
    free_bytes: int | None = Field(None, ge=0)
    term_s: float = Field(60.0, gt=0, le=3600)  # C5


def picture(state: dict[str, Any]) -> dict[str, Any]:
    """Of each model: where it is, its floor, its host copy, and a load in flight."""
    homes = parse_table(state["table"], "the arbiter's table").homes
    floors = {(f["capability"], f["model"]): f["floor"] for f in state["floors"]}
    return {
        model: _model(model, capability, state, floors.get((capability, model), "cold"))
        for model, capability in sorted(homes.items())
    }


def _model(model: str, capability: str, state: dict[str, Any], floor: str) -> dict[str, Any]:
    mine = _own(model, capability, state)
    mine.sort(key=lambda t: ORDER.index(t["state"]))
    best = mine[0] if mine else None
    loading = [t["in_state_s"] for t in mine if t["state"] == "loading"]
    host = (
        max(0, size - t["ram_bytes"])
        for t in mine
        for device, size in t["charged_bytes"].items()
        if device.endswith("/host")
    )
    return {
        "capability": capability,
        "floor": floor,
        "level": LEVELS.get(best["state"], "cold") if best else "cold",
        "tickets": {t["ticket"]: t["state"] for t in mine},
        "host_copy_bytes": sum(host),
        "loading_s": loading[0] if loading else None,
    }


def _own(model: str, capability: str, state: dict[str, Any]) -> list[dict[str, Any]]:
    """The tickets of one model, leases left out."""
    return [
        t
        for t in state["tickets"]
        if (t["capability"], t["model"]) == (capability, model) and not t["lease"]
    ]


@router.get("/residency")
async def residency(request: Request) -> Response:
    the_gate().require(request, Scope.VIEW)
    try:
        return JSONResponse({"models": picture(await arbiter_gateway.state())})
    except RequestError as error:
        return refused(error)


@router.put("/residency/{model:path}")
async def set_floor(request: Request, model: str) -> Response:
    """`device`: load it now and keep it. `host`: asleep at least. `cold`: anywhere."""
    the_gate().require(request, Scope.ADMIN)
    try:
        said = await read_body(request, FloorBody)
        await call_arbiter("set_floor", await _home(model), model, Floor(said.floor))
        return JSONResponse({"model": model, "floor": said.floor})
    except BadRequest as error:
        return error.response
    except RequestError as error:
        return refused(error)


@router.post("/models/load/{model:path}")
async def load(request: Request, model: str) -> Response:
    """Once, with nobody waiting; keep-warm and eviction are as after a request."""
    the_gate().require(request, Scope.ADMIN)
    try:
        await call_arbiter("load", await _home(model), model)
    except RequestError as error:
        return refused(error)
    return JSONResponse({"model": model})


@router.post("/models/unload/{model:path}")
async def unload(request: Request, model: str) -> Response:
    """Whatever of it is idle; what is in use stays."""
    the_gate().require(request, Scope.ADMIN)
    try:
        capability = await _home(model)
        state = await arbiter_gateway.state()
        mine = [t["ticket"] for t in _own(model, capability, state)]
        for ticket in mine:
            await call_arbiter("unload", TicketId(ticket))
    except RequestError as error:
        return refused(error)
    return JSONResponse({"model": model, "tickets": mine})


@router.post("/models/grow/{model:path}")
async def grow(request: Request, model: str) -> Response:
    """To its `grow_to`, wherever it is resident; it says in the events what came of it."""
    return await _resize(request, model, ModelSize.GROWN)


@router.post("/models/shrink/{model:path}")
async def shrink(request: Request, model: str) -> Response:
    """It gives back what it grew by."""
    return await _resize(request, model, ModelSize.FIRST)


async def _resize(request: Request, model: str, size: ModelSize) -> Response:
    the_gate().require(request, Scope.ADMIN)
    try:
        table = parse_table((await arbiter_gateway.state())["table"], "the arbiter's table")
        found = {m: config for c in table.capabilities.values() for m, config in c.models.items()}
        if model not in found:
            raise UnknownModel(model, "", tuple(sorted(found)))
        if not found[model].grow_to:
            raise BadRequest(f"{model} has no `grow_to`", "model")
        await call_arbiter("resize", Resize(model, size))
    except BadRequest as error:
        return error.response
    except RequestError as error:
        return refused(error)
    return JSONResponse({"model": model, "size": size.value})


@router.post("/pressure")
async def pressure(request: Request) -> Response:
    """Somebody knows that memory is short, for a while."""
    the_gate().require(request, Scope.ADMIN)
    try:
        said = await read_body(request, PressureBody)
        free = None if said.free_bytes is None else Bytes(said.free_bytes)
        level = Level[said.level.upper()]
        event = PressurePushed(said.where, level, free, seconds(said.term_s))
        await call_arbiter("push_pressure", event)
        return JSONResponse(said.model_dump())
    except BadRequest as error:
        return error.response
    except RequestError as error:
        return refused(error)


async def _home(model: str) -> str:
    """Its capability, by the arbiter's table; unknown models it refuses itself."""
    state = await arbiter_gateway.state()
    return parse_table(state["table"], "the arbiter's table").homes.get(model, "")


async def read_body(request: Request, shape: type[T]) -> T:
    """Raises BadRequest naming the field."""
    raw = await bounded_body(request, MOST_BYTES)
    try:
        return shape.model_validate_json(raw)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in problem["loc"])
        raise BadRequest(f"`{field}`: {problem['msg']}", field or None) from error
