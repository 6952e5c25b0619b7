"""The official OpenAI client, unchanged, against the whole graph."""

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from tests.graph.conftest import Graph, until
from tests.support.graph_commands import send, unload_all

CHAT, SMALL, EMBED = "tiny-chat", "small-chat", "all-minilm-l6-v2"
HELLO = [{"role": "user", "content": "Who holds the memory?"}]


@pytest.mark.spec("J1")
def test_models_are_listed_with_their_capability(graph: Graph, client: OpenAI) -> None:
    owners = {m.id: m.owned_by for m in client.models.list() if ":" not in m.id}  # no adapters
    capabilities = graph.table["capabilities"]
    assert {CHAT, SMALL} <= capabilities["chat"]["models"].keys()
    assert owners == {m: name for name, c in capabilities.items() for m in c["models"]}
    assert client.models.retrieve(CHAT).id == CHAT


@pytest.mark.spec("J1")
def test_card_says_what_a_model_does_where_it_is_and_when_it_could_answer(
    graph: Graph, client: OpenAI
) -> None:
    client.chat.completions.create(model=CHAT, messages=HELLO, max_tokens=2)
    until(lambda: unload_all(graph), 60, "nothing is loaded")
    cold = client.models.retrieve(CHAT).model_extra
    assert cold is not None
    assert cold["capabilities"] == ["chat", "completions", "responses", "messages", "tools"]
    assert (cold["context_length"], cold["state"]) == (2_048, "cold")
    assert cold["estimate_s"] > 0
    client.chat.completions.create(model=CHAT, messages=HELLO, max_tokens=2)
    listed = {model.id: model.model_extra or {} for model in client.models.list()}
    assert (listed[CHAT]["state"], listed[CHAT]["estimate_s"]) == ("resident", 0)
    assert (listed[EMBED]["capabilities"], listed[EMBED]["context_length"]) == (["embeddings"], 256)
    assert all(card["state"] != "unknown" for card in listed.values())


@pytest.mark.spec("J1", "H0")
def test_chat_answers_from_nothing_loaded(graph: Graph, client: OpenAI) -> None:
    until(lambda: unload_all(graph) and not graph.engines(), 60, "nothing is loaded")
    answer = client.chat.completions.create(model=CHAT, messages=HELLO, max_tokens=8)
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 8


@pytest.mark.spec("J1")
def test_a_stream_is_the_answer_in_pieces(client: OpenAI) -> None:
    """Of so many tokens that some are apart for longer than pieces are joined."""
    body: dict[str, Any] = {"model": CHAT, "messages": HELLO, "max_tokens": 150, "temperature": 0}
    body["extra_body"] = {"ignore_eos": True}
    whole = client.chat.completions.create(**body)
    stream = client.chat.completions.create(**body, stream=True)
    pieces = [c.choices[0].delta.content or "" for c in stream if c.choices]
    assert len([p for p in pieces if p]) > 1
    assert "".join(pieces) == whole.choices[0].message.content


@pytest.mark.spec("J1")
def test_completions_answer(client: OpenAI) -> None:
    answer = client.completions.create(model=CHAT, prompt="The arbiter holds", max_tokens=4)
    assert answer.choices[0].text


@pytest.mark.spec("J1", "H1")
def test_embeddings_are_real(client: OpenAI) -> None:
    texts = ["a cat sat on the mat", "a kitten rests on a rug", "quarterly interest rates"]
    rows = [row.embedding for row in client.embeddings.create(model=EMBED, input=texts).data]

    def cosine(a: list[float], b: list[float]) -> float:
        dot = sum(x * y for x, y in zip(a, b, strict=True))
        return dot / math.sqrt(sum(x * x for x in a)) / math.sqrt(sum(y * y for y in b))

    assert len(rows[0]) == 384
    assert cosine(rows[0], rows[1]) > cosine(rows[0], rows[2]) + 0.3


@pytest.mark.spec("A4")
def test_many_clients_at_once_cause_one_load(graph: Graph, client: OpenAI) -> None:
    """On each replica. An idle replica may leave just as they come: then it serves those that it
    has taken, and the next replica the others."""

    def ask(number: int) -> int:
        answer = client.chat.completions.create(
            model=CHAT, messages=[{"role": "user", "content": f"{number}"}], max_tokens=2
        )
        return len(answer.choices)

    until(lambda: unload_all(graph), 60, "nothing is loaded")
    last = graph.state()["sequence"]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(32))) == [1] * 32
    loads = [e for e in graph.events() if e["seq"] > last and e["kind"] == "model_load"]
    loads = [e for e in loads if e["capability"] == "chat"]  # a voice may be prefetched behind it
    holders = [e["holder"] for e in loads]
    assert {e["model"] for e in loads} == {CHAT} and len(holders) == len({*holders}) <= 2


@pytest.mark.spec("A9", "D1", "D6", "B4")
def test_chat_and_embeddings_trade_the_budget(graph: Graph, client: OpenAI) -> None:
    """The device holds one of them. Each time the other must leave, chat to sleep in host RAM, and
    every answer is what it was before."""
    vector = embed(client)
    words = talk(client)
    for _ in range(3):
        assert embed(client) == pytest.approx(vector, abs=1e-6)
        assert list(graph.tickets("chat").values()) == ["asleep"]
        for device in graph.state()["devices"]:
            taken = device["charged_bytes"] + device["foreign_bytes"]
            assert device["free_bytes"] + taken == device["budget_bytes"]
            assert device["free_bytes"] >= 0
        assert talk(client) == words
    kinds = [event["kind"] for event in graph.events()]
    assert kinds.count("model_wake") >= 3
    assert "eviction" in kinds


@pytest.mark.spec("E6")
def test_removed_tenant_leaves_the_slabs_of_engines_that_serve_and_sleep(
    graph: Graph, client: OpenAI
) -> None:
    """The tenant of all requests without a key."""

    def rows() -> int:
        own = [s["slab"] for s in graph.state()["slabs"] if s["slab"]["owner"] == f"chat/{SMALL}"]
        return sum(slab["rows_count"] for slab in own if slab["content"] == "kv")

    def removed(state: str) -> None:
        [ticket] = graph.tickets("chat")
        assert graph.tickets("chat") == {ticket: state} and rows()
        send(graph, "DELETE", "/arbiter/tenants/default/kept")
        until(lambda: not rows(), 60, "its rows have left")
        assert graph.tickets("chat") == {ticket: state}

    for state in ("resident", "asleep"):
        said = f"Of a model that is {state}: who holds its memory, and who gives it back? " * 20
        long = [{"role": "user", "content": said}]
        client.chat.completions.create(model=SMALL, messages=long, max_tokens=4)
        until(rows, 60, "its blocks are kept")
        if state == "asleep":
            embed(client)
        removed(state)


def embed(client: OpenAI) -> list[float]:
    return client.embeddings.create(model=EMBED, input="a ticket").data[0].embedding


def talk(client: OpenAI) -> str:
    answer = client.chat.completions.create(
        model=SMALL, messages=HELLO, max_tokens=16, temperature=0
    )
    return answer.choices[0].message.content or ""


@pytest.mark.spec("L3")
def test_an_unknown_model_is_404_and_names_what_there_is(client: OpenAI) -> None:
    with pytest.raises(NotFoundError) as caught:
        client.chat.completions.create(model="tiny-cat", messages=HELLO)
    assert caught.value.param == "model"
    assert CHAT in caught.value.message


@pytest.mark.spec("L3")
def test_a_model_of_another_capability_is_refused(client: OpenAI) -> None:
    with pytest.raises(NotFoundError, match="/v1/embeddings") as caught:
        client.chat.completions.create(model=EMBED, messages=HELLO)
    assert caught.value.param == "model"


@pytest.mark.spec("L3")
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", {"messages": HELLO}, "model"),
        ("/v1/chat/completions", {"model": 7, "messages": HELLO}, "model"),
        ("/v1/chat/completions", {"model": CHAT}, "messages"),
        (
            "/v1/chat/completions",
            {"model": CHAT, "messages": HELLO, "max_tokens": -1},
            "max_tokens",
        ),
        ("/v1/chat/completions", {"model": CHAT, "messages": HELLO, "n": "two"}, "n"),
        ("/v1/completions", {"model": CHAT, "prompt": "x", "temperature": "hot"}, "temperature"),
        ("/v1/embeddings", {"model": EMBED}, "input"),
        ("/v1/embeddings", {"model": EMBED, "input": []}, "input"),
        ("/v1/embeddings", {"model": EMBED, "input": "x", "dimensions": 0}, "dimensions"),
    ],
)
def test_bad_input_is_400_and_names_the_field(
    graph: Graph, path: str, body: object, field: str
) -> None:
    status, answer = graph.post(path, body)
    assert status == 400
    error = answer["error"]
    assert field in (error["param"] or "") or field in error["message"]


@pytest.mark.spec("L3")
@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"[" * 100_000])
def test_a_body_that_is_no_object_is_400(graph: Graph, raw: bytes) -> None:
    status, answer = graph.post("/v1/chat/completions", None, raw)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.spec("J1", "L3")
@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain"])
def test_json_that_is_declared_as_something_else_is_answered_cold_and_warm(
    graph: Graph, kind: str
) -> None:
    """As `curl -d` sends it."""
    until(lambda: unload_all(graph), 60, "nothing is loaded")
    body, headers = {"model": CHAT, "messages": HELLO, "max_tokens": 2}, {"content-type": kind}
    for state in ("cold", "warm"):
        status, answer = graph.post("/v1/chat/completions", body, headers=headers)
        assert status == 200, (state, answer)


@pytest.mark.spec("L3")
def test_bad_input_harms_no_other_request(client: OpenAI) -> None:
    def bad(_: int) -> None:
        with pytest.raises(BadRequestError):
            client.chat.completions.create(model=CHAT, messages=HELLO, max_tokens=-1)

    def good(_: int) -> int:
        answer = client.chat.completions.create(model=CHAT, messages=HELLO, max_tokens=8)
        return len(answer.choices)

    with ThreadPoolExecutor(8) as pool:
        spoilt = [pool.submit(bad, i) for i in range(8)]
        assert list(pool.map(good, range(8))) == [1] * 8
        for one in spoilt:
            one.result()
