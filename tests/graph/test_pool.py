"""What an engine knew is there after its end, in the whole graph, and people see where."""

import os
import signal
from typing import Any

import pytest
from openai import OpenAI

from models.train_vision import QUESTIONS, answer
from tests.graph.conftest import Graph, until
from tests.support.drawings import FACTS, drawing, uri
from tests.support.engine_host import slab_bytes
from tests.support.graph_commands import read_command, send
from tests.support.graph_processes import victims

CHAT, EYES = "tiny-chat", "tiny-describe"
SEEN = 211  # of the drawings
BLOCK = 128  # tokens of a KV block of vLLM's CPU build
TURNS: list[Any] = [
    {"role": "user", "content": "Who holds the memory, and who gives it back? " * 20},
    {"role": "assistant", "content": "The arbiter, and the engine that leaves."},
    {"role": "user", "content": "And then?"},
]
WITHIN_S = 60


def ask(client: OpenAI) -> tuple[str, int, int]:
    """The answer, the tokens of the prompt, and how many of these were known already."""
    answer = client.chat.completions.create(
        model=CHAT, messages=TURNS, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
    )
    usage = answer.usage
    assert usage is not None
    known = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    return answer.choices[0].message.content or "", usage.prompt_tokens, known or 0


def slab(graph: Graph, owner: str = f"chat/{CHAT}", content: str = "kv") -> dict[str, Any]:
    """That of the model, which is in use before any other of its owner."""
    all_slabs = [s["slab"] for s in graph.state()["slabs"]]
    own = [s for s in all_slabs if (s["owner"], s["content"]) == (owner, content)]
    return max(own, key=lambda row: (row["ticket"] or "", row["rows_count"]), default={})


def is_kept(graph: Graph, prompt: int) -> bool:
    return bool(slab(graph).get("rows_count", 0) >= prompt // BLOCK)


def kill_engines(graph: Graph) -> None:
    for pid in graph.engines():
        os.kill(pid, signal.SIGKILL)
    until(lambda: not graph.engines(), WITHIN_S, "the engines have ended")


def slabs_are_held(graph: Graph) -> bool:
    """Whether a node agent lives that would keep them if every engine ended now."""
    return any(slab_bytes(pid) for pid in victims(graph, "node agent"))


@pytest.fixture
def kept(graph: Graph, client: OpenAI) -> str:
    """The answer to a conversation of some blocks, which are all in the model's slab."""
    ask(client)
    answer, prompt, known = ask(client)  # equal to the last bit only where blocks are found
    assert prompt > 2 * BLOCK
    assert known == prompt // BLOCK * BLOCK
    until(lambda: is_kept(graph, prompt), WITHIN_S, "every whole block is in the slab")
    return answer


def knows(client: OpenAI, answer: str) -> None:
    again, prompt, known = ask(client)
    assert known == prompt // BLOCK * BLOCK
    assert again == answer


@pytest.mark.spec("E1", "G4")
def test_conversation_outlives_a_killed_engine(graph: Graph, client: OpenAI, kept: str) -> None:
    kill_engines(graph)
    knows(client, kept)


@pytest.mark.spec("E1", "E7", "G4")
def test_conversation_outlives_an_eviction_and_the_command_shows_its_slab(
    graph: Graph, client: OpenAI, kept: str
) -> None:
    send(graph, "POST", f"/arbiter/models/unload/{CHAT}")
    until(lambda: slab(graph).get("ticket") is None, WITHIN_S, "the slab is idle")
    shown = read_command(graph, "pool")
    [row] = [s["slab"] for s in shown["slabs"] if s["slab"] == slab(graph)]
    [kv] = [c for c in shown["contents"] if c["content"]["content"] == "kv"]
    assert 0 < kv["hit_fraction"] < 1 and kv["content"]["stored_count"] >= row["rows_count"]
    assert row["content"] == "kv" and row["allocated_bytes"] > 0 and row["namespace"]
    knows(client, kept)
    until(lambda: slab(graph)["hits_count"] > row["hits_count"], WITHIN_S, "its hits are shown")
    assert slab(graph)["load_s"] > row["load_s"]


@pytest.mark.spec("E6", "G4")
def test_removed_tenant_leaves_the_slab_of_an_engine_that_ended(
    graph: Graph, client: OpenAI, kept: str
) -> None:
    """The tenant of all requests without a key: what is known of it later was stored since. Rows of
    tenants that had keys in other tests may stay."""
    assert kept

    def forget() -> int:
        """Returns how many rows stay."""
        _, prompt, _ = ask(client)
        send(graph, "POST", f"/arbiter/models/unload/{CHAT}")
        until(lambda: slab(graph).get("ticket") is None, WITHIN_S, "the slab is idle")
        most = slab(graph)["rows_count"] - prompt // BLOCK
        send(graph, "DELETE", "/arbiter/tenants/default/kept")
        until(lambda: slab(graph).get("rows_count", 0) <= most, WITHIN_S, "its rows have left")
        return int(slab(graph).get("rows_count", 0))

    stay = forget()
    _, prompt, known = ask(client)
    assert known < BLOCK
    kept_again = stay + prompt // BLOCK
    until(
        lambda: slab(graph).get("rows_count", 0) >= kept_again,
        WITHIN_S,
        "what was computed anew is kept again",
    )


@pytest.mark.spec("E1")
def test_next_agent_finds_the_slabs_of_living_engines(
    graph: Graph, client: OpenAI, kept: str
) -> None:
    rows = slab(graph)["rows_count"]
    for pid in victims(graph, "node agent"):
        os.kill(pid, signal.SIGKILL)
    until(lambda: slabs_are_held(graph), WITHIN_S, "the next agent has them open")
    knows(client, kept)
    until(lambda: slab(graph).get("rows_count") == rows, WITHIN_S, "the next agent shows it")
    kill_engines(graph)
    knows(client, kept)


@pytest.mark.spec("E1", "B4")
def test_slabs_of_a_living_engine_are_on_no_tickets_account(
    graph: Graph, client: OpenAI, kept: str
) -> None:
    state = graph.state()
    [ticket] = [t for t in state["tickets"] if t["model"] == CHAT]
    assert not any("host" in device for device in ticket["measured_bytes"])
    assert sum(s["slab"]["allocated_bytes"] for s in state["slabs"]) > 0


@pytest.mark.spec("E1", "H8")
def test_known_picture_is_not_encoded_again_by_the_next_engine(
    graph: Graph, client: OpenAI
) -> None:
    def counts() -> tuple[int, int]:
        found = slab(graph, f"vision/{EYES}", "picture")
        return found.get("misses_count", 0), found.get("hits_count", 0)

    misses, hits = counts()
    see(client, QUESTIONS["describe"][0])
    until(lambda: counts() == (misses + 1, hits), WITHIN_S, "one run of the encoder")
    kill_engines(graph)
    assert see(client, QUESTIONS["shape"][0]) == answer("shape", FACTS[SEEN])
    until(lambda: counts()[1] > hits, WITHIN_S, "its hit is shown")
    assert counts() == (misses + 1, hits + 1)


def see(client: OpenAI, question: str) -> str:
    """What the model says of a picture that no other test shows."""
    part = {"type": "image_url", "image_url": {"url": uri(drawing(SEEN))}}
    asked: Any = [{"role": "user", "content": [{"type": "text", "text": question}, part]}]
    said = client.chat.completions.create(model=EYES, messages=asked, temperature=0, max_tokens=16)
    return (said.choices[0].message.content or "").strip()
