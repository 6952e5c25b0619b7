"""From an HTTP request to a call, and from a refusal to a response. Every 4xx names its field."""

import json
import uuid

from fastapi import Request
from fastapi.responses import Response

from arbiter.errors import RequestError
from deployments import wire

# One request body; larger ones are refused before they are read. OpenAI's own limit for JSON
# bodies is of this order, and image and audio uploads get their own routes.
MAX_BODY_BYTES = 32 << 20

# Headers that travel on to the engine: what its OpenAI layer reads, and nothing else.
FORWARDED = ("content-type", "accept", "x-request-id")


class BadRequest(Exception):
    """A request that goes no further; carries its 4xx."""

    def __init__(self, message: str, param: str | None, status: int = 400) -> None:
        super().__init__(message, param, status)
        body = wire.error_body(
            message, kind=wire.kind_of(status), code="invalid_request", param=param
        )
        self.response = Response(body, status, {"content-type": "application/json"})


async def read_call(request: Request) -> wire.Call:
    """The call within an HTTP request. Raises BadRequest naming the field."""
    body = await _bounded_body(request)
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}", None) from error
    if not isinstance(fields, dict):
        raise BadRequest("the body must be a JSON object", None)
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise BadRequest("`model` must be the name of a model (GET /v1/models)", "model")
    headers = {k: request.headers[k] for k in FORWARDED if k in request.headers}
    request_id = request.headers.get("x-request-id", "")
    if not (0 < len(request_id) <= 128 and request_id.isprintable()):
        request_id = f"req-{uuid.uuid4().hex[:16]}"
    headers["x-request-id"] = request_id
    return wire.Call(request.url.path, body, headers, request_id, model)


async def _bounded_body(request: Request) -> bytes:
    too_large = BadRequest(f"the body is larger than {MAX_BODY_BYTES} bytes", None, 413)
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise too_large
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise too_large
        chunks.append(chunk)
    return b"".join(chunks)


def refused(error: RequestError) -> Response:
    head, body = wire.refusal(error)
    return Response(body, head.status, head.headers)
