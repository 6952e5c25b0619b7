"""A client hangs up, at every stage of its request: nothing it held is left, and nothing is loaded
for nobody. Through Serve's proxy, front, replica and real engines.
"""

import json
import os
import socket
from typing import Any

import pytest

from tests.graph.conftest import Graph, until
from tests.support.graph_commands import unload_all
from tests.support.graph_processor import Processor, serves

LEFT, EMBED = "left-chat", "all-minilm-l6-v2"  # the first is nobody else's, and soon gone
# Sixteen answers of all the tokens the model's context holds: half a minute of work on two cores.
LONG = {
    "model": LEFT,
    "messages": [{"role": "user", "content": "Who holds the memory?"}],
    "max_tokens": 1_900,
    "n": 16,
    "ignore_eos": True,
}
STOPS_WITHIN_S = 15.0  # of what takes twice as long when it is not stopped


class Caller:
    """One HTTP request on a connection of its own; its client leaves at the end of the block."""

    def __init__(self, graph: Graph, path: str, body: dict[str, Any]) -> None:
        host, _, port = graph.url.removeprefix("http://").partition(":")
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        self.line = socket.create_connection((host, int(port)), timeout=120)
        self.line.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)

    def hears(self) -> bytes:
        """What came next; waits for it."""
        return self.line.recv(1 << 16)

    def __enter__(self) -> "Caller":
        return self

    def __exit__(self, *_: object) -> None:
        self.line.close()


def tickets(graph: Graph, model: str) -> list[dict[str, Any]]:
    return [t for t in graph.state()["tickets"] if t["model"] == model]


def waits(graph: Graph, model: str) -> bool:
    return any(q["model"] == model for q in graph.state()["queue"])


def in_flight(graph: Graph, model: str) -> int:
    return sum(t["inflight"] for t in tickets(graph, model))


def told(graph: Graph, after: int, kind: str, model: str) -> list[dict[str, Any]]:
    return [e for e in graph.events()
            if e["seq"] > after and e["kind"] == kind and e.get("model") == model]  # fmt: skip


def nothing_of(graph: Graph, model: str) -> None:
    """No ticket, no engine, in the books or outside."""
    until(lambda: not tickets(graph, model), 60, f"no ticket of {model} is left")
    until(lambda: engines_are_known(graph), 60, "each engine has its ticket")


def engines_are_known(graph: Graph) -> bool:
    holding = [t for t in graph.state()["tickets"] if t["state"] not in ("queued", "closed")]
    return len({os.getpgid(pid) for pid in graph.engines()}) == len(holding)


@pytest.mark.spec("A8", "J8", "J9")
def test_a_client_that_leaves_while_its_model_loads_ends_the_load(graph: Graph) -> None:
    until(lambda: unload_all(graph), 60, "nothing is loaded")
    last = graph.state()["sequence"]
    with Caller(graph, "/v1/chat/completions", LONG):
        until(lambda: [t["state"] for t in tickets(graph, LEFT)] == ["loading"], 60, "it loads")
        chat = graph.get("/ready")["capabilities"]["chat"]
        assert (chat["state"], chat["models"][LEFT]) == ("loading", "loading")
    nothing_of(graph, LEFT)
    assert [e["reason"] for e in told(graph, last, "model_unload", LEFT)] == ["withdrawn"]
    assert not told(graph, last, "model_load", LEFT)


@pytest.mark.spec("A8", "J8")
def test_a_client_that_leaves_while_queued_has_nothing_loaded(graph: Graph) -> None:
    """Behind a stream that the barrier cannot end in time."""
    with Caller(graph, "/v1/chat/completions", LONG | {"stream": True}) as busy:
        until(lambda: serves(graph, LEFT), 60, "it streams")
        assert b"200 OK" in busy.hears()
        last = graph.state()["sequence"]
        with Caller(graph, "/v1/embeddings", {"model": EMBED, "input": "a ticket"}):
            until(lambda: waits(graph, EMBED), 60, "it waits in the line")
        until(lambda: not waits(graph, EMBED), 60, "it has left the line")
        nothing_of(graph, EMBED)
        assert not told(graph, last, "model_load", EMBED)
        assert in_flight(graph, LEFT) == 1
    until(lambda: in_flight(graph, LEFT) == 0, STOPS_WITHIN_S, "nobody uses it")


@pytest.mark.spec("A8", "J8")
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_during_its_answer_stops_the_engine(
    graph: Graph, stream: bool
) -> None:
    with Caller(graph, "/v1/chat/completions", LONG | {"stream": stream}):
        until(lambda: serves(graph, LEFT), 60, "it serves")
        processor = Processor(graph, LEFT)
        until(processor.has_computed, 60, "the engine computes")
    until(processor.rests, STOPS_WITHIN_S, "the engine has stopped")
    until(lambda: in_flight(graph, LEFT) == 0, STOPS_WITHIN_S, "nobody uses it")
    nothing_of(graph, LEFT)
