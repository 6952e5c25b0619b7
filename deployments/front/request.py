"""From an HTTP request to a call, and from a refusal to a response. Every 4xx names its field."""

import json
import uuid
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from pydantic import ValidationError

from arbiter.core.types import Priority
from arbiter.errors import RequestError
from deployments import messages
from deployments.config.schema import ModelConfig, Profile
from deployments.front.keys import DEFAULT_TENANT
from deployments.front.model_names import Target
from deployments.front.schemas import PRIVATE, SHAPES, Body, Generates

# One request body; larger ones are refused before they are read. OpenAI's own limit for JSON
# bodies is of this order, and image and audio uploads get their own routes.
MAX_BODY_BYTES = 32 << 20

# Headers that travel on to the engine: what its OpenAI layer reads, and nothing else.
FORWARDED = ("content-type", "accept")

_EXTENSIONS = sorted(name for name in Body.model_fields if name.startswith("x_"))
_NO_PROFILE = Profile()


class BadRequest(Exception):
    """A request that goes no further; carries its 4xx."""

    def __init__(self, message: str, param: str | None, status: int = 400) -> None:
        super().__init__(message, param, status)
        body = messages.error_body(
            message, kind=messages.kind_of(status), code="invalid_request", param=param
        )
        self.response = Response(body, status, {"content-type": "application/json"})


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request as it was understood."""

    path: str
    request_id: str
    headers: dict[str, str]
    raw: bytes
    fields: dict[str, Any]  # the body as it came
    checked: Body
    profile: Profile

    @property
    def model(self) -> str:
        """By the name the profile gives it, if any."""
        return self.profile.aliases.get(self.checked.model, self.checked.model)

    @property
    def priority(self) -> Priority | None:
        """As asked for by the client or its profile."""
        word = self.checked.x_priority or self.profile.priority
        return Priority[word.upper()] if word else None

    @property
    def is_stream(self) -> bool:
        return isinstance(self.checked, Generates) and self.checked.stream is True


async def read(request: Request, profiles: dict[str, Profile]) -> ParsedRequest:
    """Raises BadRequest naming the field."""
    raw = await bounded_body(request)
    fields = _object(raw)
    path = request.url.path
    if private := sorted(PRIVATE & fields.keys()):
        raise BadRequest(f"`{private[0]}` is not for clients", private[0])
    said = {
        name: value
        for name in _EXTENSIONS
        if (value := request.headers.get(name.replace("_", "-"))) is not None
    }
    checked = _checked(path, said | fields)
    headers = {k: request.headers[k] for k in FORWARDED if k in request.headers}
    profile = profiles.get(checked.x_client_id or "", _NO_PROFILE)
    return ParsedRequest(path, _request_id(request), headers, raw, fields, checked, profile)


def call_of(
    asked: ParsedRequest, target: Target, model: ModelConfig, tenant: str
) -> messages.InferenceCall:
    """What goes to the capability: extension fields are out of the body, defaults are in it."""
    checked, profile = asked.checked, asked.profile
    stay = checked.x_stay_warm if checked.x_stay_warm is not None else profile.stay_warm_s
    said = {"x-request-id": asked.request_id, messages.TENANT_HEADER: tenant}
    return messages.InferenceCall(
        asked.path,
        _body(asked, target, model, tenant),
        asked.headers | said,
        asked.request_id,
        target.model,
        checked.x_deadline_s or profile.deadline_s,
        asked.priority or target.priority,
        tenant=tenant,
        client_id=checked.x_client_id or "",
        conversation_id=checked.x_conversation_id,
        stay_warm_s=stay,
        wants_progress=asked.is_stream,
        served=target.served,
    )


def _body(asked: ParsedRequest, target: Target, model: ModelConfig, tenant: str) -> bytes:
    """The client's own bytes wherever nothing had to change."""
    defaults = {**model.defaults, **asked.profile.defaults}
    fields = defaults | {k: v for k, v in asked.fields.items() if not k.startswith("x_")}
    fields["model"] = target.served
    if isinstance(asked.checked, Generates):
        if model.thinking is not None:
            given = fields.get("chat_template_kwargs") or {}
            fields["chat_template_kwargs"] = {"enable_thinking": model.thinking} | given
        if tenant != DEFAULT_TENANT:
            fields["cache_salt"] = tenant  # what one tenant's prompts left is no other's to find
    return asked.raw if fields == asked.fields else json.dumps(fields).encode()


def _object(raw: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}", None) from error
    if not isinstance(fields, dict):
        raise BadRequest("the body must be a JSON object", None)
    return fields


def _checked(path: str, fields: dict[str, Any]) -> Body:
    try:
        return SHAPES[path].model_validate(fields)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        # A union names its branches in the path; the field itself comes first.
        field = str(problem["loc"][0])
        hint = " (GET /v1/models lists them)" if field == "model" else ""
        raise BadRequest(f"`{field}`: {problem['msg']}{hint}", field) from error


def _request_id(request: Request) -> str:
    given = request.headers.get("x-request-id", "")
    if 0 < len(given) <= 128 and given.isascii() and given.isprintable():
        return given
    return f"req-{uuid.uuid4().hex[:16]}"


async def bounded_body(request: Request, most_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Raises BadRequest as soon as it is larger, having kept no more than that."""
    too_large = BadRequest(f"the body is larger than {most_bytes} bytes", None, 413)
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdecimal() and int(declared) > most_bytes:
        raise too_large
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > most_bytes:
            raise too_large
        chunks.append(chunk)
    return b"".join(chunks)


def refused(error: RequestError) -> Response:
    head, body = messages.refusal(error)
    return Response(body, head.status, head.headers)
