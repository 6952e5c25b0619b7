"""Bodies of Ollama's routes, and the OpenAI fields that mean the same."""

import json
import re
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from deployments.front.inference.schemas import (
    MAX_LOGPROBS,
    MAX_MESSAGES,
    MAX_NAME,
    MAX_STOPS,
    MAX_TOOLS,
    STAY_WARM_MOST_S,
    Items,
    not_served,
)

_SPAN = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
SPAN_MOST = 64  # characters: Go's longest has 30, and a search through a long text stops the front
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
# Of `options`, those that engines know by another name.
_OPTIONS = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
# By the first characters in base64, which stand for the first bytes of the file.
_KINDS = {"iVBOR": "png", "/9j/": "jpeg", "R0lGOD": "gif", "UklGR": "webp", "Qk": "bmp"}

CUT_TO_FIT = -1  # the engines' word for the model's whole context

Fields = dict[str, Any]


class GoBody(BaseModel):
    """An object as Go reads it, in which Ollama is written: a field that is null is absent."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        return {name: given for name, given in value.items() if given is not None}


class Options(GoBody):
    """Those that engines know; the rest is for llama.cpp."""

    model_config = ConfigDict(allow_inf_nan=False)

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Annotated[Items[str], Field(max_length=MAX_STOPS)] | str | None = None
    num_predict: int | None = Field(None, description="tokens; below 0: no bound")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None

    def openai(self) -> Fields:
        """The same by the names of OpenAI and vLLM."""
        options = self.model_dump(exclude_none=True)
        if options.get("num_predict", 0) < 0:  # Ollama's word for no bound
            del options["num_predict"]
        return {_OPTIONS.get(name, name): value for name, value in options.items()}


class ModelBody(GoBody):
    """Fields of every route that runs a model. Extension fields (`x_local_only`) are checked with
    the OpenAI body that they become a part of."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str = Field(min_length=1, max_length=MAX_NAME)
    keep_alive: float | None = Field(
        None, description="seconds, or text as `5m`; beyond an hour, or below 0: an hour"
    )
    options: Options = Options()

    @field_validator("keep_alive", mode="before")
    @classmethod
    def _span(cls, value: object) -> object:
        seconds = _seconds(value) if isinstance(value, str) else value
        if not isinstance(seconds, int | float):
            return seconds
        # Compared first: an integer may be too large for a float.
        is_beyond = seconds < 0 or seconds > STAY_WARM_MOST_S
        return STAY_WARM_MOST_S if is_beyond else float(seconds)

    def common(self) -> Fields:
        """Model, options and extension fields in the front's own names."""
        return {"model": self.model, **self.options.openai(), **self.extensions()}

    def extensions(self) -> Fields:
        """The extension fields, with `keep_alive` as stay-warm."""
        stay = {} if self.keep_alive is None else {"x_stay_warm": self.keep_alive}
        given = self.model_extra or {}
        return stay | {name: value for name, value in given.items() if name.startswith("x_")}


class Generates(ModelBody):
    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    def fields(self) -> Fields:
        """OpenAI's fields of a chat, without its messages."""
        body = self.common()
        if isinstance(self.format, dict):
            schema = {"name": "answer", "schema": self.format}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif self.format:
            body["response_format"] = {"type": "json_object"}
        if self.think is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self.think is not False}
        if self.logprobs:
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body


class ToolFunction(GoBody):
    name: str
    arguments: dict[str, Any] = Field({})


class ToolCall(GoBody):
    function: ToolFunction


class Message(GoBody):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    images: Items[str] | None = None
    tool_calls: Items[ToolCall] | None = Field(None, max_length=MAX_TOOLS)
    tool_name: str | None = None  # of a result: which call it answers


class Chat(Generates):
    """POST /api/chat; without messages it only loads the model"""

    messages: Items[Message] = Field([], max_length=MAX_MESSAGES)
    tools: Items[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS)

    def openai(self) -> Fields:
        tools = {"tools": self.tools} if self.tools else {}
        return self.fields() | tools | {"messages": as_openai(self.messages)}


class Generate(Generates):
    """POST /api/generate; without a prompt it only loads the model"""

    prompt: str = ""
    system: str | None = None
    images: Items[str] | None = None
    raw: bool = False
    suffix: Annotated[None, not_served("not served; end the text within `prompt`", "")] = None
    template: Annotated[None, not_served("not served; the model has its own", "")] = None

    @field_validator("raw")
    @classmethod
    def _text_alone(cls, value: bool, info: ValidationInfo) -> bool:
        for name in ("images", "logprobs") if value else ():
            if info.data.get(name):
                raise ValueError(f"raw text has no place for `{name}`; leave `raw` out")
        return value

    def openai(self) -> Fields:
        """OpenAI's fields of a chat with this one message; of a completion if `raw`."""
        if self.raw:
            return self.fields() | {"prompt": self.prompt}
        system = [Message(role="system", content=self.system)] if self.system else []
        message = Message(role="user", content=self.prompt, images=self.images)
        return self.fields() | {"messages": as_openai([*system, message])}


class Embed(ModelBody):
    """POST /api/embed"""

    input: str | Items[str] = Field(min_length=1)
    truncate: bool = Field(True, description="cut what is too long; false: refuse it")
    dimensions: int | None = Field(None, ge=1)

    def openai(self) -> Fields:
        fields: Fields = {"model": self.model, "input": self.input, **self.extensions()}
        if self.truncate:
            fields["truncate_prompt_tokens"] = CUT_TO_FIT
        if self.dimensions is not None:
            fields["dimensions"] = self.dimensions
        return fields


class Show(GoBody):
    """POST /api/show"""

    model: str = Field(min_length=1, max_length=MAX_NAME)


def as_openai(messages: list[Message]) -> list[Fields]:
    """Ollama's tool calls have no ids: a result answers the first call of its tool that has none
    yet; where it names no tool, the first call."""
    converted: list[Fields] = []
    call_count = 0  # a call's id is its place
    calls: deque[int] = deque()
    calls_by_tool: defaultdict[str, deque[int]] = defaultdict(deque)
    answered: set[int] = set()
    for message in messages:
        one: Fields = {"role": message.role, "content": _content(message)}
        if message.tool_calls:
            one["tool_calls"] = []
            for number, call in enumerate(message.tool_calls, call_count):
                calls.append(number)
                calls_by_tool[call.function.name].append(number)
                one["tool_calls"].append(_call(call.function, number))
            call_count += len(message.tool_calls)
        if message.role == "tool":
            _drop_answered(calls, answered)
            of_tool = calls_by_tool[message.tool_name or ""]
            _drop_answered(of_tool, answered)
            number = next(iter(of_tool or calls), 0)
            answered.add(number)
            one["tool_call_id"] = f"call_{number}"
        converted.append(one)
    return converted


def _drop_answered(calls: deque[int], answered: set[int]) -> None:
    """Drops what was answered from the front, so that each call is passed once, however many there
    are."""
    while calls and calls[0] in answered:
        calls.popleft()


def _call(function: ToolFunction, number: int) -> Fields:
    call = {"name": function.name, "arguments": json.dumps(function.arguments)}
    return {"id": f"call_{number}", "type": "function", "function": call}


def _content(message: Message) -> str | list[Mapping[str, Any]]:
    if not message.images:
        return message.content
    pictures = [
        {"type": "image_url", "image_url": {"url": _as_uri(image)}} for image in message.images
    ]
    return [*pictures, {"type": "text", "text": message.content}]


def _as_uri(image: str) -> str:
    """What is none of these is refused as every other picture (`inference.pictures`)."""
    kinds = (kind for start, kind in _KINDS.items() if image.startswith(start))
    return f"data:image/{next(kinds, 'png')};base64,{image}"


def _seconds(text: str) -> float | str:
    """Reads a span of time as Go writes it: `1h30m`, `300ms`, `-1`, or seconds alone. Other texts
    stay as they are and are then refused. Raises ValueError for more than SPAN_MOST characters."""
    if len(text) > SPAN_MOST:
        raise ValueError(f"a text of {len(text)} characters; at most {SPAN_MOST}, as `1h30m`")
    try:
        return float(text)
    except ValueError:
        parts = _SPAN.findall(text.removeprefix("-"))
    if "".join(number + unit for number, unit in parts) != text.removeprefix("-"):
        return text
    total_s = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    return -total_s if text.startswith("-") else total_s
