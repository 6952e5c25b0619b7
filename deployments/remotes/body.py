"""What a remote is sent of a request: a body made anew from the fields that are known here.

A field that is not listed does not leave: not the sender's name (`user`, `metadata`), no key of a
cache, no field of ours or of vLLM's. What would change the meaning of a message if it were left out
(a part of an unknown kind, a URL that the remote would fetch) refuses the request instead.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from arbiter.errors import RequestError
from deployments.config.remotes_section import CHAT, COMPLETIONS, EMBEDDINGS, RemoteModel

_SAMPLING = (
    "temperature", "top_p", "n", "stop", "seed", "presence_penalty", "frequency_penalty",
    "logprobs", "logit_bias",
)  # fmt: skip
KNOWN = {
    CHAT: (*_SAMPLING, "top_logprobs", "response_format", "tool_choice", "parallel_tool_calls"),
    COMPLETIONS: (*_SAMPLING, "prompt", "suffix", "echo", "best_of"),
    EMBEDDINGS: ("input", "dimensions", "encoding_format"),
}
_MESSAGE = ("role", "name", "tool_call_id", "refusal")
_FUNCTION = ("name", "description", "parameters", "strict")
_TEXT_PARTS = {"text": "text", "refusal": "refusal"}
# A token is about four bytes of English and fewer of most else; a budget errs to the dear side.
BYTES_PER_TOKEN = 3
PICTURE_TOKENS = 1_600  # of one picture, about OpenAI's most for its default detail
_MOST_DEPTH = 64  # of objects in objects; schemas of tools nest about ten deep


class BodyStays(RequestError):
    """A part of the request that cannot be made anew for a remote."""

    status_code, code = 400, "not_for_a_remote"

    def __init__(self, place: str, why: str) -> None:
        super().__init__(place, why)
        self.param, self.why = place, why

    def __str__(self) -> str:
        return f"`{self.param}` does not leave for a remote: {self.why}"


@dataclass(frozen=True, slots=True)
class RebuiltBody:
    """The new body, and what is in it."""

    fields: dict[str, Any]
    inputs: frozenset[str]  # text, image, audio
    prompt_tokens: int  # about
    answer_tokens: int  # at most
    tells_usage: bool  # the client asked for it, so that its event goes on to the client

    @property
    def texts(self) -> Iterator[str]:
        """Every string in it, also names of fields."""
        return _strings(self.fields)

    @property
    def raw(self) -> bytes:
        return json.dumps(self.fields).encode()


def rebuild(path: str, fields: dict[str, Any], model: RemoteModel) -> RebuiltBody:
    """`path`: of KNOWN. Raises BodyStays."""
    new = {name: fields[name] for name in KNOWN[path] if fields.get(name) is not None}
    new["model"] = model.name
    inputs = {"text"}
    if path == CHAT:
        messages = fields.get("messages")
        if not isinstance(messages, list) or not messages:
            raise BodyStays("messages", "it is no list of messages")
        new["messages"] = [_message(one, n, inputs) for n, one in enumerate(messages)]
        if fields.get("tools"):
            new["tools"] = [_tool(one, n) for n, one in enumerate(_list(fields["tools"], "tools"))]
    if path == COMPLETIONS and not _is_text(new.get("prompt")):
        raise BodyStays("prompt", "only text does; numbers of tokens mean others to its model")
    if path == EMBEDDINGS and not _is_text(new.get("input")):
        raise BodyStays("input", "only text does; numbers of tokens mean others to its model")
    answer_tokens = 0 if path == EMBEDDINGS else _bound_answer(new, fields, model)
    is_told = _stream(new, fields) if path != EMBEDDINGS else False
    _check_depth(new)
    return RebuiltBody(new, frozenset(inputs), _prompt_tokens(new), answer_tokens, is_told)


def _bound_answer(new: dict[str, Any], fields: dict[str, Any], model: RemoteModel) -> int:
    """Puts a length into the body, because a budget needs one; the tokens of all choices."""
    newer = "max_completion_tokens"
    field = "max_tokens" if fields.get(newer) is None else newer
    count = _count(fields.get(field), field)
    length: int = min(count or model.answer_tokens, model.answer_tokens)
    new[model.length_field] = length
    choices = max(_count(new.get(name), name) or 1 for name in ("n", "best_of"))
    prompts = new.get("prompt")
    return length * choices * (len(prompts) if isinstance(prompts, list) else 1)


def _count(value: object, place: str) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BodyStays(place, "it is no number above 0")
    return value


def _is_text(value: object) -> bool:
    is_list = isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value)
    return isinstance(value, str) or is_list


def _stream(new: dict[str, Any], fields: dict[str, Any]) -> bool:
    """A stream always tells its usage to us. True: to the client as well."""
    if fields.get("stream") is not True:
        return False
    new["stream"], new["stream_options"] = True, {"include_usage": True}
    options = fields.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def _message(value: object, number: int, inputs: set[str]) -> dict[str, Any]:
    place = f"messages.{number}"
    message = _object(value, place)
    new = {name: message[name] for name in _MESSAGE if isinstance(message.get(name), str)}
    if "role" not in new:
        raise BodyStays(f"{place}.role", "it is no text")
    content = message.get("content")
    if isinstance(content, list):
        new["content"] = [
            _part(one, f"{place}.content.{n}", inputs) for n, one in enumerate(content)
        ]
    elif content is None or isinstance(content, str):
        new["content"] = content
    else:
        raise BodyStays(f"{place}.content", "it is neither text nor a list of parts")
    if message.get("tool_calls"):
        calls = _list(message["tool_calls"], f"{place}.tool_calls")
        new["tool_calls"] = [_call(one, f"{place}.tool_calls.{n}") for n, one in enumerate(calls)]
    return new


def _part(value: object, place: str, inputs: set[str]) -> dict[str, Any]:
    part = _object(value, place)
    kind = part.get("type")
    if isinstance(kind, str) and (name := _TEXT_PARTS.get(kind)):
        return {"type": kind, name: _text(part.get(name), f"{place}.{name}")}
    if kind == "image_url":
        inputs.add("image")
        return {"type": kind, "image_url": _picture(part.get(kind), f"{place}.{kind}")}
    if kind == "input_audio":
        inputs.add("audio")
        sound = _object(part.get(kind), f"{place}.{kind}")
        fields = {name: _text(sound.get(name), f"{place}.{name}") for name in ("data", "format")}
        return {"type": kind, "input_audio": fields}
    raise BodyStays(place, "text, image_url and input_audio are known")


def _picture(value: object, place: str) -> dict[str, str]:
    picture = {"url": value} if isinstance(value, str) else _object(value, place)
    url = _text(picture.get("url"), f"{place}.url")
    if not url.startswith("data:image/"):
        raise BodyStays(f"{place}.url", "only data: URLs do; the remote would fetch any other")
    detail = picture.get("detail")
    return {"url": url, **({"detail": detail} if isinstance(detail, str) else {})}


def _tool(value: object, number: int) -> dict[str, Any]:
    tool = _object(value, f"tools.{number}")
    if tool.get("type") != "function":
        raise BodyStays(f"tools.{number}.type", "only functions are known")
    function = _object(tool.get("function"), f"tools.{number}.function")
    return {"type": "function", "function": {k: function[k] for k in _FUNCTION if k in function}}


def _call(value: object, place: str) -> dict[str, Any]:
    call = _object(value, place)
    function = _object(call.get("function"), f"{place}.function")
    new = {k: _text(function.get(k), f"{place}.{k}") for k in ("name", "arguments")}
    return {"id": _text(call.get("id"), f"{place}.id"), "type": "function", "function": new}


def _object(value: object, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BodyStays(place, "it is no object")
    return value


def _list(value: object, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise BodyStays(place, "it is no list")
    return value


def _text(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise BodyStays(place, "it is no text")
    return value


def _prompt_tokens(fields: dict[str, Any]) -> int:
    """About; data of pictures and sound counts once for each."""
    size_bytes, pictures = 0, 0
    for text in _strings(fields):
        if text.startswith("data:image/"):
            pictures += 1
        else:
            size_bytes += len(text.encode(errors="replace"))
    return -(-size_bytes // BYTES_PER_TOKEN) + pictures * PICTURE_TOKENS


def _check_depth(fields: dict[str, Any]) -> None:
    level: list[Any] = [fields]
    for _ in range(_MOST_DEPTH):
        level = [inner for one in level for inner in _inside(one)]
        if not level:
            return
    raise BodyStays("body", f"it nests deeper than {_MOST_DEPTH} objects")


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _strings(value: Any) -> Iterator[str]:
    stack = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            yield from one
            stack.extend(one.values())
        elif isinstance(one, list):
            stack.extend(one)
