"""Exception handlers: every error of the front, FastAPI's own included, in OpenAI's form."""

from collections.abc import Callable
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from arbiter.errors import RequestError
from deployments import messages
from deployments.config.schema import ConfigError
from deployments.front.inference.request import BadRequest, words_of

CODES = {
    404: "not_found",
    405: "method_not_allowed",
    408: "body_too_slow",
    413: "too_large",
    429: "queue_full",
}


def refused(error: RequestError) -> Response:
    head, body = messages.refusal(error)
    return Response(body, head.status, head.headers)


async def on_request_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return refused(error)


async def on_config_error(_: Request, error: Exception) -> Response:
    """Settings that are read from a request."""
    return refused(BadRequest(str(error), "settings"))


async def on_invalid(_: Request, error: Exception) -> Response:
    """A body, path or query that its type refuses: 400, naming the field, as OpenAI has it."""
    assert isinstance(error, RequestValidationError)
    problem = error.errors()[0]
    place, *path = problem["loc"]
    if problem["type"] == "json_invalid":
        return refused(BadRequest("the body is not JSON", None))
    if place == "body":
        path = _of_body(path, error.body, is_missing=problem["type"] == "missing")
    field = ".".join(str(part) for part in path) or str(place)
    return refused(BadRequest(f"`{field}`: {words_of(problem)}", field))


def _of_body(path: list[Any], body: Any, *, is_missing: bool) -> list[Any]:
    """The path of a field without what pydantic puts into it: names of a union's branches."""
    parts, at = [], body
    for part in path:
        try:
            at = at[part]
        except (LookupError, TypeError):
            continue
        parts.append(part)
    return [*parts, *path[-1:]] if is_missing else parts


async def on_http_exception(request: Request, error: Exception) -> Response:
    """An unknown path, a wrong method, a body beyond its bound."""
    assert isinstance(error, HTTPException)
    status, path = error.status_code, request.url.path
    texts = {
        404: f"no route {request.method} {path}; GET /openapi.json lists all",
        405: f"{path} does not take {request.method}",
    }.get(status, error.detail)
    code = CODES.get(status, "invalid_request")
    body = messages.error_body(texts, kind=messages.kind_of(status), code=code)
    headers = {"content-type": "application/json", **(error.headers or {})}
    return Response(body, status, headers)


async def on_failure(_: Request, error: Exception) -> Response:
    """What nothing else has caught; Starlette raises it again, so that it is logged."""
    message = f"the front failed ({type(error).__name__}); its log has the traceback"
    body = messages.error_body(message, kind=messages.kind_of(500), code="internal_error")
    return Response(body, 500, {"content-type": "application/json"})


HANDLERS: dict[int | type[Exception], Callable[[Request, Exception], Any]] = {
    RequestError: on_request_error,
    ConfigError: on_config_error,
    RequestValidationError: on_invalid,
    HTTPException: on_http_exception,
    Exception: on_failure,
}
