"""OpenAI's batches: many requests of one file, run when interactive work leaves room."""

import uuid
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, BeforeValidator, Field

from deployments.front.dependencies import Inferrer, State
from deployments.front.inference.request import BadRequest
from deployments.front.openapi import refusals
from deployments.front.routes.files import EXPIRES_LEAST_S, EXPIRES_MOST_S, page
from deployments.front.routes.json_route import JsonRoute
from deployments.jobs.batch_store import Batch, NewBatch
from deployments.jobs.file_store import BATCH_KEPT_S
from deployments.jobs.validation import ENDPOINTS, FIELD_MOST, window_s

METADATA_MOST = 16  # entries, as OpenAI has it

router = APIRouter(
    prefix="/v1/batches", route_class=JsonRoute, responses=refusals(400, 401, 403, 404, 503)
)


class ExpiresAfter(BaseModel):
    """When the output and error files go, after they were made."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=EXPIRES_LEAST_S, le=EXPIRES_MOST_S)]


def _few(metadata: object) -> object:
    """Raises ValueError for more entries than OpenAI allows."""
    if isinstance(metadata, dict) and len(metadata) > METADATA_MOST:
        raise ValueError(f"{len(metadata)} entries; at most {METADATA_MOST}")
    return metadata


class BatchBody(BaseModel):
    """The body of `POST /v1/batches`."""

    input_file_id: Annotated[str, Field(min_length=1, max_length=128)]
    endpoint: str
    completion_window: str  # OpenAI takes `24h`; here any number of s, m, h, d up to 14 days
    # The bound comes before what each has to be: pydantic makes an error of each that is wrong.
    metadata: (
        Annotated[
            dict[
                Annotated[str, Field(max_length=64)],
                Annotated[str, Field(max_length=512)],
            ],
            Field(max_length=METADATA_MOST),
            BeforeValidator(_few),
        ]
        | None
    ) = None
    output_expires_after: ExpiresAfter | None = None


@router.post("", responses=refusals(429, 507))
async def create(body: BatchBody, caller: Inferrer, front: State) -> dict[str, Any]:
    """Begins to validate the input file. Raises Refused, TenantLimitReached."""
    within_s = window_s(body.completion_window)
    if within_s is None:
        message = f"`completion_window`: {_told(body.completion_window)} is no time; write such as"
        raise BadRequest(f"{message} `24h`, at most `14d`", "completion_window")
    if body.endpoint not in ENDPOINTS:
        allowed = ", ".join(ENDPOINTS)
        message = f"`endpoint`: {_told(body.endpoint)} runs in no batch; write one of {allowed}"
        raise BadRequest(message, "endpoint")
    expiry = body.output_expires_after
    output, errors = (f"file-{uuid.uuid4().hex}" for _ in range(2))
    new = NewBatch(
        f"batch_{uuid.uuid4().hex}",
        caller.tenant,
        body.endpoint,
        body.input_file_id,
        body.completion_window,
        float(within_s),
        output,
        errors,
        metadata=body.metadata,
        output_kept_s=float(expiry.seconds) if expiry else BATCH_KEPT_S,
    )
    new_batch: Batch = await front.jobs.call("create_batch", new)
    return new_batch.plain


def _told(value: str) -> str:
    """What a client sent, clipped to what a person reads."""
    return repr(value if len(value) <= FIELD_MOST else f"{value[:FIELD_MOST]}...")


@router.get("")
async def batches(
    caller: Inferrer,
    front: State,
    after: str = "",
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> dict[str, Any]:
    """The tenant's batches, the newest first."""
    batches: list[Batch] = await front.jobs.call("batches", caller.tenant, after, limit + 1)
    return page([batch.plain for batch in batches], limit)


@router.get("/{batch_id}")
async def batch(batch_id: str, caller: Inferrer, front: State) -> dict[str, Any]:
    """Raises NotFound."""
    batch: Batch = await front.jobs.call("batch", caller.tenant, batch_id)
    return batch.plain


@router.post("/{batch_id}/cancel")
async def cancel(batch_id: str, caller: Inferrer, front: State) -> dict[str, Any]:
    """Ends what runs of it; the results so far stay. Raises NotFound."""
    batch: Batch = await front.jobs.call("cancel_batch", caller.tenant, batch_id)
    return batch.plain
