"""Typed errors from what the front tells of them: the class by the `code`, and with it the message,
the status, the field and when to come back. The same over HTTP and by handle, because both carry
the front's own response.

    try:
        client.chat("Hello", model="no-such-model")
    except UnknownModel as error:
        print(error, error.param)

An error's further numbers stay in its message: OpenAI's form has no place for them.
"""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from arbiter import errors
from arbiter.errors import RequestError
from deployments.front.auth import Denied
from deployments.front.request import BadRequest
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


class ToldError(RequestError):
    """An error as the front told it. Its class is also that of its code."""

    def __init__(
        self,
        message: str,
        status: int,
        code: str,
        param: str | None,
        retry_after_s: float | None,
    ) -> None:
        Exception.__init__(self, message)  # not the fields of its code's class
        self.message, self.status_code, self.code = message, status, code
        self.param, self.retry_after_s = param, retry_after_s

    def values(self) -> tuple[Any, ...]:
        return self.message, self.status_code, self.code, self.param, self.retry_after_s

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return made, self.values()


def made(
    message: str, status: int, code: str, param: str | None, retry_after_s: float | None
) -> ToldError:
    """The error of that code; pickled, it is made again by this."""
    return _class_of(code, status)(message, status, code, param, retry_after_s)


@cache
def _class_of(code: str, status: int) -> type[ToldError]:
    kind = _by_code().get(code) or BY_STATUS.get(status)
    if kind is None:
        return ToldError
    return type(kind.__name__, (ToldError, kind), {"__module__": kind.__module__})


@cache
def _by_code() -> dict[str, type[RequestError]]:
    ours: list[type[RequestError]] = [BadRequest, NotServedHere]
    for found in vars(errors).values():
        if isinstance(found, type) and issubclass(found, RequestError) and "code" in vars(found):
            ours.append(found)
    return {kind.code: kind for kind in ours}


def told(status: int, headers: Mapping[str, str], body: bytes) -> ToldError:
    """What a response with such a status means."""
    try:
        error = json.loads(body)["error"]
        message = str(error["message"])
    except (ValueError, KeyError, TypeError):
        said = body.decode(errors="replace")[:500]
        return made(f"HTTP {status}: {said}", status, "", None, _seconds(headers))
    return _of(error, message, status, _seconds(headers))


def told_in_stream(event: Mapping[str, Any]) -> ToldError | None:
    """The refusal that an event of a stream is; its status was sent before. None: it is none."""
    error = event.get("error")
    if not isinstance(error, Mapping):
        return None
    code = error.get("code")
    kind = _by_code().get(str(code), RequestError)
    said = [error.get("status"), code, kind.status_code]
    status = next(each for each in said if isinstance(each, int))
    return _of(error, str(error.get("message")), status, kind.retry_after_s)


def _of(
    error: Mapping[str, Any], message: str, status: int, retry_after_s: float | None
) -> ToldError:
    param, code = error.get("param"), str(error.get("code") or "")
    return made(message, status, code, param if isinstance(param, str) else None, retry_after_s)


def _seconds(headers: Mapping[str, str]) -> float | None:
    after = headers.get("retry-after", "")
    return float(after) if after.isdigit() else None
