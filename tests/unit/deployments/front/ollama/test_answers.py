"""OpenAI's answers in Ollama's words, however the bytes of a stream were cut."""

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from arbiter.errors import EngineLost
from arbiter.units import TicketId
from deployments.front.ollama.answers import WAITED, Answer, in_chat, in_generate


def sse(*events: object) -> bytes:
    lines = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
    return b"".join([*lines, b"data: [DONE]\n\n"])


def delta(reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"delta": fields, "finish_reason": reason}]}


async def lines(
    stream: bytes, size: int = 7, content_fields: Any = in_chat
) -> list[dict[str, Any]]:
    async def cut() -> AsyncIterator[bytes]:
        for start in range(0, len(stream), size):
            yield stream[start : start + size]

    answer = Answer("m", content_fields, {WAITED: "1.5"}, time.monotonic_ns() - 2 * 10**9)
    return [json.loads(line) async for line in answer.streamed(cut())]


USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}


@pytest.mark.spec("J1")
@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_stream_becomes_lines_and_a_last_one_with_counts(size: int) -> None:
    stream = sse(
        delta(role="assistant", content=""), delta(content="a"), delta("length", content="b"), USAGE
    )
    first, second, last = await lines(stream, size)
    assert (first["message"]["content"], second["message"]["content"]) == ("a", "b")
    assert not first["done"] and not second["done"]
    assert (last["done"], last["done_reason"], last["model"]) == (True, "length", "m")
    assert (last["prompt_eval_count"], last["eval_count"]) == (3, 2)
    assert last["load_duration"] == 1_500_000_000
    assert last["total_duration"] >= 2 * 10**9
    assert last["prompt_eval_duration"] + last["eval_duration"] <= last["total_duration"]


@pytest.mark.spec("J1")
async def test_probabilities_of_tokens_stand_beside_their_text() -> None:
    token = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
    told = {"logprobs": {"content": [token]}}
    message = {"message": {"content": "a"}, "finish_reason": "stop"} | told
    answer = Answer("m", in_chat, {}, time.monotonic_ns())
    assert answer.whole({"choices": [message]})["logprobs"] == [token]
    silent = {"choices": [{"delta": {"content": ""}} | told]}
    spoken = {"choices": [{"delta": {"content": "a"}} | told]}
    first, second, last = await lines(sse(silent, spoken, USAGE))
    assert first["logprobs"] == second["logprobs"] == [token] and "logprobs" not in last
    assert second["message"]["content"] == "a"


@pytest.mark.spec("J1")
async def test_completion_stream_is_a_response() -> None:
    text = {"choices": [{"text": "a", "finish_reason": "stop"}]}
    first, last = await lines(sse(text, USAGE), content_fields=in_generate)
    assert (first["response"], last["response"], last["done_reason"]) == ("a", "", "stop")


@pytest.mark.spec("J1")
async def test_pieces_of_tool_calls_are_put_together() -> None:
    def piece(**function: str) -> dict[str, Any]:
        return delta(tool_calls=[{"index": 0, "function": function}])

    stream = sse(piece(name="lend"), piece(arguments='{"a"'), piece(arguments=": 1}"), USAGE)
    whole = delta(tool_calls=[{"index": 0, "function": {"name": "lend", "arguments": {"a": 1}}}])
    for written in (stream, sse(whole, USAGE)):  # some remotes write the object itself
        called, last = await lines(written)
        assert called["message"]["tool_calls"] == [
            {"function": {"name": "lend", "arguments": {"a": 1}}}
        ]
        assert last["done"]


@pytest.mark.spec("J1")
async def test_calls_without_an_index_are_calls_of_their_own() -> None:
    rows = [{"function": {"name": name, "arguments": "{}"}} for name in "fg"]
    called, last = await lines(sse(delta(tool_calls=rows[:1]), delta(tool_calls=rows[1:]), USAGE))
    assert [row["function"]["name"] for row in called["message"]["tool_calls"]] == ["f", "g"]
    assert last["done"]


@pytest.mark.spec("J1")
@pytest.mark.parametrize(
    "written",
    [
        *("[1]", "5", '"a"', "null", "[" * 100_000),
        *('{"a": NaN}', '{"a": [-Infinity]}', '{"a": 1e999}', '{"a": "\\ud800"}'),
    ],
)
async def test_arguments_that_are_no_object_are_one_with_their_text(written: str) -> None:
    call = {"index": 0, "function": {"name": "f", "arguments": written}}
    called, last = await lines(sse(delta(tool_calls=[call]), USAGE), size=10_000)
    [found] = called["message"]["tool_calls"]
    assert found["function"]["arguments"] == {"text": written} and last["done"]


@pytest.mark.spec("J1", "J8")
async def test_break_of_a_stream_is_a_line_with_its_error() -> None:
    for error in ({"message": "engine lost"}, "engine lost"):
        piece = delta(content="a") | {"error": None}  # as some remotes write it
        first, broken = await lines(sse(piece, {"error": error}))
        assert first["message"]["content"] == "a"
        assert broken == {"error": "engine lost"}


@pytest.mark.spec("J1", "J8")
async def test_stream_that_the_front_loses_ends_with_a_line_with_its_error() -> None:
    async def breaks() -> AsyncIterator[bytes]:
        yield sse(delta(content="a")).removesuffix(b"data: [DONE]\n\n")
        raise EngineLost("m", TicketId("t"))

    answer = Answer("m", in_chat, {}, time.monotonic_ns())
    first, broken = [json.loads(line) async for line in answer.streamed(breaks())]
    assert first["message"]["content"] == "a"
    assert broken == {"error": str(EngineLost("m", TicketId("t")))}


@pytest.mark.spec("J1")
def test_whole_answer_has_text_thinking_and_calls() -> None:
    message = {
        "content": "b",
        "reasoning": "a",
        "tool_calls": [{"function": {"name": "f", "arguments": "no json"}}],
    }
    said = {
        "choices": [{"message": message, "finish_reason": "tool_calls"}],
        "usage": USAGE["usage"],
    }
    found = Answer("m", in_chat, {}, time.monotonic_ns()).whole(said)
    assert found["message"] == {
        "role": "assistant",
        "content": "b",
        "thinking": "a",
        "tool_calls": [{"function": {"name": "f", "arguments": {"text": "no json"}}}],
    }
    assert (found["done"], found["done_reason"], found["load_duration"]) == (True, "stop", 0)


@pytest.mark.spec("J1")
def test_arguments_that_a_remote_writes_as_an_object_are_that_object() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    said = {"choices": [{"message": {"content": None, "tool_calls": [call]}}]}
    found = Answer("m", in_chat, {}, time.monotonic_ns()).whole(said)
    assert found["message"]["tool_calls"] == [call]
