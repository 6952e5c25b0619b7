"""Models set where they are to be by hand, on the running system."""

from typing import Any

import pytest
from openai import OpenAI

from deployments.client import Client, ModelResidency
from tests.graph.conftest import Graph, until
from tests.support.graph_commands import (
    CHAT,
    EMBEDDING,
    environment,
    level,
    read_command,
    run_command,
    send,
    unload_all,
)

LEFT = "left-chat"
FILLS, LONG, FILLED_BYTES = 12, 400, 4 << 20  # prompts of so many words fill that much of a cache


@pytest.mark.spec("D8")
def test_a_model_is_loaded_and_unloaded_by_hand(graph: Graph, client: OpenAI) -> None:
    """With nobody asking for it, and from zero replicas if that is what there is."""
    until(lambda: unload_all(graph), 60, "nothing is loaded, so nothing is about to leave")
    read_command(graph, "load", CHAT)
    assert CHAT in read_command(graph, "residency")
    until(lambda: level(graph) == "device", 60, "it is resident")
    until(lambda: read_command(graph, "unload", CHAT) and level(graph) == "cold", 60, "it is gone")
    hello = [{"role": "user", "content": "Who holds the memory?"}]
    assert client.chat.completions.create(model=CHAT, messages=hello, max_tokens=2).choices  # type: ignore[arg-type]


@pytest.mark.spec("D8")
def test_python_reads_and_sets_where_a_model_is(graph: Graph) -> None:
    until(lambda: unload_all(graph), 60, "nothing is loaded, so nothing is about to leave")
    with Client(graph.url, key=environment(graph)["ARBITER_KEY"]) as python:

        def seen() -> ModelResidency:
            return python.residency()[CHAT]

        assert (seen().level, seen().floor, seen().loading_s) == ("cold", "cold", None)
        python.load(CHAT)
        loads = until(lambda: [s.loading_s for s in [seen()] if s.loading_s], 60, "it loads")
        assert loads[0] > 0
        until(lambda: seen().level == "device", 60, "it is resident")
        assert read_command(graph, "residency")[CHAT]["level"] == "device"
        try:
            python.set_floor(CHAT, "device")
            assert seen().floor == "device"
        finally:
            python.set_floor(CHAT, "cold")
        until(lambda: python.unload(CHAT) == () and seen().level == "cold", 60, "it is gone")


@pytest.mark.spec("D8", "C5")
def test_a_floor_and_pressure_set_over_http_move_models(graph: Graph, client: OpenAI) -> None:
    """Pressure takes what is idle and is not text; a floor brings a model in and lets it go."""
    try:
        said = send(graph, "PUT", f"/arbiter/residency/{CHAT}", {"floor": "device"})
        assert said == {"model": CHAT, "floor": "device"}
        until(lambda: level(graph) == "device", 60, "the floor has brought it in")
        client.embeddings.create(model=EMBEDDING, input="Who holds the memory?")
        until(lambda: level(graph, EMBEDDING) == "device", 60, "embeddings are beside it")
        last = graph.state()["sequence"]
        node = {"where": graph.node, "level": "critical", "term_s": 60}
        assert send(graph, "POST", "/arbiter/pressure", node)["level"] == "critical"
        until(lambda: level(graph, EMBEDDING) == "cold", 60, "pressure has taken what was idle")
        assert level(graph) == "device"
        # What an earlier test used may be there too, and idle.
        gone = until(lambda: unloads_of(graph, EMBEDDING, last), 60, "its bytes are seen back")
        assert gone == ["pressure"] and not unloads_of(graph, CHAT, last)
    finally:
        calm = {"where": graph.node, "level": "nominal"}
        send(graph, "POST", "/arbiter/pressure", calm)
        send(graph, "PUT", f"/arbiter/residency/{CHAT}", {"floor": "cold"})
    until(lambda: level(graph) == "cold", 60, "without its floor it has gone")


def unloads_of(graph: Graph, model: str, last: int) -> list[str]:
    """Why a model went after an event."""
    events = [e for e in graph.events() if e["seq"] > last and e["kind"] == "model_unload"]
    return [event["reason"] for event in events if event["model"] == model]


@pytest.mark.spec("D7")
def test_compacted_engine_gives_its_filled_cache_back_and_answers(
    graph: Graph, client: OpenAI
) -> None:
    """vLLM touches the pages of its KV cache as it fills them, and keeps them."""
    ask(client, "Who holds the memory?")
    until(lambda: row(graph).get("settled_bytes"), 60, "its first use is over and measured")
    first = held_bytes(graph)
    for number in range(FILLS):
        ask(client, f"{number} " * LONG)
    until(lambda: held_bytes(graph) > first + FILLED_BYTES, 60, "the cache is filled")
    until(lambda: row(graph).get("idle_s") is not None, 60, "it is idle")
    ticket = row(graph)["ticket"]
    done = send(graph, "POST", "/arbiter/compact", {"models": [CHAT]})
    assert (done["count"], done["spared"]) == (1, [])
    ask(client, "Who holds the memory?")
    until(lambda: held_bytes(graph), 60, "the new process is measured")
    assert held_bytes(graph) < first + FILLED_BYTES // 2 and row(graph)["ticket"] != ticket
    until(lambda: level(graph, LEFT) == "cold", 60, "what an earlier test used has left")
    said = run_command(graph, "compact", LEFT)
    assert f"{LEFT} stays as it is: it is not loaded" in said


def ask(client: OpenAI, text: str) -> None:
    said: Any = [{"role": "user", "content": text}]
    assert client.chat.completions.create(model=CHAT, messages=said, max_tokens=2).choices


def row(graph: Graph) -> dict[str, Any]:
    return next((dict(t) for t in graph.state()["tickets"] if t["model"] == CHAT), {})


def held_bytes(graph: Graph) -> int:
    return sum(row(graph).get("measured_bytes", {}).values())
