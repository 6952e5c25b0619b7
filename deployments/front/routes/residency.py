"""Where models are and where they are to be, and memory that is short, over HTTP (D8, C5)."""

import uuid
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import Field

from arbiter.client.admin import CALL_S, call_arbiter
from arbiter.core.events import PressurePushed
from arbiter.core.types import Floor, Level, ModelName
from arbiter.errors import UnknownModel
from arbiter.protocol.messages import ModelSize, Resize
from arbiter.units import Bytes, TicketId, seconds
from deployments.config.capability_section import MERGED
from deployments.config.fields import Strict
from deployments.config.schema import Table
from deployments.front.dependencies import Admin, State, Viewer
from deployments.front.inference.request import BadRequest
from deployments.front.openapi import refusals
from deployments.front.routes.json_route import JsonRoute
from deployments.front.status import arbiter_gateway
from deployments.front.status.arbiter_gateway import ArbiterState
from deployments.monitoring.view import ORDER

router = APIRouter(
    prefix="/arbiter", route_class=JsonRoute, responses=refusals(400, 401, 403, 404, 503)
)
LEVELS = {"resident": "device", "draining": "device", "loading": "loading", "asleep": "host"}


class FloorBody(Strict):
    """The body of `PUT /arbiter/residency/{model}`."""

    floor: Literal["device", "host", "cold"]


class PressureBody(Strict):
    """The body of `POST /arbiter/pressure`."""

    where: str = Field(min_length=1, max_length=128)  # a device or a node
    level: Literal["nominal", "low", "critical"]
    free_bytes: int | None = Field(None, ge=0)
    term_s: float = Field(60.0, gt=0, le=3600)  # C5


class CompactBody(Strict):
    """The body of `POST /arbiter/compact`."""

    models: list[str] = Field([], max_length=1_000)  # none: all that hold more than they need
    wait_s: float = Field(20.0, ge=0, le=600)  # below the 30 s after which clients give up


def picture(table: Table, state: ArbiterState) -> dict[str, Any]:
    """Each model's level, floor, tickets, host copy, the load in flight, and its hours."""
    return {
        model: _model(model, capability, state) for model, capability in sorted(table.homes.items())
    }


def _model(model: str, capability: str, state: ArbiterState) -> dict[str, Any]:
    mine = sorted(state.of_model(capability, model), key=lambda row: ORDER.index(row.state))
    loading = [row.in_state_s for row in mine if row.state == "loading"]
    return {
        "capability": capability,
        "floor": state.floors.get((capability, model), "cold"),
        "level": LEVELS.get(mine[0].state, "cold") if mine else "cold",
        "tickets": {row.ticket: row.state for row in mine},
        "host_copy_bytes": sum(row.host_bytes for row in mine),
        "loading_s": loading[0] if loading else None,
        "hours": state.hours_of(capability, model),
    }


@router.get("/residency")
async def residency(front: State, _: Viewer) -> dict[str, Any]:
    """Level, floor, tickets and host copy of each model, and the seconds of a load in flight."""
    return {"models": picture(front.table, await arbiter_gateway.state())}


@router.get("/host_copies")
async def host_copies(_: Viewer) -> dict[str, Any]:
    """Copies of models' files in host RAM that engines of a node share: whose files, who uses them,
    and the lease that they are on the books with."""
    return {"copies": (await arbiter_gateway.state()).plain["copies"]}


@router.delete("/host_copies/{key}")
async def drop_host_copy(key: str, _: Admin) -> dict[str, Any]:
    """Drops it on every node. `is_gone` false: it leaves with the last engine that has it open."""
    return {"key": key, "is_gone": await call_arbiter("drop_host_copy", key)}


@router.put("/residency/{model:path}")
async def set_floor(model: str, body: FloorBody, front: State, _: Admin) -> dict[str, str]:
    """`device`: load it now and keep it. `host`: asleep at least. `cold`: anywhere."""
    await call_arbiter("set_floor", _home(front.table, model), model, Floor(body.floor))
    return {"model": model, "floor": body.floor}


@router.post("/models/load/{model:path}")
async def load(model: str, front: State, _: Admin) -> dict[str, str]:
    """Loads it once without a request; keep-warm and eviction are as after a request."""
    await call_arbiter("load", _home(front.table, model), model)
    return {"model": model}


@router.post("/models/unload/{model:path}")
async def unload(model: str, front: State, _: Admin) -> dict[str, Any]:
    """Unloads its idle tickets; those that load leave once loaded and idle; those in use stay. Of a
    model or of its merged copy, `MODEL+merged`."""
    capability = _home(front.table, model.removesuffix(MERGED))
    mine = [row.ticket for row in (await arbiter_gateway.state()).of_model(capability, model)]
    for ticket in mine:
        await call_arbiter("unload", TicketId(ticket))
    return {"model": model, "tickets": mine}


@router.post("/models/grow/{model:path}")
async def grow(model: str, front: State, _: Admin) -> dict[str, str]:
    """Grows it to its `grow_to`, wherever it is resident; the events tell the result."""
    return await _resize(front.table, model, ModelSize.GROWN)


@router.post("/models/shrink/{model:path}")
async def shrink(model: str, front: State, _: Admin) -> dict[str, str]:
    """Gives back what it grew by."""
    return await _resize(front.table, model, ModelSize.FIRST)


async def _resize(table: Table, model: str, size: ModelSize) -> dict[str, str]:
    home = _home(table, model)
    if not table.capabilities[home].models[model].grow_to:
        raise BadRequest(f"{model} has no `grow_to`", "model")
    await call_arbiter("resize", Resize(model, size))
    return {"model": model, "size": size.value}


@router.post("/compact")
async def compact(body: CompactBody, front: State, _: Admin) -> dict[str, Any]:
    """Frees the named idle models and loads them again, or without names all that hold more than
    they need. Answers once that is done, with the count; after `wait_s`, with how far it is."""
    names = tuple(ModelName(_home(front.table, model), model) for model in body.models)
    within_s = body.wait_s + CALL_S
    call = uuid.uuid4().hex, names, body.wait_s
    reply = await call_arbiter("compact", *call, within_s=within_s)
    spared = [{"model": s.model, "ticket": s.ticket, "why": s.why} for s in reply.spared]
    return {
        "count": reply.freed_count,
        "freed_bytes": reply.freed_bytes,
        "spared": spared,
        "is_finished": reply.is_finished,
    }


@router.post("/pressure")
async def pressure(body: PressureBody, _: Admin) -> dict[str, Any]:
    """An outside monitor reports that memory is short, for a term: of a device, or of all devices
    of a node."""
    devices = (await arbiter_gateway.state()).plain["devices"]
    places = sorted({row[name] for row in devices for name in ("node", "device")})
    if body.where not in places:
        there_are = ", ".join(places) or "none yet"
        refusal = f"`where`: no device or node {body.where!r}; there are: {there_are}"
        raise BadRequest(refusal, "where", 404)
    free = None if body.free_bytes is None else Bytes(body.free_bytes)
    level = Level[body.level.upper()]
    event = PressurePushed(body.where, level, free, seconds(body.term_s))
    await call_arbiter("push_pressure", event)
    return body.model_dump()


def _home(table: Table, model: str) -> str:
    """Returns its capability. Raises UnknownModel."""
    if (home := table.homes.get(model)) is None:
        raise UnknownModel(model, "", tuple(sorted(table.homes)))
    return home
