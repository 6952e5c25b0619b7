"""Bodies of the generating routes: what the front checks before a model is loaded for a request,
and what /openapi.json says of them (openapi.py). SCHEMAS has one row for each path; a new JSON
route is a row.

A body lists the fields that the front bounds or reads. The engine checks all others, which pass
unchanged. Extension fields may come as headers as well (`x-priority` for `x_priority`).
"""

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)

from deployments.config.fields import KvTerm
from deployments.messages import ACQUIRE, ACQUIRE_S
from deployments.requests import prefixes
from deployments.requests.image_fields import ImageFields, VariationFields

# OpenAI's own bounds where it states one: 128 choices, 128 tools, 4 stop texts (vLLM takes 16, as
# does the front), 20 alternatives per token. MAX_MESSAGES is far above any use seen.
MAX_CHOICES, MAX_TOOLS, MAX_STOPS, MAX_LOGPROBS = 128, 128, 16, 20
MAX_MESSAGES = 10_000
# Texts of one embedding (OpenAI's bound), rerank, score or classify (Jina's; Cohere advises 1,000).
MAX_DOCUMENTS = 2_048
# Prompts of one completion. Each takes a place among the 2,000 that wait for an engine
# (deployments.engines.vllm.batching.batch_gate.MAX_WAITING), which other tenants' requests need,
# too.
MAX_PROMPTS = 128
# Sequences of one completion: its prompts times `n`. As many as one prompt may have choices, and as
# vLLM computes at once by default.
MAX_SEQUENCES = MAX_CHOICES
MAX_SPOKEN = 4_096  # characters of one speech: OpenAI's bound
MAX_PROMPT = 10_000  # characters before a transcript; Whisper reads the last 224 tokens of them
MAX_CACHE_KEY = 512  # of `prompt_cache_key`; OpenAI takes 64
MAX_NAME = 300  # of a model: two names of 128 and the separators between them
DAY_S = 86_400.0
STAY_WARM_MOST_S = 3_600.0  # the longest a client may keep an idle model resident
STAY_WARM_S = 600.0  # `x_stay_warm: true`; ten times the default keep-warm of the example

_ID = r"^[\x21-\x7e]{1,128}$"  # goes to logs and metric labels

# Those of vLLM's extra fields that act on the engine or on other requests, not on the response.
PRIVATE = frozenset(
    "cache_salt data_parallel_rank ec_transfer_params kv_transfer_params mm_payload "
    "mm_processor_kwargs media_io_kwargs priority request_id return_mm_kwargs session_id "
    "vllm_xargs".split()
)


T = TypeVar("T")
# The list of a body. A body of 32 MiB may hold 16 million wrong items: its first error refuses it,
# where pydantic would make one of each.
Items = Annotated[list[T], Field(fail_fast=True)]


# What the engine reads of a message: described, not checked, because the engine knows more kinds.
_ROLES = ["system", "developer", "user", "assistant", "tool"]
_STABLE = {
    "type": "boolean",
    "description": "later requests begin with this too; text parts and tools may say so as well",
}
Message = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "required": ["role", "content"],
            "properties": {
                "role": {"enum": _ROLES},
                "content": {"type": "string"},
                "stable": _STABLE,
            },
        }
    ),
]


def _is_one(value: str | list[Any]) -> bool:
    """A list of numbers is one input, by its tokens. A list is not empty."""
    return isinstance(value, str) or isinstance(value[0], int)


def _at_most(most: int) -> AfterValidator:
    """Bounds a list of inputs that is not empty."""

    def checked(value: str | list[Any]) -> str | list[Any]:
        if not _is_one(value) and len(value) > most:
            raise ValueError(f"{len(value)} inputs; at most {most} in one request")
        return value

    return AfterValidator(checked)


def not_served(why: str, *harmless: object) -> BeforeValidator:
    """Refuses what a client may send by its API and is not served here, which its description says
    as well. `harmless`: values, beside null, that mean the same as none."""

    def checked(value: object) -> object:
        if value is None or value in harmless:
            return None
        raise ValueError(why)

    schema = WithJsonSchema({"enum": [*harmless, None], "description": why})
    return BeforeValidator(checked, json_schema_input_type=Annotated[None, schema])


_NOT_EMPTY = Field(min_length=1)
Texts = Annotated[str | Items[str], _NOT_EMPTY, _at_most(MAX_DOCUMENTS)]


class Body(BaseModel):
    """Fields of every generating route."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str = Field(min_length=1, max_length=MAX_NAME, description="see GET /v1/models")
    x_client_id: str | None = Field(None, pattern=_ID, description="chooses a client profile")
    x_conversation_id: str | None = Field(None, pattern=_ID)
    x_prefix_id: str | None = Field(
        None, pattern=_ID, description="requests that begin alike; `x_conversation_id` is stronger"
    )
    x_kv_term: KvTerm | None = Field(
        None, description="how long its KV stays after it: 5 min, 1 h, 24 h; absent: the model's"
    )
    x_priority: Literal["urgent", "high", "normal", "low", "batch"] | None = Field(
        None, description="above normal: the key needs the scope `priority`"
    )
    x_deadline_s: float | None = Field(
        None, gt=0, le=DAY_S, description="refuse when the work has not begun by then"
    )
    x_budget_s: float | None = Field(
        None, gt=0, le=DAY_S, description="of a task: seconds until the answer is complete"
    )
    x_local_only: bool | None = Field(
        None, description="true: no remote is asked, whatever the key allows (J5)"
    )
    x_stay_warm: Annotated[float, Field(ge=0, le=STAY_WARM_MOST_S)] | None = Field(
        None, description="seconds in which the model does not count as idle; true: 600"
    )

    @field_validator("x_stay_warm", mode="before")
    @classmethod
    def _or_a_word(cls, value: object) -> object:
        """A header has no types: `1` is one second, `true` means what it means in a body."""
        if value is True or value == "true":
            return STAY_WARM_S
        return 0.0 if value is False or value == "false" else value

    @property
    def wants_events(self) -> bool:
        """True if the client asked for an event stream, which has room for progress comments."""
        return False


class Streams(Body):
    """Fields of the routes that answer with events where `stream` says so."""

    stream: bool | None = None

    @property
    def wants_events(self) -> bool:
        """True where `stream` says so."""
        return self.stream is True


class Generates(Streams):
    """Fields of the routes that generate text."""

    temperature: float | None = None
    top_p: float | None = None
    prompt_cache_key: str | None = Field(
        None, max_length=MAX_CACHE_KEY, description="requests that begin alike; a tenant's own"
    )
    # OpenAI's client writes the first; its service took the second as well
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None


class Samples(Generates):
    stream_options: dict[str, Any] | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: Annotated[Items[str], Field(max_length=MAX_STOPS)] | str | None = None
    seed: int | None = None
    max_tokens: int | None = Field(None, ge=0)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    response_format: dict[str, Any] | None = None


class Chat(Samples):
    """POST /v1/chat/completions"""

    messages: Items[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Items[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Prewarm(Chat):
    """POST /v1/prewarm: a chat that is about to come, as far as it is known"""

    messages: Items[Message] = Field(
        [], max_length=MAX_MESSAGES, description="absent: what the configuration declares"
    )


class Acquire(Body):
    """POST /v1/acquire: the model is in use until the client hangs up. Answers with events, the
    first when it serves."""

    term_s: float = Field(ACQUIRE_S, gt=0, le=ACQUIRE_S, description="at most so many seconds")

    @property
    def wants_events(self) -> bool:
        return True


class Completion(Samples):
    """POST /v1/completions"""

    # So many are computed of each prompt and the `n` best answered: by remotes, not by vLLM.
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    prompt: Annotated[str | list[Any], _NOT_EMPTY, _at_most(MAX_PROMPTS)]
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None

    @field_validator("prompt")
    @classmethod
    def _sequences(cls, value: str | list[Any], info: ValidationInfo) -> str | list[Any]:
        """Checked here, and not at `n`, because the fields before this one are known by now."""
        name = max("n", "best_of", key=lambda name: info.data.get(name) or 1)
        each, prompts = info.data.get(name) or 1, 1 if _is_one(value) else len(value)
        if each * prompts > MAX_SEQUENCES:
            raise ValueError(
                f"{prompts} prompts with `{name}` {each} are {each * prompts} sequences; at most "
                f"{MAX_SEQUENCES} in one request"
            )
        return value


class StoredFields(BaseModel):
    """Fields of a response that the front answers to, not the engine."""

    model_config = ConfigDict(extra="ignore")

    store: bool | None = Field(None, description="keep it; absent: as the table says, usually true")
    background: bool | None = Field(None, description="answer at once and work on")
    previous_response_id: str | None = Field(
        None, max_length=MAX_NAME, description="a stored response that this one continues"
    )
    conversation: Annotated[None, not_served("not served; use `previous_response_id`")] = None
    stream: bool | None = None


class Responses(StoredFields, Generates):
    """POST /v1/responses"""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    input: str | Items[dict[str, Any]] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: Items[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS)
    text: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Messages(Generates):
    """POST /v1/messages, as Anthropic has it"""

    messages: Items[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int = Field(ge=1)
    system: str | Items[dict[str, Any]] | None = None
    stop_sequences: Items[str] | None = Field(None, max_length=MAX_STOPS)
    top_k: int | None = None
    tools: Items[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None


class CountTokens(Body):
    """POST /v1/messages/count_tokens"""

    messages: Items[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | Items[dict[str, Any]] | None = None
    tools: Items[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS)


class Embeddings(Body):
    """POST /v1/embeddings"""

    input: Annotated[str | list[Any], _NOT_EMPTY, _at_most(MAX_DOCUMENTS)]
    dimensions: int | None = Field(None, ge=1)
    encoding_format: Literal["float", "base64"] | None = None


class Document(BaseModel):
    """A document to rerank, as Jina's and Cohere's clients may write it."""

    model_config = ConfigDict(extra="allow")

    text: str


class Reranks(Body):
    """POST /v1/rerank: `documents`, as Jina and Cohere have it, or `texts`, as text-embeddings-
    inference (TEI) does, whose answer is then given."""

    model: str = Field(
        "",
        min_length=1,
        max_length=MAX_NAME,
        description="absent, as TEI's clients have it: the only model here that reranks",
    )
    query: str = Field(min_length=1)
    texts: Items[str] | None = Field(
        None, min_length=1, max_length=MAX_DOCUMENTS, description="TEI's form, for `documents`"
    )
    documents: Items[str | Document] | None = Field(
        None, min_length=1, max_length=MAX_DOCUMENTS, validate_default=True
    )
    top_n: int | None = Field(None, ge=1, description="of the best; absent: all")
    return_documents: bool | None = Field(None, description="absent: true")
    return_text: bool | None = Field(None, description="with `texts`; absent: false")
    raw_scores: bool | None = Field(None, description="with `texts`: before the activation")
    truncate: bool | None = Field(None, description="with `texts`: cut what is too long")
    truncation_direction: Literal["Left", "left", "Right", "right"] | None = Field(
        None, description="with `truncate`: the end that is cut off; absent: Right"
    )

    @field_validator("documents")
    @classmethod
    def _one_form(cls, value: object, info: ValidationInfo) -> object:
        if (value is None) == (info.data.get("texts") is None):
            raise ValueError("give `documents`, or `texts` for TEI's form")
        return value


_NotTaken = Annotated[None, not_served("is not taken; give texts as `text_1` and `text_2`")]


class Scores(Body):
    """POST /v1/score: one text against one or many, or as many against each other."""

    text_1: Texts
    text_2: Texts
    # vLLM's other names of the two, which it prefers, and in which it takes pictures.
    queries: _NotTaken = None
    documents: _NotTaken = None
    items: _NotTaken = None
    data_1: _NotTaken = None
    data_2: _NotTaken = None

    @field_validator("text_2")
    @classmethod
    def _pairs(cls, value: str | list[str], info: ValidationInfo) -> str | list[str]:
        first = info.data.get("text_1")
        count = 1 if isinstance(value, str) else len(value)
        if isinstance(first, list) and len(first) not in (1, count):
            raise ValueError(f"{count} texts for {len(first)} in `text_1`: give as many, or one")
        return value


class Classifies(Body):
    """POST /v1/classify"""

    input: Texts


def _uploaded(size: object) -> object:
    """Checks a file by its size: the front knows no more of it (deployments.requests.multipart)."""
    if not isinstance(size, int):
        raise ValueError("send it as a file")
    return size


# Bytes of a file in a form; OpenAI's own bound on sound.
Upload = Annotated[
    int,
    BeforeValidator(_uploaded),
    Field(ge=1, le=25 << 20),
    WithJsonSchema({"type": "string", "format": "binary"}),
]


class Translation(Streams):
    """POST /v1/audio/translations; the fields of a form are text."""

    file: Upload = Field(description="sound in any usual container, at most 25 MiB")
    prompt: str | None = Field(None, max_length=MAX_PROMPT)
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    vad_filter: bool | None = Field(None, description="skips what is no speech")


class Transcription(Translation):
    """POST /v1/audio/transcriptions"""

    language: str | None = Field(None, max_length=16, description="ISO 639-1, as `en`")
    granularities: Literal["word", "segment"] | None = Field(
        None, alias="timestamp_granularities[]", description="both, where it is there twice"
    )


class Voice(BaseModel):
    id: str = Field(min_length=1, max_length=MAX_NAME)


class Speech(Body):
    """POST /v1/audio/speech"""

    input: str = Field(min_length=1, max_length=MAX_SPOKEN)
    voice: Annotated[str, Field(max_length=MAX_NAME)] | Voice | None = Field(
        None, description="see GET /v1/audio/voices"
    )
    response_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm"] | None = None
    speed: float | None = Field(None, ge=0.25, le=4)
    stream_format: Literal["sse", "audio"] | None = None

    @property
    def wants_events(self) -> bool:
        return self.stream_format == "sse"


class Vad(Body):
    """POST /v1/vad, /v1/audio/vad"""

    file: Upload = Field(description="sound in any usual container, at most 25 MiB")
    threshold: float | None = Field(None, ge=0.01, le=0.99)
    min_speech_ms: float | None = Field(None, ge=0, le=60_000)
    min_silence_ms: float | None = Field(None, ge=0, le=60_000)
    pad_ms: float | None = Field(None, ge=0, le=10_000)


class Images(ImageFields, Streams):
    """POST /v1/images/generations, and the text fields of /v1/images/edits"""


class Variations(VariationFields, Streams):
    """The text fields of POST /v1/images/variations"""


class PathKind(Enum):
    """What a path takes and returns, as far as the front treats it differently."""

    TEXT = "text"  # JSON in, text out: thinking and prompt cache apply
    JSON = "json"  # JSON in
    FORM = "form"  # multipart/form-data in, as for uploads
    ANY = "any"  # by its content type: the paths that the table lists


@dataclass(frozen=True, slots=True)
class Schema:
    """One row: how the front reads a request for a path."""

    body: type[Body]
    kind: PathKind


SCHEMAS: dict[str, Schema] = {
    "/v1/chat/completions": Schema(Chat, PathKind.TEXT),
    prefixes.PATH: Schema(Prewarm, PathKind.TEXT),
    ACQUIRE: Schema(Acquire, PathKind.JSON),
    "/v1/completions": Schema(Completion, PathKind.TEXT),
    "/v1/responses": Schema(Responses, PathKind.TEXT),
    "/v1/messages": Schema(Messages, PathKind.TEXT),
    "/v1/messages/count_tokens": Schema(CountTokens, PathKind.JSON),
    "/v1/embeddings": Schema(Embeddings, PathKind.JSON),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), Schema(Reranks, PathKind.JSON)),
    **dict.fromkeys(("/v1/score", "/score"), Schema(Scores, PathKind.JSON)),
    **dict.fromkeys(("/v1/classify", "/classify"), Schema(Classifies, PathKind.JSON)),
    "/v1/audio/transcriptions": Schema(Transcription, PathKind.FORM),
    "/v1/audio/translations": Schema(Translation, PathKind.FORM),
    "/v1/audio/speech": Schema(Speech, PathKind.JSON),
    **dict.fromkeys(("/v1/vad", "/v1/audio/vad"), Schema(Vad, PathKind.FORM)),
    "/v1/images/generations": Schema(Images, PathKind.JSON),
    "/v1/images/edits": Schema(Images, PathKind.FORM),
    "/v1/images/variations": Schema(Variations, PathKind.FORM),
}
OF_THE_TABLE = Schema(Body, PathKind.ANY)
