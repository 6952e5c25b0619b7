"""Ollama's routes over ASGI, in front of an engine that declares no length of what it answers."""

import json
from typing import Any

import pytest
from httpx import AsyncClient

from deployments import messages
from deployments.config.schema import parse_table
from deployments.front.dependencies import FrontState
from deployments.front.inference.service import InferenceService
from tests.support.speaker import Response, Speaker

JSON = messages.ResponseHead(200, {"content-type": "application/json"}, is_chunked=True)
SAID = {"choices": [{"message": {"content": "two"}, "text": "two", "finish_reason": "stop"}]}
VECTORS = {"data": [{"embedding": [0.5, 1.0]}], "usage": {"prompt_tokens": 3}}


@pytest.mark.spec("J1")
@pytest.mark.parametrize(
    ("path", "asked", "said", "told"),
    [
        ("/api/embed", {"input": "x"}, VECTORS, {"embeddings": [[0.5, 1.0]]}),
        ("/api/generate", {"prompt": "x", "stream": False}, SAID, {"response": "two"}),
        ("/api/generate", {}, SAID, {"done_reason": "load"}),
        (
            *("/api/chat", {"messages": [{"role": "user", "content": "x"}], "stream": False}, SAID),
            {"message": {"role": "assistant", "content": "two"}},
        ),
    ],
)
async def test_answer_of_no_declared_length_is_a_whole_answer(
    client: AsyncClient,
    front: FrontState,
    path: str,
    asked: dict[str, Any],
    said: dict[str, Any],
    told: dict[str, Any],
) -> None:
    speaker, raw = Speaker(), json.dumps(said).encode()
    speaker.response = Response(JSON, raw[:9], raw[9:])
    front.service = InferenceService(speaker.send_of)
    role = "embedding" if path == "/api/embed" else "text"
    speak = {"role": role, "engine": "m:f", "models": {"voice": {"source": "x"}}}
    front.service.configure(parse_table({"capabilities": {"speak": speak}}))
    answer = await client.post(path, json={"model": "voice", **asked})
    assert answer.status_code == 200
    assert answer.json().items() >= told.items() and front.service.in_flight == 0


@pytest.mark.spec("J1", "L3")
async def test_answer_that_python_cannot_write_again_is_no_error_of_the_front(
    client: AsyncClient, front: FrontState
) -> None:
    call = {"function": {"name": "f", "arguments": '{"a": NaN}'}}
    message = {
        "content": "\ud83d",
        "tool_calls": [call],
    }  # half of a pair, which a remote may write
    speaker, raw = Speaker(), json.dumps({"choices": [{"message": message}]}).encode()
    speaker.response = Response(JSON, raw)
    front.service = InferenceService(speaker.send_of)
    speak = {"role": "text", "engine": "m:f", "models": {"voice": {"source": "x"}}}
    front.service.configure(parse_table({"capabilities": {"speak": speak}}))
    asked = {"model": "voice", "stream": False, "messages": [{"role": "user", "content": "x"}]}
    answer = await client.post("/api/chat", json=asked)
    assert answer.status_code == 200
    told = json.loads(answer.content)["message"]
    assert told["content"] == "\ud83d"
    [found] = told["tool_calls"]
    assert found["function"]["arguments"] == {"text": '{"a": NaN}'}
