"""Ollama's official client, unchanged, against the whole graph."""

from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from ollama import AsyncClient, Client, ResponseError

from models.train_vision import answer
from tests.graph.conftest import KEEP_WARM_S, Graph, until
from tests.support.drawings import FACTS, drawing, uri
from tests.support.graph_commands import send

CHAT, EMBED, SEES = "tiny-chat", "all-minilm-l6-v2", "tiny-describe"
HELLO: Any = [{"role": "user", "content": "Who holds the memory?"}]
GREEDY = {"temperature": 0, "num_predict": 8}


@pytest.fixture
def llama(graph: Graph) -> Client:
    return Client(host=graph.url, timeout=120)


@pytest.mark.spec("J1")
def test_chat_is_answered_whole_and_streamed_alike(llama: Client) -> None:
    whole = llama.chat(CHAT, HELLO, options=GREEDY)
    assert whole.done and whole.done_reason in ("length", "stop")
    assert 0 < (whole.eval_count or 0) <= 8
    pieces = list(llama.chat(f"{CHAT}:latest", HELLO, options=GREEDY, stream=True))
    assert len(pieces) > 2 and [p.done for p in pieces] == [False] * (len(pieces) - 1) + [True]
    assert "".join(p.message.content or "" for p in pieces) == whole.message.content
    assert pieces[-1].eval_count == whole.eval_count
    told = llama.chat(CHAT, HELLO, options=GREEDY, logprobs=True, top_logprobs=2).logprobs or []
    assert len(told) == whole.eval_count and all(one.logprob <= 0 for one in told)
    assert {len(one.top_logprobs or []) for one in told} == {2}


@pytest.mark.spec("J1")
async def test_async_client_streams_a_raw_prompt(graph: Graph) -> None:
    client = AsyncClient(host=graph.url, timeout=120)
    stream = await client.generate(CHAT, "The arbiter", raw=True, stream=True, options=GREEDY)
    pieces = [piece async for piece in stream]
    assert pieces[-1].done
    whole = await client.generate(CHAT, "The arbiter", raw=True, options=GREEDY)
    assert "".join(piece.response for piece in pieces) == whole.response


@pytest.mark.spec("J1")
def test_json_by_schema_is_followed(llama: Client) -> None:
    schema = {
        "type": "object",
        "properties": {"sure": {"type": "boolean"}},
        "required": ["sure"],
        "additionalProperties": False,
    }
    said = llama.chat(CHAT, HELLO, format=schema, options={"num_predict": 32})
    assert said.message.content in ('{"sure":true}', '{"sure":false}')


@pytest.mark.spec("J1", "H2")
def test_picture_is_described(llama: Client) -> None:
    fact, image = FACTS[64], uri(drawing(64)).partition(",")[2]
    asked: Any = [{"role": "user", "content": "describe the picture", "images": [image]}]
    said = llama.chat(SEES, asked, options={"temperature": 0, "num_predict": 16})
    assert (said.message.content or "").strip() == answer("describe", fact)
    one = llama.generate(SEES, "which shape?", images=[image], options={"temperature": 0})
    assert one.response.strip() == fact.shape


@pytest.mark.spec("J1", "H1")
def test_embeddings_are_those_of_openais_route(llama: Client, graph: Graph) -> None:
    texts = ["a lease", "a ticket"]
    embedded = llama.embed(EMBED, texts)
    status, said = graph.post("/v1/embeddings", {"model": EMBED, "input": texts})
    assert status == 200
    np.testing.assert_allclose(
        embedded.embeddings, [row["embedding"] for row in said["data"]], atol=1e-6
    )
    assert embedded.prompt_eval_count == said["usage"]["prompt_tokens"]
    long = "word " * 600
    assert llama.embed(EMBED, long).prompt_eval_count == 256
    with pytest.raises(ResponseError, match="reads at most 256") as refused:
        llama.embed(EMBED, long, truncate=False)
    assert refused.value.status_code == 400


def is_unloaded(graph: Graph) -> bool:
    """Asks the chat model to go; whether it has gone."""
    send(graph, "POST", f"/arbiter/models/unload/{CHAT}")
    return all(ticket["model"] != CHAT for ticket in graph.state()["tickets"])


def stays_s(llama: Client) -> float:
    """Seconds until the chat model expires."""
    [row] = [row for row in llama.ps().models if row.model == CHAT]
    assert row.expires_at is not None
    return (row.expires_at - datetime.now(UTC)).total_seconds()


def shows_its_bytes(llama: Client, graph: Graph) -> bool:
    """False while the node was not looked at since the load."""
    [row] = [row for row in llama.ps().models if row.model == CHAT]
    assert row.size_vram == 0
    [ticket] = [t for t in graph.state()["tickets"] if t["model"] == CHAT]
    measured_bytes = sum(ticket["measured_bytes"].values())
    return measured_bytes > 1_000_000 and row.size == pytest.approx(measured_bytes, rel=0.2)


@pytest.mark.spec("J1")
def test_models_are_listed_shown_and_seen_loaded_with_their_bytes(
    llama: Client, graph: Graph
) -> None:
    names = {row.model: row for row in llama.list().models}
    assert names.keys() == {card["id"] for card in graph.get("/v1/models")["data"]}
    assert (names[CHAT].size or 0) > 1_000_000
    until(lambda: is_unloaded(graph), 60, "a longer `keep_alive` of other tests has ended with it")
    llama.generate(CHAT, "", keep_alive="40s")  # only loads
    until(lambda: shows_its_bytes(llama, graph), 30, "`ps` has what the model was measured to hold")
    until(lambda: stays_s(llama) > KEEP_WARM_S + 1, 30, "`keep_alive` is seen in `expires_at`")
    assert stays_s(llama) < 40 + KEEP_WARM_S + 1
    shown = llama.show(CHAT)
    assert shown.capabilities == ["completion", "tools"]
    assert (shown.modelinfo or {})["vllm.context_length"] == 2_048
    plain = graph.post("/api/show", {"model": CHAT})[1]
    assert (plain["state"], plain["estimate_s"], plain["context_length"]) == ("resident", 0, 2_048)
    rows = {row["name"]: row for row in graph.get("/api/tags")["models"]}
    assert (rows[CHAT]["capabilities"], rows[CHAT]["state"]) == (shown.capabilities, "resident")
    assert llama.show(SEES).capabilities == ["completion", "vision"]


@pytest.mark.spec("J1", "L3")
def test_errors_are_the_clients_own_and_name_the_cause(llama: Client) -> None:
    with pytest.raises(ResponseError, match="no-such") as missing:
        llama.chat("no-such", HELLO)
    assert missing.value.status_code == 404
    for wrong, field in (({"format": "xml"}, "format"), ({"keep_alive": "soon"}, "keep_alive")):
        with pytest.raises(ResponseError, match=field) as bad:
            llama._request_raw("POST", "/api/chat", json={"model": CHAT, "messages": HELLO} | wrong)
        assert bad.value.status_code == 400
    for act in (
        lambda: llama.pull(CHAT),
        lambda: llama.push(CHAT),
        lambda: llama.create("mine", from_=CHAT),
        lambda: llama.generate(CHAT, "", keep_alive=0),
    ):
        with pytest.raises(ResponseError, match="configuration") as never:
            act()
        assert never.value.status_code == 501
    assert llama._request_raw("GET", "/api/version").json()["version"]
