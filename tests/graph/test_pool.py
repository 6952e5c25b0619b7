"""What an engine knew is there after its end, in the whole graph, and people see where."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from arbiter.pool import Mark, SlabUnusable, SlabView, Term
from arbiter.units import Content
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
    killed = set(graph.engines())
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not killed & set(graph.engines()), WITHIN_S, "the engines have ended")


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


@pytest.mark.spec("G2", "G4")
def test_conversation_keeps_the_term_that_it_asked_for_once_and_its_blocks_are_one_group(
    graph: Graph, client: OpenAI
) -> None:
    before = marks(graph).keys()

    def new(term: Term) -> dict[bytes, float]:
        """When each row of that term expires."""
        rows = marks(graph).values()
        return {m.key: m.expires_s for m in rows if m.kind == term and m.key not in before}

    first, said = turn(client, "of-a-day", [], x_kv_term="extended")
    until(lambda: len(new(Term.EXTENDED)) >= first, WITHIN_S, "its rows stay for a day")
    known = new(Term.EXTENDED)
    later, _ = turn(client, "of-a-day", said)
    assert later >= first + 2

    def is_one_group() -> bool:
        """All blocks of the later turn expire together, those of the first later than they did."""
        rows = new(Term.EXTENDED)
        last = [key for key, expires_s in rows.items() if max(rows.values()) - expires_s < 1]
        moved = [key for key in known if rows.get(key, 0) > known[key]]
        return len(last) >= later and len(moved) >= first

    until(is_one_group, WITHIN_S, "so do those of its next turn, which asks for none")
    rows = new(Term.EXTENDED).keys()
    other, _ = turn(client, "of-an-hour", [])
    until(lambda: len(new(Term.LONG)) >= other, WITHIN_S, "others stay as their model has it")
    assert new(Term.EXTENDED).keys() == rows


def turn(client: OpenAI, conversation: str, said: list[Any], **more: Any) -> tuple[int, list[Any]]:
    """Asks once more; returns the whole blocks of the prompt, and all that has been said."""
    asks = " ".join(f"Lease {n} of the talk {conversation}: who holds it?" for n in range(40))
    said = [*said, {"role": "user", "content": asks}]
    fields = {"x_conversation_id": conversation, "ignore_eos": True, **more}
    answer = client.chat.completions.create(
        model=CHAT, messages=said, max_tokens=2, extra_body=fields
    )
    assert answer.usage is not None
    spoken = {"role": "assistant", "content": answer.choices[0].message.content or ""}
    return answer.usage.prompt_tokens // BLOCK, [*said, spoken]


def marks(graph: Graph) -> dict[bytes, Mark]:
    """Of all rows of KV in the slabs that the node agent has open, by key."""
    found = {}
    for pid in victims(graph, "node agent"):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError, SlabUnusable):  # it was closed meanwhile
                if "host-pool" not in os.readlink(fd):
                    continue
                with contextlib.closing(SlabView(fd)) as view:
                    if view.content == Content.KV:
                        found |= {mark.key: mark for _, mark in view.marks()}
    return found


@pytest.mark.spec("E1")
def test_next_agent_finds_the_slabs_of_living_engines(
    graph: Graph, client: OpenAI, kept: str
) -> None:
    rows = slab(graph)["rows_count"]
    with stays(graph):  # an agent may start for longer than the model stays warm
        for pid in victims(graph, "node agent"):
            os.kill(pid, signal.SIGKILL)
        until(lambda: slabs_are_held(graph), WITHIN_S, "the next agent has them open")
        knows(client, kept)
        # Rows of the last answer may have come since they were counted.
        until(lambda: slab(graph).get("rows_count", 0) >= rows, WITHIN_S, "the next agent shows it")
        kill_engines(graph)
        knows(client, kept)


@contextlib.contextmanager
def stays(graph: Graph) -> Iterator[None]:
    """The model is loaded until the end of the block, used or not."""
    send(graph, "PUT", f"/arbiter/residency/{CHAT}", {"floor": "device"})
    try:
        yield
    finally:
        send(graph, "PUT", f"/arbiter/residency/{CHAT}", {"floor": "cold"})


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
        facts = slab(graph, f"vision/{EYES}", "picture")
        return facts.get("misses_count", 0), facts.get("hits_count", 0)

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
