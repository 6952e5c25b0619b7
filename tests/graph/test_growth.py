"""A model with a short context grows for a request that needs a longer one, on real vLLM."""

from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.graph.conftest import GROWN_TOKENS, Graph, until
from tests.support.graph_commands import by_hand, read_command

MODEL, NEIGHBOUR = "growing-chat", "wide-chat"
WORDS = "the lease of a ticket is what counts "  # some nine tokens
HELLO: Any = [{"role": "user", "content": "Who holds the memory?"}]
LONG: Any = [{"role": "user", "content": WORDS * 40}]


def ticket(graph: Graph) -> dict[str, Any]:
    [found] = [t for t in graph.state()["tickets"] if t["model"] == MODEL]
    return dict(found)


# What is charged is what was measured where that is more, and two processes differ by a few MB.
NEAR_BYTES = 40 << 20


def residents(graph: Graph) -> set[str]:
    return {t["model"] for t in graph.state()["tickets"] if t["state"] == "resident"}


def charged(graph: Graph) -> int:
    return int(sum(ticket(graph)["charged_bytes"].values()))


@pytest.mark.spec("A14")
def test_request_longer_than_the_context_grows_its_model_and_evicts_an_idle_one(
    graph: Graph, client: OpenAI
) -> None:
    def tokens(messages: Any) -> Any:
        asked = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=2)
        assert asked.usage
        return asked.usage.prompt_tokens

    client.chat.completions.create(model=NEIGHBOUR, messages=HELLO, max_tokens=2)
    assert tokens(HELLO) < 256
    assert {MODEL, NEIGHBOUR} <= residents(graph)
    before, is_small = ticket(graph), charged(graph)
    with pytest.raises(openai.BadRequestError, match=f"may grow to {GROWN_TOKENS}"):
        tokens([{"role": "user", "content": WORDS * 400}])
    assert charged(graph) == is_small, "nobody grows for what would not fit all the same"

    assert tokens(LONG) > 256
    grown = ticket(graph)
    assert grown["ticket"] == before["ticket"] and charged(graph) > is_small + (400 << 20)
    kinds = [e["kind"] for e in graph.events() if e["ticket"] == before["ticket"]]
    assert kinds.count("growth_granted") == 1
    assert NEIGHBOUR not in residents(graph)
    response = client.responses.create(model=MODEL, input=WORDS * 40, max_output_tokens=16)
    assert response.output_text
    assert ticket(graph)["ticket"] == before["ticket"]
    until(lambda: charged(graph) < is_small + NEAR_BYTES, 60, "idle, it gives back the growth")
    assert tokens(HELLO) < 256 and ticket(graph)["ticket"] == before["ticket"]
    read_command(graph, "grow", MODEL)
    until(lambda: charged(graph) > is_small + (400 << 20), 60, "it grows by hand")
    assert read_command(graph, "shrink", MODEL) == {"model": MODEL, "size": "first"}
    until(lambda: charged(graph) < is_small + NEAR_BYTES, 60, "and gives back")
    by_hand(graph, "unload", MODEL)
