"""What counting the tokens of a request may cost, with a tokenizer that the test holds."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from deployments.engines import sentence_transformers as module

pytestmark = pytest.mark.spec("L3")
WINDOW = 8


class Engine:
    """An engine without a model: its tokenizer splits at blanks, once the test lets it go on."""

    def __init__(self) -> None:
        self.engine = module.build({"model": "none"})
        self.engine.window, self.engine.width = WINDOW, 1
        self.engine._load = lambda: None  # type: ignore[method-assign]
        self.engine._encode = self.encode  # type: ignore[method-assign]
        self.engine._counting = self.tokenize
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self.counted: list[Any] = []

    def encode(self, requests: list[list[str]]) -> list[np.ndarray]:
        return [np.zeros((len(texts), 1), np.float32) for texts in requests]

    def tokenize(self, given: Any, truncation: bool) -> dict[str, Any]:
        self.counted.append(given)
        self.begun.set()
        assert self.go_on.wait(20), "the loop computes nothing else while tokens are counted"
        if isinstance(given, list):
            return {"input_ids": [text.split() for text in given]}
        return {"input_ids": given.split()}

    async def post(
        self, given: object, leaves: asyncio.Event | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Status and answer; 0 without one. The client stays until `leaves` is set."""
        body = json.dumps({"input": given}).encode()
        unread = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[dict[str, Any]] = []

        async def receive() -> Any:
            if unread:
                return unread.pop()
            await (leaves or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/embeddings"}
        await self.engine.app(scope, receive, send)
        if not sent:
            return 0, {}
        return sent[0]["status"], json.loads(b"".join(m.get("body", b"") for m in sent[1:]))


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    made = Engine()
    await made.engine.load()
    yield made
    made.go_on.set()
    assert made.engine.batching is not None
    made.engine.batching.cancel()


async def test_text_far_beyond_the_window_is_refused_before_its_tokens_are_counted(
    engine: Engine,
) -> None:
    most = WINDOW * module.MAX_CHARS_PER_TOKEN
    status, answer = await engine.post(["fine", "a " * (most // 2) + "a"])
    assert (status, answer["error"]["param"]) == (400, "input")
    assert "input 1" in answer["error"]["message"] and str(most) in answer["error"]["message"]
    assert engine.counted == []
    assert (await engine.post("a" * most))[0] == 200
    assert len(engine.counted) == 1


async def test_texts_have_so_many_characters_together_at_most(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CHARS", 40)
    status, answer = await engine.post(["a" * 20, "a" * 21])
    assert (status, answer["error"]["param"]) == (400, "input")
    assert "41 characters" in answer["error"]["message"]
    assert engine.counted == []
    assert (await engine.post(["a" * 20, "a" * 20]))[0] == 200


async def test_tokens_are_counted_text_by_text_up_to_the_first_that_is_too_long(
    engine: Engine,
) -> None:
    status, answer = await engine.post(["one", "a " * (WINDOW + 1), "three"])
    assert (status, answer["error"]["param"]) == (400, "input")
    assert f"input 1 has {WINDOW + 1} tokens" in answer["error"]["message"]
    assert engine.counted == ["one", "a " * (WINDOW + 1)]


async def test_loop_goes_on_while_tokens_are_counted(engine: Engine) -> None:
    engine.go_on.clear()
    asking = asyncio.create_task(engine.post("two words"))
    assert await asyncio.to_thread(engine.begun.wait, 60)
    await engine.engine.health()
    assert not asking.done()
    engine.go_on.set()
    status, answer = await asyncio.wait_for(asking, 60)
    assert (status, answer["usage"]["prompt_tokens"]) == (200, 2)


@pytest.mark.spec("J8")
async def test_client_that_leaves_while_tokens_are_counted_is_not_computed_for(
    engine: Engine,
) -> None:
    engine.go_on.clear()
    leaves = asyncio.Event()
    counted = asyncio.create_task(engine.post("first"))
    assert await asyncio.to_thread(engine.begun.wait, 60)
    waits = asyncio.create_task(engine.post("second", leaves))
    leaves.set()
    assert await asyncio.wait_for(waits, 60) == (0, {})
    engine.go_on.set()
    assert (await asyncio.wait_for(counted, 60))[0] == 200
    assert engine.counted == ["first"]


@pytest.mark.spec("D6")
async def test_probe_on_a_gpu_shows_every_number_of_a_vector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_on_cpu", lambda model: False)
    engine = module.build({"model": "none"})
    vector = np.full((1, 1_024), 0.03, np.float32)

    async def embed(texts: list[str]) -> np.ndarray:
        return vector

    monkeypatch.setattr(engine, "_embed", embed)
    before = await engine.probe()
    vector[0, 500] += 0.001
    assert await engine.probe() != before
