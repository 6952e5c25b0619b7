"""OpenAI's files: uploaded for batches, read back as their results; each tenant has its own."""

import uuid
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from starlette.datastructures import FormData, UploadFile

from deployments.front.dependencies import FrontState, Inferrer, State
from deployments.front.inference.relay import ClosingStream, after_first
from deployments.front.inference.request import FORM, BadRequest
from deployments.front.middleware.body_limit import FORM_BYTES
from deployments.front.openapi import refusals
from deployments.front.routes.uploads import read_form
from deployments.jobs.bodies import PIECE_BYTES, folder_of
from deployments.jobs.client import JobsClient
from deployments.jobs.database import state_path, storage_error
from deployments.jobs.file_store import PURPOSES, File, NewFile

router = APIRouter(prefix="/v1/files", responses=refusals(400, 401, 403, 404, 503))

EXPIRES_LEAST_S, EXPIRES_MOST_S = 3_600, 30 * 86_400  # OpenAI's bounds
FIELDS_MOST = 8  # purpose and two of expires_after; clients may send what we do not read
NAME_MOST = 255  # characters: what file systems take
FILE_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            FORM: {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"enum": list(PURPOSES)},
                        "expires_after[anchor]": {"enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer"},
                    },
                }
            }
        },
    }
}


@router.post("", openapi_extra=FILE_FORM, responses=refusals(409, 413, 429, 507))
async def upload(request: Request, caller: Inferrer, front: State) -> dict[str, Any]:
    """Keeps a file, of 512 MiB at most and of 200 MiB for a batch. What finds no room by its
    declared length is refused unread. Raises StorageFull, TenantLimitReached."""
    if not request.headers.get("content-type", "").lower().startswith(FORM):
        raise BadRequest(f"this route takes {FORM}", None)
    folder = folder_of(state_path(front.table.arbiter.state_file))
    with front.uploads.one(caller.tenant, front.table.jobs.tenant_uploads):
        await front.jobs.call("check_upload", caller.tenant, _least_bytes(request))
        try:
            form = await read_form(request, folder, FIELDS_MOST)
            try:
                return (await _keep(form, caller.tenant, front)).plain
            finally:
                await form.close()
        except OSError as error:  # the parser writes what is large to a file of its own
            raise storage_error(folder, error) from error


def _least_bytes(request: Request) -> int:
    """Returns the least size of the file within the form, by the length that the client declares;
    at least 1."""
    declared = request.headers.get("content-length", "")
    return max(1, int(declared) - FORM_BYTES) if declared.isdecimal() else 1


async def _keep(form: FormData, tenant: str, front: FrontState) -> File:
    file, purpose = form.get("file"), form.get("purpose")
    if not isinstance(file, UploadFile):
        raise BadRequest("`file`: a file is required", "file")
    if purpose not in PURPOSES:
        raise BadRequest(f"`purpose`: one of {', '.join(PURPOSES)}", "purpose")
    name = "".join(c for c in file.filename or "" if c.isprintable())[-NAME_MOST:] or "file"
    size, after_s = file.size or 0, _expires_after_s(form)
    new = NewFile(f"file-{uuid.uuid4().hex}", tenant, name, str(purpose), size, after_s)
    try:
        return await _store(file, new, front.jobs)
    except BaseException:  # its client may have left: it must not count against its tenant
        front.jobs.begin("abandon_file", new.id)
        raise


async def _store(file: UploadFile, new: NewFile, jobs: JobsClient) -> File:
    await jobs.call("begin_file", new)
    offset = 0
    while piece := await file.read(PIECE_BYTES):
        await jobs.call("append_file", new.id, offset, piece)
        offset += len(piece)
    stored: File = await jobs.call("finish_file", new.id)
    return stored


def _expires_after_s(form: FormData) -> float | None:
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise BadRequest("`expires_after[anchor]`: `created_at`", "expires_after[anchor]")
    field = "expires_after[seconds]"
    if not (
        isinstance(seconds, str) and seconds.isascii() and seconds.isdecimal() and len(seconds) < 10
    ):
        raise BadRequest(f"`{field}`: a number of seconds", field)
    if not EXPIRES_LEAST_S <= int(seconds) <= EXPIRES_MOST_S:
        raise BadRequest(f"`{field}`: {EXPIRES_LEAST_S} to {EXPIRES_MOST_S}", field)
    return float(seconds)


@router.get("")
async def files(
    caller: Inferrer,
    front: State,
    purpose: str | None = None,
    after: str = "",
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    """The tenant's files."""
    page_of = caller.tenant, purpose, after, limit + 1, order
    files: list[File] = await front.jobs.call("files", *page_of)
    return page([file.plain for file in files], limit)


def page(rows: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """OpenAI's list, of one row more than the limit where there is more."""
    data = rows[:limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(rows) > limit,
    }


@router.get("/{file_id}")
async def file(file_id: str, caller: Inferrer, front: State) -> dict[str, Any]:
    """Raises NotFound."""
    file: File = await front.jobs.call("file", caller.tenant, file_id)
    return file.plain


@router.delete("/{file_id}", responses=refusals(409))
async def delete(file_id: str, caller: Inferrer, front: State) -> dict[str, Any]:
    """Raises NotFound; Conflict while a batch reads it."""
    await front.jobs.call("delete_file", caller.tenant, file_id)
    return {"id": file_id, "object": "file", "deleted": True}


@router.get("/{file_id}/content", response_class=Response, responses=refusals(429))
async def content(file_id: str, caller: Inferrer, front: State) -> Response:
    """Its bytes, in pieces. Raises NotFound; TenantLimitReached, QueueFull where too many read."""
    async with AsyncExitStack() as stack:
        stack.enter_context(front.reader(caller.tenant))
        file: File = await front.jobs.call("file", caller.tenant, file_id)
        headers, kind = {"content-length": str(file.bytes)}, "application/octet-stream"
        pieces = await after_first(_pieces(front, file))
        return ClosingStream(pieces, headers=headers, media_type=kind, holds=stack.pop_all())


async def _pieces(front: FrontState, file: File) -> AsyncGenerator[bytes, None]:
    offset = 0
    while offset < file.bytes:
        piece = await front.jobs.call("file_content", file.tenant, file.id, offset)
        if not piece:
            return  # shorter than its row says: the response breaks off
        offset += len(piece)
        yield piece
