"""Typed errors from what the front tells of them (arbiter.response_errors), with the classes of the
front's own refusals. The same over HTTP and by handle, because both carry the front's own response.

    try:
        client.chat("Hello", model="no-such-model")
    except UnknownModel as error:
        print(error, error.param)
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from arbiter import response_errors
from arbiter.errors import RequestError
from arbiter.response_errors import ResponseError
from deployments.front.access.auth import Denied
from deployments.front.inference.request import BadRequest
from deployments.messages import NotServedHere

# Codes of the front's that say no more than their status does: of the engines, too.
BY_STATUS: dict[int, type[RequestError]] = {
    400: BadRequest,
    401: Denied,
    403: Denied,
    413: BadRequest,
    415: BadRequest,
}


class FrontUnreachable(RequestError):
    """No front answers, or it went away before the answer was whole."""

    status_code, code, retry_after_s = 503, "front_unreachable", 2.0  # a front starts in about two

    def __init__(self, where: str, cause: str) -> None:
        super().__init__(where, cause)
        self.where, self.cause = where, cause

    def __str__(self) -> str:
        return f"{self.where} does not answer, or broke off ({self.cause}); is it served there?"


def _kind_of(code: str, status: int) -> type[RequestError]:
    return _by_code().get(code) or BY_STATUS.get(status) or RequestError


@cache
def _by_code() -> dict[str, type[RequestError]]:
    return {
        BadRequest.code: BadRequest,
        NotServedHere.code: NotServedHere,
    } | response_errors.kinds()


def error_of_code(
    message: str, status: int, code: str, param: str | None, retry_after_s: float | None
) -> ResponseError:
    """The error of that code."""
    return response_errors.class_of(_kind_of(code, status))(
        message, status, code, param, retry_after_s
    )


def error_of_response(status: int, headers: Mapping[str, str], body: bytes) -> ResponseError:
    """What a response with such a status means."""
    return response_errors.error_of_response(status, headers, body, _kind_of)


def error_of_event(event: Mapping[str, Any]) -> ResponseError | None:
    """The refusal that an event of a stream is; its status was sent before. None: it is none."""
    error = event.get("error")
    if not isinstance(error, Mapping):
        return None
    code = error.get("code")
    kind = _by_code().get(str(code), RequestError)
    candidates = [error.get("status"), code, kind.status_code]
    status = next(each for each in candidates if isinstance(each, int))
    message, after_s = str(error.get("message")), kind.retry_after_s
    return response_errors.of_object(error, message, status, after_s, _kind_of)
