"""Remote models on the running system: the remote is this same system under another name."""

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest
from openai import APIStatusError, OpenAI

from deployments.front.access import keys
from deployments.front.access.keys import Scope
from tests.graph.conftest import Graph, until
from tests.support.graph_remotes import (
    CLOUD,
    HELLO,
    SECRET_WORD,
    all_events,
    client_of,
    egress,
    owner_reads,
)


@pytest.fixture
def far(graph: Graph, keys_file: Path) -> Iterator[OpenAI]:
    """A client whose key has the scope `cloud`; the remote has a key of its own tenant."""
    theirs = keys.add(keys_file, "remote", "remote", frozenset({Scope.INFER}))
    file = graph.folder / "remote.key"
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), "w") as stream:
        stream.write(theirs)
    yield client_of(graph, keys.add(keys_file, "ann", "ann", CLOUD))
    file.unlink()


@pytest.mark.spec("J5")
def test_a_remote_model_answers_as_a_local_one_and_each_egress_is_written_down(
    graph: Graph, far: OpenAI
) -> None:
    said = far.chat.completions.with_raw_response.create(
        model="far-chat", messages=HELLO, max_tokens=5, temperature=0
    )
    assert said.headers["x-arbiter-served-by"] == "elsewhere/plain-chat"
    here = far.chat.completions.create(
        model="plain-chat", messages=HELLO, max_tokens=5, temperature=0
    )
    assert said.parse().choices[0].message.content == here.choices[0].message.content
    stream = far.chat.completions.create(
        model="far-chat", messages=HELLO, max_tokens=5, temperature=0, stream=True
    )
    words = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(words) == here.choices[0].message.content
    ends = until(lambda: [e for e in egress(graph) if "outcome" in e][1:], 60, "both are settled")
    usage = said.parse().usage
    assert usage is not None
    for end in (egress(graph)[-1], ends[-1]):
        assert (end["remote"], end["model"], end["tenant"]) == ("elsewhere", "far-chat", "ann")
        assert (end["outcome"], end["prompt_tokens"]) == ("answered", usage.prompt_tokens)
        money = (usage.prompt_tokens + 2 * end["answer_tokens"]) / 1_000_000
        assert end["money"] == pytest.approx(money)
    assert SECRET_WORD not in json.dumps(egress(graph))
    told = json.loads(owner_reads(graph, "/arbiter/remotes"))
    assert (told["nothing_leaves"], told["remotes"][0]["remote"]) == (False, "elsewhere")
    (spent,) = [row for row in told["spent_today"] if row["tenant"] == "ann"]
    assert spent["tokens"] >= 2 * usage.total_tokens
    shown = owner_reads(graph, "/metrics").decode()
    assert 'arbiter_remote_answers_total{outcome="answered",remote="elsewhere"}' in shown


@pytest.mark.spec("J5")
def test_without_scope_with_local_only_with_a_secret_or_a_budget_nothing_leaves(
    graph: Graph,
    far: OpenAI,
    keys_file: Path,
) -> None:
    local = client_of(graph, keys.add(keys_file, "bob", "bob", frozenset({Scope.INFER})))
    poor = client_of(graph, keys.add(keys_file, "eve", "poor", CLOUD))
    assert "far-chat" not in {model.id for model in local.models.list().data}
    assert "far-chat" in {model.id for model in far.models.list().data}
    assert far.models.retrieve("far-chat").owned_by == "elsewhere"
    before = egress(graph)
    secret = [{"role": "user", "content": "AKIA" + "ABCDEFGHIJ234567"}]
    tries: list[tuple[OpenAI, Any, dict[str, Any], tuple[int, str]]] = [
        (local, HELLO, {}, (403, "scope_missing")),
        (far, HELLO, {"extra_body": {"x_local_only": True}}, (403, "local_only")),
        (far, HELLO, {"extra_headers": {"x-local-only": "true"}}, (403, "local_only")),
        (far, secret, {}, (403, "secret_stays")),
        (poor, HELLO, {}, (429, "remote_budget_spent")),
    ]
    for client, messages, more, refusal in tries:
        with pytest.raises(APIStatusError) as refused:
            client.chat.completions.create(model="far-chat", messages=messages, **more)
        assert (refused.value.status_code, refused.value.code) == refusal
        assert SECRET_WORD not in str(refused.value)
    assert egress(graph) == before


@pytest.mark.spec("J1", "J5")
def test_remote_model_is_listed_and_asked_by_ollamas_client(
    graph: Graph, far: OpenAI, keys_file: Path
) -> None:
    llama = ollama.Client(
        graph.url, headers={"authorization": f"Bearer {far.api_key}"}, timeout=120
    )
    rows = {row.model: row for row in llama.list().models}
    assert rows.keys() >= {model.id for model in far.models.list().data if "task:" not in model.id}
    there = rows["far-chat"]
    assert there.size == 0 and there.details is not None and there.details.family == "elsewhere"
    assert llama.show("far-chat").capabilities == ["completion"]
    said = llama.chat("far-chat", HELLO, options={"temperature": 0, "num_predict": 2})
    assert said.done and 0 < (said.eval_count or 0) <= 2
    bob = keys.add(keys_file, "bob", "bob", frozenset({Scope.INFER}))
    local = ollama.Client(graph.url, headers={"authorization": f"Bearer {bob}"}, timeout=120)
    assert "far-chat" not in {row.model for row in local.list().models}


@pytest.mark.spec("J5")
def test_one_switch_keeps_everything_here_from_its_deployment_on(graph: Graph, far: OpenAI) -> None:
    def asked() -> str:
        try:
            far.chat.completions.create(model="far-chat", messages=HELLO, max_tokens=2)
        except APIStatusError as refused:
            return str(refused.code)
        return "answered"

    config = copy.deepcopy(graph.config)
    table = config["applications"][0]["deployments"][0]["user_config"]
    table["remotes"]["nothing_leaves"] = True
    assert asked() == "answered"
    try:
        graph.deploy(config)
        until(lambda: asked() == "nothing_leaves", 60, "nothing leaves")
        before = egress(graph)
        assert "far-chat" not in {model.id for model in far.models.list().data}
        assert asked() == "nothing_leaves" and egress(graph) == before
    finally:
        graph.deploy(graph.config)
        until(lambda: asked() == "answered", 60, "the remote is asked again")


@pytest.mark.spec("J5")
def test_a_client_that_leaves_ends_the_work_at_the_remote(graph: Graph, far: OpenAI) -> None:
    last = all_events(graph)[-1]["seq"]
    stream = far.chat.completions.create(
        model="far-chat", messages=HELLO, max_tokens=300, n=16, stream=True
    )
    next(iter(stream))
    stream.close()

    def left(kind: str, model: str) -> bool:
        """Both here and there, which is here too."""
        return any(
            (event["kind"], event["model"], event["outcome"]) == (kind, model, "left")
            for event in all_events(graph)
            if event["seq"] > last and "outcome" in event
        )

    until(lambda: left("remote_answer", "far-chat"), 60, "the egress is settled as left")
    until(lambda: left("capability_run", "plain-chat"), 60, "the engine stopped its work")
