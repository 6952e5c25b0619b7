"""What /openapi.json says of a route beyond FastAPI's own: the body that it takes, and how it may
refuse a request.
"""

from typing import Any

from deployments.front.inference.schemas import PathKind, Schema

_TAKES = {
    PathKind.TEXT: ("application/json",),
    PathKind.JSON: ("application/json",),
    PathKind.FORM: ("multipart/form-data",),
    PathKind.ANY: ("application/json", "multipart/form-data"),
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}
_REFUSALS = {
    400: "a field is wrong; `param` names it",
    401: "this needs an API key",
    403: "the key lacks a scope, or the Host or Origin is not allowed",
    404: "no such model",
    408: "the body came too slowly",
    409: "in conflict with the present state; the message says which",
    410: "an operator cancelled it while it waited",
    413: "the body is too large",
    415: "the body is encoded; send it as it is",
    429: "a queue is full; see Retry-After",
    501: "not served here; the message says what to do",
    502: "a remote or an adapter's origin failed",
    503: "cannot be served now; see Retry-After",
    504: "a remote did not answer by the request's deadline",
    507: "larger than the whole budget",
}
_OF_MODELS = tuple(status for status in _REFUSALS if status != 501)


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route: OpenAI's error object for each status."""
    error = {"content": {"application/json": {"schema": ERROR}}}
    return {status: {"description": _REFUSALS[status], **error} for status in statuses}


def described(schema: Schema) -> dict[str, Any]:
    """Arguments of a FastAPI route that takes such a body."""
    fields = {"schema": schema.body.model_json_schema()}
    body = {"required": True, "content": dict.fromkeys(_TAKES[schema.kind], fields)}
    return {"openapi_extra": {"requestBody": body}, "responses": refusals(*_OF_MODELS)}
