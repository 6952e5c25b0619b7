"""The optional fields of each call: those of the front's request models, for type checkers and
editors. tests/unit/deployments/client holds them to deployments.front.inference.schemas, which
checks their values on both sides.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from deployments.config.fields import KvTerm
from deployments.requests.image_fields import Format

Json = dict[str, Any]
Messages = str | Sequence[Mapping[str, Any]]


class Fields(TypedDict, total=False):
    """Optional fields of every call."""

    x_client_id: str
    x_conversation_id: str
    x_prefix_id: str
    x_kv_term: KvTerm
    x_local_only: bool
    x_priority: Literal["urgent", "high", "normal", "low", "batch"]
    x_budget_s: float
    x_deadline_s: float
    x_stay_warm: float | bool
    extra_body: Mapping[str, Any]  # fields of the engine that no model here names


class TextFields(Fields, total=False):
    """Optional fields of calls that write text."""

    temperature: float
    top_p: float
    prompt_cache_key: str
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"]
    n: int
    stop: str | list[str]
    seed: int
    max_tokens: int
    presence_penalty: float
    frequency_penalty: float
    response_format: Json


class ChatFields(TextFields, total=False):
    """Optional fields of `chat` and `describe`."""

    max_completion_tokens: int
    logprobs: bool
    top_logprobs: int
    tools: list[Json]
    tool_choice: str | Json
    chat_template_kwargs: Json


class CompletionFields(TextFields, total=False):
    """Optional fields of `complete`."""

    best_of: int
    logprobs: int
    echo: bool


class EmbeddingFields(Fields, total=False):
    """Optional fields of `embed`."""

    dimensions: int


class RerankFields(Fields, total=False):
    """Optional fields of `rerank`."""

    top_n: int


class ImageFields(Fields, total=False):
    """Optional fields of `images`."""

    n: int
    size: str
    output_format: Format
    output_compression: int
    background: Literal["opaque", "auto"]
    x_seed: int
    x_steps: int
    x_guidance: float
    x_negative_prompt: str
    x_strength: float


class TranscriptionFields(Fields, total=False):
    """Optional fields of `transcribe`."""

    language: str
    prompt: str
    temperature: float
    vad_filter: bool


class SpeechFields(Fields, total=False):
    """Optional fields of `speak`."""

    voice: str
    response_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]
    speed: float


class VadFields(Fields, total=False):
    """Optional fields of `vad`."""

    threshold: float
    min_speech_ms: float
    min_silence_ms: float
    pad_ms: float
