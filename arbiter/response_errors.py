"""Typed errors from what an HTTP answer tells of them: the class by the `code`, and with it the
message, the status, the field and when to come back.

An error's further numbers stay in its message: OpenAI's form has no place for them.
"""

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar

from arbiter import errors
from arbiter.errors import RequestError

KindOf = Callable[[str, int], type[RequestError]]  # by code and status


class ResponseError(RequestError):
    """Says what error the front told. Its class is also that of its code."""

    kind: ClassVar[type[RequestError]] = RequestError

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
        return _rebuilt, (self.kind, self.values())


_CLASSES: dict[type[RequestError], type[ResponseError]] = {RequestError: ResponseError}


def class_of(kind: type[RequestError]) -> type[ResponseError]:
    """Returns the class whose errors are both told by the front and of this kind."""
    if kind not in _CLASSES:
        about = {"__module__": kind.__module__, "kind": kind}
        _CLASSES.setdefault(kind, type(kind.__name__, (ResponseError, kind), about))
    return _CLASSES[kind]


def _rebuilt(kind: type[RequestError], values: tuple[Any, ...]) -> ResponseError:
    return class_of(kind)(*values)


@cache
def kinds() -> dict[str, type[RequestError]]:
    """Returns the refusals of this package by their codes."""
    classes = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    return {k.code: k for k in classes if issubclass(k, RequestError) and "code" in vars(k)}


def error_of_response(
    status: int, headers: Mapping[str, str], body: bytes, kind_of: KindOf
) -> ResponseError:
    """Returns the error that a response with such a status means."""
    after = headers.get("retry-after", "")
    retry_after_s = float(after) if after.isdigit() else None
    try:
        error = json.loads(body)["error"]
        message = str(error["message"])
    except (ValueError, KeyError, TypeError):
        text = body.decode(errors="replace")[:500]
        kind = kind_of("", status)
        return class_of(kind)(f"HTTP {status}: {text}", status, "", None, retry_after_s)
    return of_object(error, message, status, retry_after_s, kind_of)


def of_object(
    error: Mapping[str, Any],
    message: str,
    status: int,
    retry_after_s: float | None,
    kind_of: KindOf,
) -> ResponseError:
    """Returns the error that OpenAI's error object describes."""
    param, code = error.get("param"), str(error.get("code") or "")
    param = param if isinstance(param, str) else None
    return class_of(kind_of(code, status))(message, status, code, param, retry_after_s)


def may_pass(refusal: RequestError) -> bool:
    """Says whether an error may pass: the arbiter is away, or what answered was not the front in
    order."""
    nameless = refusal.code in ("", "internal_error")
    is_away = isinstance(refusal, errors.ArbiterUnavailable)
    return is_away or (refusal.status_code >= 500 and nameless)
