"""From OpenAI's answers, whole or streamed, to Ollama's."""

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from arbiter.errors import RequestError

Fields = dict[str, Any]
# The fields in which a route carries content, thinking and tool calls: in_chat or in_generate.
ContentFields = Callable[[str, str, list[Fields]], Fields]

# The header of deployments.replica.capability: seconds until the model served.
WAITED = "x-arbiter-waited-s"
_REASONS = {"length": "length"}  # all others stop


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def in_chat(content: str, thinking: str, calls: list[Fields]) -> Fields:
    """The part of /api/chat that carries the text."""
    message: Fields = {"role": "assistant", "content": content}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


def in_generate(content: str, thinking: str, calls: list[Fields]) -> Fields:
    """The part of /api/generate that carries the text."""
    return {"response": content} | ({"thinking": thinking} if thinking else {})


class Answer:
    """One answer: durations in ns, counts in tokens. `began_ns`: of the request, monotonic."""

    def __init__(
        self, model: str, content_fields: ContentFields, headers: Mapping[str, str], began_ns: int
    ) -> None:
        self._model, self._content_fields, self._began_ns = model, content_fields, began_ns
        self._load_ns = load_ns(headers)
        self._first_ns = 0
        self._usage: Mapping[str, Any] = {}
        self._reason = "stop"
        self._calls: dict[int, Fields] = {}  # of tools, as their pieces come

    def whole(self, reply: Mapping[str, Any]) -> Fields:
        """Ollama's answer, from the JSON of a chat completion or a completion."""
        choice = reply["choices"][0]
        message = choice.get("message") or {"content": choice.get("text")}
        self._usage = reply.get("usage") or {}
        self._reason = _REASONS.get(choice.get("finish_reason") or "", "stop")
        calls = [_call(call["function"]) for call in message.get("tool_calls") or ()]
        fields = self._content_fields(message.get("content") or "", _thinking(message), calls)
        return self._last(fields | _logprobs(choice))

    async def streamed(self, parts: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """Lines of JSON from server-sent events. A break is a line with its error."""
        try:
            async for event in events(parts):
                if (error := event.get("error")) is not None:
                    message = error.get("message", "") if isinstance(error, dict) else str(error)
                    yield _line({"error": message})
                    return
                if fields := self._piece(event):
                    yield _line(self._head() | fields | {"done": False})
        except RequestError as error:  # the front lost the replica, or the remote
            yield _line({"error": str(error)})
            return
        if self._calls:
            calls = [_call(self._calls[number]) for number in sorted(self._calls)]
            yield _line(self._head() | self._content_fields("", "", calls) | {"done": False})
        yield _line(self._last(self._content_fields("", "", [])))

    def _piece(self, event: Mapping[str, Any]) -> Fields | None:
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices") or ():
            self._first_ns = self._first_ns or time.monotonic_ns()
            if reason := choice.get("finish_reason"):
                self._reason = _REASONS.get(reason, "stop")
            delta = choice.get("delta") or {"content": choice.get("text")}
            self._collect(delta.get("tool_calls") or ())
            content, thinking = delta.get("content") or "", _thinking(delta)
            if content or thinking or _logprobs(choice):
                return self._content_fields(content, thinking, []) | _logprobs(choice)
        return None

    def _collect(self, calls: Any) -> None:
        for call in calls:
            # Some remotes write each call whole and without its index.
            index = call.get("index")
            number = len(self._calls) if index is None else index
            tool_call = self._calls.setdefault(number, {"name": "", "arguments": ""})
            for name in tool_call:
                piece = (call.get("function") or {}).get(name) or ""
                tool_call[name] += json.dumps(piece) if isinstance(piece, dict) else piece

    def _head(self) -> Fields:
        return {"model": self._model, "created_at": now()}

    def _last(self, fields: Fields) -> Fields:
        ended_ns = time.monotonic_ns()
        total_ns = ended_ns - self._began_ns
        generated_ns = ended_ns - self._first_ns if self._first_ns else 0
        measured = {
            "done": True,
            "done_reason": self._reason,
            "total_duration": total_ns,
            "load_duration": self._load_ns,
            "prompt_eval_count": self._usage.get("prompt_tokens", 0),
            "prompt_eval_duration": max(0, total_ns - generated_ns - self._load_ns),
            "eval_count": self._usage.get("completion_tokens", 0),
            "eval_duration": generated_ns,
        }
        return self._head() | fields | measured


def load_ns(headers: Mapping[str, str]) -> int:
    """Nanoseconds until the model served; 0 where it was resident."""
    return int(float(headers.get(WAITED, 0)) * 1e9)


def embedded(
    model: str, reply: Mapping[str, Any], headers: Mapping[str, str], began_ns: int
) -> Fields:
    """Ollama's answer with embeddings, from OpenAI's vectors."""
    return {
        "model": model,
        "embeddings": [row["embedding"] for row in reply["data"]],
        "total_duration": time.monotonic_ns() - began_ns,
        "load_duration": load_ns(headers),
        "prompt_eval_count": (reply.get("usage") or {}).get("prompt_tokens", 0),
    }


async def events(parts: AsyncIterator[bytes]) -> AsyncGenerator[Fields, None]:
    """The JSON of each event, however the bytes were cut."""
    rest = b""
    async for part in parts:
        *whole, rest = (rest + part).split(b"\n\n")
        for event in whole:
            data = event.removeprefix(b"data: ")
            if event.startswith(b"data: ") and data != b"[DONE]":
                yield json.loads(data)


def _thinking(message: Mapping[str, Any]) -> str:
    return message.get("reasoning") or message.get("reasoning_content") or ""


def _logprobs(choice: Mapping[str, Any]) -> Fields:
    """Those of its tokens, whose fields are OpenAI's."""
    tokens = (choice.get("logprobs") or {}).get("content")
    return {"logprobs": tokens} if tokens else {}


def _call(function: Mapping[str, Any]) -> Fields:
    """Ollama's arguments are an object; what a model wrote may be none. Some remotes write an
    object too, where OpenAI has a text."""
    written = function.get("arguments") or "{}"
    try:
        arguments = json.loads(written) if isinstance(written, str) else written
        # Python also reads what it cannot write as JSON: NaN, 1e999, halves of surrogate pairs.
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        arguments = {"text": written}
    return {"function": {"name": function["name"], "arguments": arguments}}


def _line(fields: Fields) -> bytes:
    return json.dumps(fields).encode() + b"\n"
