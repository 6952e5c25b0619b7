"""What the calls of a client return, and how it is read from the front's JSON."""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deployments.client.media import Picture

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request."""

    prompt_count: int
    completion_count: int


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants called, or a piece of one in a stream."""

    id: str
    name: str
    arguments: str  # JSON as the model wrote it

    @property
    def parsed(self) -> Any:
        """The arguments as a value. Raises json.JSONDecodeError for what the model got wrong."""
        return json.loads(self.arguments)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the texts of an answer."""

    text: str
    finish_reason: str | None  # stop, length, tool_calls
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""  # of a model that thinks first
    logprobs: Row | None = None  # as the engine gives them, where asked for


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a chat, a description or a completion; `choices` has several where `n` asked
    for them."""

    model: str
    choices: tuple[Choice, ...]
    usage: Usage

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.choices[0].tool_calls

    @property
    def finish_reason(self) -> str | None:
        return self.choices[0].finish_reason

    @property
    def reasoning(self) -> str:
        return self.choices[0].reasoning

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer that is being written."""

    text: str
    rank: int = 0  # of the choice that it belongs to
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    finish_reason: str | None = None  # of the last piece of a choice

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Embeddings:
    """One vector of floats for each text, in their order."""

    model: str
    vectors: list[list[float]]
    usage: Usage

    @property
    def vector(self) -> list[float]:
        """The vector of the first text."""
        return self.vectors[0]


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document and how well it answers the query."""

    position: int  # among the documents that were given, from 0
    score: float  # on the model's own scale; more is better
    text: str


@dataclass(frozen=True, slots=True)
class Ranking:
    """Documents, the best first."""

    model: str
    results: tuple[Ranked, ...]

    @property
    def best(self) -> Ranked:
        return self.results[0]


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of sound, in seconds from its beginning."""

    start_s: float
    end_s: float
    text: str = ""  # of a transcript: what is said in it


@dataclass(frozen=True, slots=True)
class Transcript:
    """What is said in a sound."""

    text: str
    language: str
    duration_s: float
    segments: tuple[Span, ...]
    words: tuple[Span, ...] = ()  # where asked for

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Speech:
    """Where a sound has speech in it."""

    duration_s: float
    segments: tuple[Span, ...]


def answer(reply: Row) -> Answer:
    """Reads the answer to a chat or a completion."""
    choices = tuple(_choice(row) for row in reply["choices"])
    return Answer(reply["model"], choices, _usage(reply))


def _choice(row: Row) -> Choice:
    message = row.get("message") or {"content": row.get("text")}
    return Choice(
        message.get("content") or "",
        row.get("finish_reason"),
        _tool_calls(message),
        _reasoning(message),
        row.get("logprobs"),
    )


def deltas(reply: Row) -> list[Delta]:
    """Reads one event of a chat or a completion; the last event of a stream has none."""
    return [_delta(row) for row in reply.get("choices", ())]


def _delta(row: Row) -> Delta:
    piece = row.get("delta") or {"content": row.get("text")}
    return Delta(
        piece.get("content") or "",
        row.get("index", 0),
        _tool_calls(piece),
        _reasoning(piece),
        row.get("finish_reason"),
    )


def _reasoning(message: Row) -> str:
    return message.get("reasoning") or message.get("reasoning_content") or ""


def _tool_calls(message: Row) -> tuple[ToolCall, ...]:
    rows = message.get("tool_calls") or ()
    calls = ((row.get("id") or "", row.get("function") or {}) for row in rows)
    return tuple(ToolCall(i, f.get("name") or "", f.get("arguments") or "") for i, f in calls)


def _usage(reply: Row) -> Usage:
    usage = reply.get("usage") or {}
    return Usage(usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0)


def embeddings(reply: Row) -> Embeddings:
    rows = sorted(reply["data"], key=lambda row: row["index"])
    return Embeddings(reply["model"], [row["embedding"] for row in rows], _usage(reply))


def ranking(reply: Row, documents: list[str]) -> Ranking:
    results = ((row["index"], row["relevance_score"]) for row in reply["results"])
    return Ranking(reply["model"], tuple(Ranked(i, score, documents[i]) for i, score in results))


def pictures(reply: Row) -> tuple[Picture, ...]:
    return tuple(Picture(base64.b64decode(row["b64_json"])) for row in reply["data"])


def drawn(reply: Row) -> Picture:
    """Reads the picture of one event of a stream."""
    is_final = str(reply["type"]).endswith(".completed")
    return Picture(base64.b64decode(reply["b64_json"]), is_final)


def transcript(reply: Row) -> Transcript:
    return Transcript(
        reply["text"],
        reply.get("language") or "",
        reply["duration"],
        tuple(_span(row, "text") for row in reply.get("segments") or ()),
        tuple(_span(row, "word") for row in reply.get("words") or ()),
    )


def speech(reply: Row) -> Speech:
    return Speech(reply["duration"], tuple(_span(row, "") for row in reply["segments"]))


def _span(row: Row, name: str) -> Span:
    return Span(row["start"], row["end"], str(row.get(name, "")).strip())
