"""Unloading an engine of each library by hand, as its contract has it: the node agent kills it."""

from typing import Any

import pytest

from tests.graph.conftest import Graph, name_of, until
from tests.support.graph_commands import by_hand, level
from tests.support.graph_processes import books_are_true

WITHIN_S = 90
ENGINES = {
    "vllm": "tiny-chat",
    "sentence_transformers": "all-minilm-l6-v2",
    "faster_whisper": "tiny.en",
    "vits": "joe",
    "silero": "silero-vad",
    "diffusers": "tiny-draw",
}


def processes(graph: Graph, model: str) -> set[int]:
    """Of the model's ticket, after which they are named."""
    tickets = [t["ticket"] for t in graph.state()["tickets"] if t["model"] == model]
    names = {f"engine:{ticket}"[:15] for ticket in tickets}  # the kernel keeps no more
    return {pid for pid in graph.engines() if name_of(pid) in names}


def is_idle(graph: Graph, model: str) -> bool:
    """Whether it is loaded, and would leave when it is asked to."""
    rows = [t for t in graph.state()["tickets"] if t["model"] == model]
    return any(t["state"] == "resident" and t["idle_s"] is not None for t in rows)


def unloads(graph: Graph, model: str, after: int) -> list[dict[str, Any]]:
    told = [e for e in graph.events() if e["seq"] > after and e["kind"] == "model_unload"]
    return [e for e in told if e["model"] == model]


@pytest.mark.spec("H9")
@pytest.mark.parametrize("engine", ENGINES)
def test_unload_by_hand_ends_the_engine_gives_its_bytes_back_and_may_be_repeated(
    graph: Graph, engine: str
) -> None:
    model = ENGINES[engine]
    seen = set[int]()

    def unloaded() -> bool:
        """False: its keep-warm was over before the request came."""
        last = graph.state()["sequence"]
        by_hand(graph, "load", model)
        until(lambda: is_idle(graph, model), WITHIN_S, f"{model} is loaded and not in use")
        mine = processes(graph, model)
        assert not mine & seen, "each load is a process of its own"
        seen.update(mine)
        by_hand(graph, "unload", model)
        told = until(lambda: unloads(graph, model, last), WITHIN_S, "its bytes are seen back")
        assert not mine & {*graph.engines()}
        return bool(mine) and [e["reason"] for e in told] == ["manual"]

    until(unloaded, WITHIN_S, "the request was in time")
    until(lambda: books_are_true(graph), WITHIN_S, "the books equal the measured bytes")
    last = graph.state()["sequence"]
    assert by_hand(graph, "unload", model)["tickets"] == []
    assert level(graph, model) == "cold" and not unloads(graph, model, last)
    assert unloaded() or unloaded(), "as before"
