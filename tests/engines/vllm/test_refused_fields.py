"""A refusal of vLLM names the field at fault, also where vLLM does so in its text alone."""

import json
from typing import Any

import pytest
from fastapi.responses import JSONResponse
from vllm import SamplingParams
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMValidationError

from deployments.engines.vllm.batching.callers import Caller, HeldHead

pytestmark = pytest.mark.spec("J1")


async def sent(response: JSONResponse) -> tuple[dict[bytes, bytes], bytes]:
    """What a client gets of a response of vLLM's."""
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def receive() -> Any:
        raise AssertionError("a whole answer reads nothing")

    await response({"type": "http"}, receive, HeldHead(Caller(), send))
    head, body = messages
    return dict(head["headers"]), body["body"]


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("top_k", -2),
        ("min_p", 2.0),
        ("min_tokens", -1),
        ("min_tokens", 50),
        ("stop", [""]),
        ("stop_token_ids", ["x"]),
        ("bad_words", [""]),
        ("n", 0),
        ("presence_penalty", 3.0),
        ("frequency_penalty", -3.0),
        ("repetition_penalty", 0.0),
        ("temperature", -1.0),  # which vLLM names itself
    ],
)
async def test_refused_field_is_named(field: str, wrong: object) -> None:
    with pytest.raises(VLLMValidationError) as refused:
        SamplingParams(**({"max_tokens": 16} | {field: wrong}))
    error = create_error_response(refused.value).model_dump()
    headers, body = await sent(JSONResponse(error, 400))
    said = json.loads(body)["error"]
    assert said == error["error"] | {"param": field}
    assert int(headers[b"content-length"]) == len(body)


@pytest.mark.parametrize(
    "error",
    [
        {"error": {"message": "The prompt is too long", "param": None}},
        {"error": {"message": "top_k is wrong", "param": "other"}},
        {"type": "error", "error": {"type": "invalid_request_error", "message": "top_k must"}},
        {"error": {"message": "", "param": None}},
        ["top_k"],
    ],
)
async def test_other_refusal_is_passed_on_as_it_is(error: Any) -> None:
    _, body = await sent(JSONResponse(error, 400))
    assert json.loads(body) == error
