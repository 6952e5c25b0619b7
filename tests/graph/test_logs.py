"""Names and logs a person can follow: a request through front and replica to its ticket."""

import uuid

import pytest
from openai import OpenAI

from tests.graph.conftest import Graph, command_of, until
from tests.support.graph_processes import log_of

CHAT = "tiny-chat"


@pytest.mark.spec("K5")
def test_a_request_is_found_in_the_logs_with_its_ticket(graph: Graph, client: OpenAI) -> None:
    request = f"trace-{uuid.uuid4().hex[:8]}"
    answer = client.chat.completions.with_raw_response.create(
        model=CHAT,
        messages=[{"role": "user", "content": "a secret nobody logs"}],
        max_tokens=2,
        extra_headers={"x-request-id": request},
    )
    assert answer.headers["x-request-id"] == request

    def resident() -> list[str]:
        told = graph.state()["tickets"]
        return [t["ticket"] for t in told if (t["model"], t["state"]) == (CHAT, "resident")]

    [ticket] = until(resident, 60, "its holder is in the arbiter's present epoch")

    def lines(replica: str) -> list[str]:
        file = log_of(graph, replica)
        text = file.read_text(errors="replace") if file else ""
        assert "a secret nobody logs" not in text
        return [line for line in text.splitlines() if request in line]

    told = until(lambda: lines("chat"), 60, "the replica's log names the request")
    assert any(f"{CHAT} under {ticket}" in line for line in told)
    told = until(lambda: lines("front"), 60, "the front's log names the request")
    assert any(f"/v1/chat/completions {CHAT} -> chat" in line for line in told)


@pytest.mark.spec("K5")
def test_processes_carry_names_a_person_can_read(graph: Graph, client: OpenAI) -> None:
    client.chat.completions.create(
        model=CHAT, messages=[{"role": "user", "content": "x"}], max_tokens=1
    )
    commands = " ".join(command_of(pid) for pid in graph.workers())
    for name in ("ArbiterActor", "NodeAgent", "ServeReplica:front:front", "ServeReplica:chat:chat"):
        assert f"ray::{name}" in commands
