"""A model whose context is too short for a request gets a longer one, on the running system."""

from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from arbiter.units import MIB
from tests.graph.conftest import Graph

MODEL = "grow-chat"  # 256 tokens, which may become 2048


def ask(client: OpenAI, words: int) -> int:
    """Tokens of the prompt."""
    said = [{"role": "user", "content": "the " * words}]
    answer = client.chat.completions.create(model=MODEL, messages=said, max_tokens=2)  # type: ignore[arg-type]
    assert answer.usage and answer.choices[0].message.content is not None
    return answer.usage.prompt_tokens


def ticket(graph: Graph) -> dict[str, Any]:
    [found] = [t for t in graph.state()["tickets"] if t["model"] == MODEL]
    return dict(found)


@pytest.mark.spec("A14")
def test_a_request_longer_than_the_context_has_its_model_grow_under_the_same_ticket(
    graph: Graph, client: OpenAI
) -> None:
    ask(client, 10)
    before, engines = ticket(graph), set(graph.engines())
    assert ask(client, 400) > 256
    after = ticket(graph)
    assert after["ticket"] == before["ticket"] and not engines <= set(graph.engines())
    [grown] = [e for e in graph.events() if e["kind"] == "growth_granted"]
    assert grown["size_bytes"] == 48 * MIB
    more = sum(after["charged_bytes"].values()) - sum(before["charged_bytes"].values())
    assert more > 0
    engines = set(graph.engines())
    with pytest.raises(BadRequestError):
        ask(client, 3_000)  # longer than it may ever be: nobody is disturbed for it
    assert ask(client, 10) and engines == set(graph.engines())
