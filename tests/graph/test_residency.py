"""Models set where they are to be by hand, on the running system."""

import json
import os
import subprocess
import urllib.request
from typing import Any

import pytest
from openai import OpenAI

from deployments.front import keys
from tests.graph.conftest import BIN, Graph, until

CHAT, EMBEDDING = "tiny-chat", "all-minilm-l6-v2"


def key(graph: Graph) -> str:
    """The one that was made at the first start."""
    path = keys.keys_path(None, graph.table["arbiter"]["state_file"])
    return keys.first_key_path(path).read_text().strip()


def send(graph: Graph, method: str, path: str, body: object = None) -> Any:
    headers = {"content-type": "application/json", "authorization": f"Bearer {key(graph)}"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(graph.url + path, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def said(graph: Graph, *words: str) -> Any:
    env = os.environ | {"ARBITER_KEY": key(graph), "ARBITER_URL": graph.url}
    done = subprocess.run(
        [BIN / "arbiter", *words, "--json"],
        env=env, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def level(graph: Graph, model: str = CHAT) -> str:
    return str(send(graph, "GET", "/arbiter/residency")["models"][model]["level"])


def emptied(graph: Graph) -> bool:
    """Nothing is loaded; what is idle is asked to go."""
    loaded = {t["model"] for t in graph.state()["tickets"]}
    for model in loaded:
        send(graph, "POST", f"/arbiter/models/unload/{model}")
    return not loaded


@pytest.mark.spec("D8")
def test_a_model_is_loaded_and_unloaded_by_hand(graph: Graph, client: OpenAI) -> None:
    """With nobody asking for it, and from zero replicas if that is what there is."""
    until(lambda: emptied(graph), 30, "nothing is loaded, so nothing is about to leave")
    said(graph, "load", CHAT)
    assert CHAT in said(graph, "residency")
    until(lambda: level(graph) == "device", 60, "it is resident")
    until(lambda: said(graph, "unload", CHAT) and level(graph) == "cold", 30, "it is gone")
    hello = [{"role": "user", "content": "Who holds the memory?"}]
    assert client.chat.completions.create(model=CHAT, messages=hello, max_tokens=2).choices  # type: ignore[arg-type]


@pytest.mark.spec("D8", "C5")
def test_a_floor_and_pressure_set_over_http_move_models(graph: Graph, client: OpenAI) -> None:
    """Pressure takes what is idle and is not text; a floor brings a model in and lets it go."""
    try:
        said = send(graph, "PUT", f"/arbiter/residency/{CHAT}", {"floor": "device"})
        assert said == {"model": CHAT, "floor": "device"}
        until(lambda: level(graph) == "device", 60, "the floor has brought it in")
        client.embeddings.create(model=EMBEDDING, input="Who holds the memory?")
        until(lambda: level(graph, EMBEDDING) == "device", 30, "embeddings are beside it")
        node = {"where": graph.node, "level": "critical", "term_s": 60}
        assert send(graph, "POST", "/arbiter/pressure", node)["level"] == "critical"
        until(lambda: level(graph, EMBEDDING) == "cold", 30, "pressure has taken what was idle")
        assert level(graph) == "device"
        left = [e for e in graph.events() if e["kind"] == "model_unload"][-1]
        assert (left["model"], left["reason"]) == (EMBEDDING, "pressure")
    finally:
        calm = {"where": graph.node, "level": "nominal"}
        send(graph, "POST", "/arbiter/pressure", calm)
        send(graph, "PUT", f"/arbiter/residency/{CHAT}", {"floor": "cold"})
    until(lambda: level(graph) == "cold", 30, "without its floor it has gone")
