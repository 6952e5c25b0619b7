"""Bodies of rerank, score, classify, embeddings: each form is taken, and what is wrong is named."""

import json
from typing import Any

import pytest

from deployments.front.inference.request import BadRequest, parse

RERANK, SCORE, CLASSIFY = "/v1/rerank", "/v1/score", "/v1/classify"
EMBED = "/v1/embeddings"
ASKED = {"model": "m", "query": "which?"}
# What vLLM would fetch.
SEEN = {"content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}


async def read(path: str, body: dict[str, Any]) -> Any:
    return await parse(path, json.dumps(body).encode(), {}, {})


@pytest.mark.spec("H7", "J1")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RERANK, ASKED | {"documents": ["a", "b"], "top_n": 1, "return_documents": False}),
        ("/v2/rerank", ASKED | {"documents": [{"text": "a", "title": "of a"}, "b"]}),
        ("/rerank", ASKED | {"texts": ["a"], "truncate": True, "return_text": True}),
        (SCORE, {"model": "m", "text_1": "a", "text_2": ["b", "c"]}),
        ("/score", {"model": "m", "text_1": ["a", "b"], "text_2": ["b", "c"]}),
        (CLASSIFY, {"model": "m", "input": ["a"]}),
        ("/classify", {"model": "m", "input": "a" * 2_049}),
        (EMBED, {"model": "m", "input": ["a"] * 2_048}),
        (EMBED, {"model": "m", "input": [7] * 2_049}),  # one text, by its tokens
    ],
)
async def test_each_form_is_taken(path: str, body: dict[str, Any]) -> None:
    assert (await read(path, body)).fields == body


@pytest.mark.spec("H7", "L2", "L3")
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (RERANK, {"model": "m", "documents": ["a"]}, "query"),
        (RERANK, {"model": "", "query": "x", "texts": ["a"]}, "model"),
        (RERANK, {"model": 7, "query": "x", "texts": ["a"]}, "model"),
        (RERANK, {"model": "m", "query": "", "documents": ["a"]}, "query"),
        (RERANK, ASKED, "documents"),
        (RERANK, ASKED | {"documents": ["a"], "texts": ["a"]}, "documents"),
        (RERANK, ASKED | {"documents": []}, "documents"),
        (RERANK, ASKED | {"documents": "a"}, "documents"),
        (RERANK, ASKED | {"documents": [{"title": "a"}]}, "documents"),
        (RERANK, ASKED | {"documents": ["a"] * 2_049}, "documents"),
        (RERANK, ASKED | {"documents": ["a"], "top_n": 0}, "top_n"),
        ("/rerank", ASKED | {"texts": [7]}, "texts"),
        ("/rerank", ASKED | {"texts": ["a"], "truncation_direction": 7}, "truncation_direction"),
        (SCORE, {"model": "m", "text_2": "a"}, "text_1"),
        (SCORE, {"model": "m", "text_1": "a", "text_2": []}, "text_2"),
        (SCORE, {"model": "m", "text_1": ["a", "b"], "text_2": ["b", "c", "d"]}, "text_2"),
        *[
            (path, {"model": "m", "text_1": "a", "text_2": "b", name: SEEN}, name)
            for path in (SCORE, "/score")
            for name in ("queries", "documents", "items", "data_1", "data_2")
        ],
        (SCORE, {"model": "m", "text_1": "a", "text_2": ["b"] * 2_049}, "text_2"),
        (SCORE, {"model": "m", "text_1": ["a"] * 2_049, "text_2": ["b"] * 2_049}, "text_1"),
        (CLASSIFY, {"model": "m"}, "input"),
        (CLASSIFY, {"model": "m", "input": ["a"] * 2_049}, "input"),
        (EMBED, {"model": "m", "input": ["a"] * 2_049}, "input"),
        (EMBED, {"model": "m", "input": [[1]] * 2_049}, "input"),
        (EMBED, {"model": "m", "input": []}, "input"),
        (CLASSIFY, {"model": "m", "input": {"a": 1}}, "input"),
    ],
)
async def test_field_at_fault_is_named(path: str, body: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        await read(path, body)
    assert (caught.value.status_code, caught.value.param) == (400, field)
