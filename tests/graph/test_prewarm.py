"""Prefixes that are warm before the first request: at each load, and when a client says so."""

from typing import Any

import pytest
from openai import OpenAI

from tests.graph.conftest import INSTRUCTIONS, Graph, until
from tests.support.graph_commands import unload_all

CHAT = "plain-chat"
BLOCK = 128  # tokens that vLLM caches together on a CPU
MANUAL = {"role": "system", "content": "A ticket is a claim on bytes; a lease is a ticket. " * 40}
HELLO = {"role": "user", "content": "Who holds the memory?"}


def warmed(graph: Graph, last: int) -> list[tuple[str, str]]:
    """Causes of the pre-warms after an event, and how they ended."""
    events = [e for e in graph.events() if e["seq"] > last and e["kind"] == "prewarm"]
    return [(event["cause"], event["outcome"]) for event in events if event["model"] == CHAT]


def runs(graph: Graph, last: int) -> list[str]:
    """Ids of the requests that have ended since an event."""
    events = [e for e in graph.events() if e["seq"] > last and e["kind"] == "capability_run"]
    return [event["request_id"] for event in events if event["model"] == CHAT]


def cached(client: OpenAI, system: dict[str, Any]) -> int:
    answer = client.chat.completions.create(model=CHAT, messages=[system, HELLO], max_tokens=1)  # type: ignore[list-item]
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


@pytest.mark.spec("G1", "G6", "C10")
def test_prewarm_loads_the_model_and_first_requests_find_their_prefixes_cached(
    graph: Graph, client: OpenAI
) -> None:
    until(lambda: unload_all(graph), 60, "nothing is loaded")
    last = graph.state()["sequence"]
    stable = [{**MANUAL, "stable": True}, HELLO]
    body = {"model": CHAT, "messages": stable}
    headers = {"x-request-id": "prewarm-1", "x-conversation-id": "session-1"}
    status, said = graph.post("/v1/prewarm", body, headers=headers)
    assert (status, said["id"]) == (202, "prewarm-1") and said["state"] in ("cold", "starting")
    both = [("load", "warmed"), ("session", "warmed")]
    until(lambda: sorted(warmed(graph, last)) == both, 60, "both prefixes are warm")
    assert cached(client, MANUAL) >= BLOCK
    assert cached(client, {"role": "system", "content": INSTRUCTIONS}) >= BLOCK

    until(lambda: len(runs(graph, last)) == 3, 60, "the session and two chats are accounted for")
    assert "prewarm-1" in runs(graph, last)
    until(lambda: unload_all(graph), 60, "it is gone")
    last = graph.state()["sequence"]
    cached(client, MANUAL)  # a request brings it in again
    until(lambda: warmed(graph, last) == [("load", "warmed")], 60, "once more for the new engine")
