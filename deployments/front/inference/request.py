"""From the bytes and headers of a request to an InferenceCall. Knows no HTTP server, so that
routes, jobs and a Python client can share it. Every 4xx names the field at fault.
"""

import json
import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from arbiter.core.types import Priority
from arbiter.errors import RequestError
from arbiter.pool.layout import TERMS_S, Term
from arbiter.units import DEFAULT_TENANT
from deployments import messages
from deployments.config.fields import USUAL, KvTerm
from deployments.config.front_section import Profile
from deployments.config.model_section import ModelConfig
from deployments.front.inference import stable_prefix
from deployments.front.inference.kv_use import key_of
from deployments.front.inference.model_names import Target
from deployments.front.inference.pictures import BadPart, PictureCheck
from deployments.front.inference.schemas import OF_THE_TABLE, PRIVATE, SCHEMAS, Body, PathKind
from deployments.front.inference.stable_prefix import BadMark, StableRun
from deployments.requests.multipart import BadForm, read_fields
from deployments.routing.pieces import pieces_of

# Headers that go on to the engine: those that its HTTP layer reads.
FORWARDED = ("content-type", "accept")
FORM, JSON = "multipart/form-data", "application/json"
NEARLY = 0.85  # the likeness of a misspelt name to the name meant, as difflib measures it
# Of the unknown extensions of a body, how many are compared, and up to how many characters: each
# takes 0.1 ms, and a body may hold a million.
MISSPELT_MOST, MISSPELT_LENGTH = 32, 40

_EXTENSIONS = sorted(name for name in Body.model_fields if name.startswith("x_"))
_NO_PROFILE = Profile()
M = TypeVar("M", bound=BaseModel)


class BadRequest(RequestError):
    """A request that the front refuses itself: 400, unless `status` says otherwise."""

    code = "invalid_request"

    def __init__(self, message: str, param: str | None, status: int = 400) -> None:
        super().__init__(message, param, status)
        self.message, self.param, self.status_code = message, param, status

    def __str__(self) -> str:
        return self.message


class _OfHeaders(BaseModel):
    """The extension of which the header counts also where the body has the field."""

    x_local_only: bool = False


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request as the front understood it."""

    path: str
    request_id: str
    headers: dict[str, str]  # those that go on to the engine
    raw: bytes
    fields: dict[str, Any] | None  # of a JSON body; None: a form, which the engine gets as it came
    checked: Body
    profile: Profile
    kind: PathKind
    stable_run: StableRun | None = None  # what its sender marked as stable
    key: str = ""  # of its KV (deployments.front.inference.kv_use); empty: it has none

    @property
    def model(self) -> str:
        """The name asked for, after the aliases of the client's profile."""
        return self.profile.aliases.get(self.checked.model, self.checked.model)

    @property
    def priority(self) -> Priority | None:
        """The priority that the client or its profile asks for."""
        word = self.checked.x_priority or self.profile.priority
        return Priority[word.upper()] if word else None

    @property
    def is_local_only(self) -> bool:
        """True if client or profile says so; neither can take the other's back."""
        return bool(self.checked.x_local_only) or self.profile.local_only

    @property
    def is_stream(self) -> bool:
        """True if the client asked for an event stream."""
        return self.checked.wants_events


async def parse(
    path: str, raw: bytes, headers: Mapping[str, str], profiles: Mapping[str, Profile]
) -> ParsedRequest:
    """Reads a body for `path` (JSON or a form), takes marks of stable segments out of it, adds the
    extension fields that come as headers, and checks all of it against the path's schema.
    `headers` has lower-case names or ignores case; `profiles`: by client id. Raises BadRequest
    that names the field."""
    schema = SCHEMAS.get(path, OF_THE_TABLE)
    is_form = _is_form(headers, schema.kind)
    run: StableRun | None = None
    if is_form:
        fields = await _form(raw, headers)
    else:
        fields = json_object(raw)
        has_changed = _check_pictures(path, fields)
        run = _stable_run(fields) if schema.kind is PathKind.TEXT else None
        if has_changed or run is not None:
            raw = json.dumps(fields).encode()
    if private := sorted(PRIVATE & fields.keys()):
        raise BadRequest(f"`{private[0]}` is reserved and cannot be set by clients", private[0])
    extensions = _header_extensions(headers)
    checked = check_body(schema.body, extensions | fields)
    if check_body(_OfHeaders, extensions).x_local_only:  # neither takes the other's back
        checked = checked.model_copy(update={"x_local_only": True})
    return ParsedRequest(
        path,
        _request_id(headers),
        _engine_headers(headers, is_form=is_form),
        raw,
        None if is_form else fields,
        checked,
        profiles.get(checked.x_client_id or "", _NO_PROFILE),
        schema.kind,
        stable_run=run,
        key=key_of(checked, run),
    )


def _header_extensions(headers: Mapping[str, str]) -> dict[str, str]:
    """The extension fields that come as headers, by field: `x_deadline_s` of `x-deadline-s`."""
    named = ((field, headers.get(field.replace("_", "-"))) for field in _EXTENSIONS)
    return {field: value for field, value in named if value is not None}


def _engine_headers(headers: Mapping[str, str], *, is_form: bool) -> dict[str, str]:
    """The headers that go on to the engine. The type of JSON is declared as it was read, because
    vLLM refuses JSON that is declared as a form."""
    forwarded = {name: headers[name] for name in FORWARDED if name in headers}
    return forwarded if is_form else forwarded | {"content-type": JSON}


def inference_call(
    request: ParsedRequest,
    target: Target,
    model: ModelConfig,
    tenant: str,
    *,
    term: KvTerm | None = None,
) -> messages.InferenceCall:
    """Makes the call that goes to the capability. In a JSON body extension fields that are not the
    engine's are left out, and defaults put in; a form goes as it came, with the served name in a
    header. `term`: how long its KV stays; None where KV ends with its engine."""
    checked, profile = request.checked, request.profile
    fields = _engine_fields(request, target, model, tenant)
    is_text = fields is not None and request.kind is PathKind.TEXT
    if fields is not None and is_text and term not in (None, USUAL):
        fields["kv_transfer_params"] = {messages.KV_TERM: term}
    is_unchanged = fields is None or fields == request.fields  # then the client's own bytes go on
    asked_stay_s = checked.x_stay_warm
    engine_headers = {"x-request-id": request.request_id, messages.TENANT_HEADER: tenant}
    if request.fields is None:
        engine_headers[messages.SERVED_HEADER] = target.served
    return messages.InferenceCall(
        request.path,
        request.raw if is_unchanged else json.dumps(fields).encode(),
        request.headers | engine_headers,
        request.request_id,
        target.model,
        checked.x_deadline_s or profile.deadline_s,
        request.priority or target.priority,
        tenant=tenant,
        client_id=checked.x_client_id or "",
        key=request.key,
        pieces=pieces_of(fields, tenant, target.served) if fields and is_text else b"",
        kv_stays_s=TERMS_S[Term[term.upper()]] if term else math.inf,
        stay_warm_s=profile.stay_warm_s if asked_stay_s is None else asked_stay_s,
        wants_progress=request.is_stream,
        served=target.served,
        stable=stable_prefix.cut_of(
            request.path, fields, request.stable_run, model, target, tenant
        ),
    )


def _engine_fields(
    request: ParsedRequest, target: Target, model: ModelConfig, tenant: str
) -> dict[str, Any] | None:
    """What the engine gets of a JSON body; None of a form."""
    if request.fields is None:
        return None
    defaults = {**model.defaults, **request.profile.defaults}
    of_engine = type(request.checked).model_fields.keys() - Body.model_fields.keys()
    items = request.fields.items()
    fields = defaults | {k: v for k, v in items if not k.startswith("x_") or k in of_engine}
    fields["model"] = target.served
    if request.kind is PathKind.TEXT:
        fields = model.with_thinking(fields)
        if tenant != DEFAULT_TENANT:
            fields["cache_salt"] = tenant  # so that no other tenant hits these cached prompts
    return fields


def headers_for_later(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that `parse` reads, kept for a call that is made when its client may be gone."""
    names = (*FORWARDED, "x-request-id", *(name.replace("_", "-") for name in _EXTENSIONS))
    return {name: headers[name] for name in names if name in headers}


def _is_form(headers: Mapping[str, str], kind: PathKind) -> bool:
    """A JSON route reads JSON whatever the type says: `curl -d` sends that of a form. Raises
    BadRequest where only a form will do."""
    is_form = headers.get("content-type", "").lower().startswith(FORM)
    if kind is PathKind.FORM and not is_form:
        raise BadRequest(f"this route takes {FORM}", None)
    return is_form and kind in (PathKind.FORM, PathKind.ANY)


async def _form(raw: bytes, headers: Mapping[str, str]) -> dict[str, Any]:
    try:
        return {**await read_fields(raw, headers["content-type"])}
    except BadForm as error:
        raise BadRequest(str(error), None) from error


def json_object(raw: bytes) -> dict[str, Any]:
    """Reads a JSON object. Raises BadRequest, also for what Python reads and could not write again
    as JSON in UTF-8: numbers beyond a float, halves of surrogate pairs."""
    beyond: list[float] = []

    def number(word: str) -> float:
        read = float(word)
        if not math.isfinite(read):
            beyond.append(read)
        return read

    try:
        text = raw.decode(json.detect_encoding(raw))
        fields = json.loads(text, parse_float=number, parse_constant=number)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}", None) from error
    if not isinstance(fields, dict):
        raise BadRequest("the body must be a JSON object", None)
    # Whole surrogate pairs are written so, too; most bodies have neither.
    if beyond or "\\ud" in text or "\\uD" in text:
        _check_writable(fields)
    return fields


def _check_writable(fields: dict[str, Any]) -> None:
    """Raises BadRequest for a field with half of a surrogate pair or a number beyond a float."""
    for name, value in fields.items():
        try:
            json.dumps({name: value}, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError as error:
            message = f"`{name}`: not Unicode text: half of a surrogate pair in it"
            raise BadRequest(message, name) from error
        except ValueError as error:
            raise BadRequest(f"`{name}`: not a finite number", name) from error
        except RecursionError as error:  # which writing reaches a little before reading does
            raise BadRequest(f"`{name}`: nested too deeply", name) from error


def _check_pictures(path: str, fields: dict[str, Any]) -> bool:
    """Checks the pictures in the messages, and drops their uuids. Returns whether `fields` has
    changed. Raises BadRequest."""
    try:
        return PictureCheck(path).run(fields)
    except BadPart as error:
        raise BadRequest(str(error), error.place) from error


def _stable_run(fields: dict[str, Any]) -> StableRun | None:
    """Takes the marks of stable segments out of `fields` and returns the marked run; None: it has
    none. Raises BadRequest."""
    try:
        return stable_prefix.take(fields)
    except BadMark as error:
        raise BadRequest(str(error), error.place) from error


def check_body(body: type[M], fields: dict[str, Any]) -> M:
    """The fields as the model `body` has them. Raises BadRequest that names the first wrong one."""
    try:
        checked = body.model_validate(fields)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        # A union names its branches in the path; the field itself comes first.
        field = str(problem["loc"][0])
        hint = " (GET /v1/models lists them)" if field == "model" else ""
        raise BadRequest(f"`{field}`: {words_of(problem)}{hint}", field) from error
    _refuse_misspelt(checked)
    return checked


def _refuse_misspelt(checked: BaseModel) -> None:
    """Raises BadRequest for an unknown field whose name is nearly one of our extensions: left out,
    its sender would not know. Other unknown fields are left out, so that clients of a later version
    are served."""
    ours = [name for name in type(checked).model_fields if name.startswith("x_")]
    extra = checked.model_extra or {}
    unknown = (name for name in extra if name.startswith("x_") and len(name) <= MISSPELT_LENGTH)
    for name in islice(unknown, MISSPELT_MOST):
        near = get_close_matches(name, ours, n=1, cutoff=NEARLY)
        if near:
            raise BadRequest(f"`{name}`: no such field; did you mean `{near[0]}`?", name)


def words_of(problem: Mapping[str, Any]) -> str:
    """What a validator of ours, or else pydantic, says of a problem."""
    return str(problem["msg"]).removeprefix("Value error, ")


def _request_id(headers: Mapping[str, str]) -> str:
    header = headers.get("x-request-id", "")
    if 0 < len(header) <= 128 and header.isascii() and header.isprintable():
        return header
    return f"req-{uuid.uuid4().hex[:16]}"
