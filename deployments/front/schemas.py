"""What a body must look like before anything is loaded for it; also what /openapi.json says.

Only what is bounded or read here is listed; the rest is the engine's to check and passes on as it
is. Extension fields may come as headers as well (`x-priority` for `x_priority`).
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, field_validator

# OpenAI's own bounds where it states one: 128 choices, 128 tools, 4 stop texts (vLLM takes more, as
# do we), 20 alternatives per token, 2048 inputs. Others: far above any use seen.
MAX_CHOICES, MAX_TOOLS, MAX_STOPS, MAX_LOGPROBS, MAX_INPUTS = 128, 128, 16, 20, 2048
MAX_MESSAGES = 10_000
MAX_NAME = 300  # of a model: two names of 128 and what stands between them
DAY_S = 86_400.0
STAY_WARM_MOST_S = 3_600.0  # a client may hold memory no longer than this with nothing to do
STAY_WARM_S = 600.0  # `x_stay_warm: true`; ten times the default keep-warm of the example

_ID = r"^[\x21-\x7e]{1,128}$"  # goes to logs and metric labels

# Of vLLM's extra fields those that act on the engine or on other requests, and not on the answer.
PRIVATE = frozenset(
    "cache_salt data_parallel_rank ec_transfer_params kv_transfer_params mm_payload "
    "mm_processor_kwargs media_io_kwargs priority request_id return_mm_kwargs session_id "
    "vllm_xargs".split()
)


# What the engine reads of a message; told, not checked here, for it knows more kinds of them.
_ROLES = ["system", "developer", "user", "assistant", "tool"]
Message = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "required": ["role", "content"],
            "properties": {"role": {"enum": _ROLES}, "content": {"type": "string"}},
        }
    ),
]


class Body(BaseModel):
    """Of every route."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str = Field(min_length=1, max_length=MAX_NAME, description="see GET /v1/models")
    x_client_id: str | None = Field(None, pattern=_ID, description="chooses a client profile")
    x_conversation_id: str | None = Field(None, pattern=_ID)
    x_priority: Literal["urgent", "high", "normal", "low", "batch"] | None = Field(
        None, description="above normal: the key needs the scope `priority`"
    )
    x_deadline_s: float | None = Field(
        None, gt=0, le=DAY_S, description="refuse when the model is not there by then"
    )
    x_stay_warm: Annotated[float, Field(ge=0, le=STAY_WARM_MOST_S)] | None = Field(
        None, description="seconds in which the model does not count as idle; true: 600"
    )

    @field_validator("x_stay_warm", mode="before")
    @classmethod
    def _or_a_word(cls, value: object) -> object:
        """A header knows no types: `1` is a second, `true` is what it is in a body."""
        if value is True or value == "true":
            return STAY_WARM_S
        return 0.0 if value is False or value == "false" else value


class Generates(Body):
    """Of the routes that generate text."""

    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None


class Samples(Generates):
    stream_options: dict[str, Any] | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: str | list[str] | None = Field(None, max_length=MAX_STOPS)
    seed: int | None = None
    max_tokens: int | None = Field(None, ge=0)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    response_format: dict[str, Any] | None = None


class Chat(Samples):
    """POST /v1/chat/completions"""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Completion(Samples):
    """POST /v1/completions"""

    prompt: str | list[Any] = Field(min_length=1)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None


class Responses(Generates):
    """POST /v1/responses; nothing is stored, so `previous_response_id` has nothing to refer to."""

    input: str | list[dict[str, Any]] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS)
    text: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Embeddings(Body):
    """POST /v1/embeddings"""

    input: str | list[Any] = Field(min_length=1)
    dimensions: int | None = Field(None, ge=1)
    encoding_format: Literal["float", "base64"] | None = None


SHAPES: dict[str, type[Body]] = {
    "/v1/chat/completions": Chat,
    "/v1/completions": Completion,
    "/v1/responses": Responses,
    "/v1/embeddings": Embeddings,
}

_ERROR = {
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
    400: "a field is wrong; it is named",
    401: "a key is needed",
    403: "the key lacks a scope, or the site may not ask",
    404: "no such model",
    413: "the body is too large",
    429: "too many wait; see Retry-After",
    503: "cannot be served now; see Retry-After",
}


def described(path: str) -> dict[str, Any]:
    """Arguments of a route that serves `path`, so that its description says what it takes."""
    error = {"content": {"application/json": {"schema": _ERROR}}}
    schema = SHAPES[path].model_json_schema()
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {
        "openapi_extra": {"requestBody": body},
        "responses": {status: {"description": why, **error} for status, why in _REFUSALS.items()},
    }
